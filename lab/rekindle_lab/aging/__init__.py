"""What wears out, and when: trends in samples of hosts and guests (docs/aging-samples.md).

`samples` (reading them), `trend` (Mann-Kendall corrected for autocorrelation, Sen's slope), `exhaustion` (alarms),
`quiet` (how often it cries wolf), `command`.
"""
