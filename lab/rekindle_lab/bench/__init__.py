"""Benchmarks: each topic measures ours and its peers in turn, and analyses the raw rows in a step of its own."""
