"""Benchmarks: each topic measures Rekindle and its peers in turn; the analysis of the raw rows is a separate step."""
