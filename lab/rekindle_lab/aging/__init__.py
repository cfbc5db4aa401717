"""Trends in samples of hosts and guests, and when a resource will be used up (docs/aging-samples.md).

`samples` (reading samples), `trend` (Mann-Kendall corrected for autocorrelation, Sen's slope), `exhaustion` (alarms),
`quiet` (rate of false alarms), `command`.
"""
