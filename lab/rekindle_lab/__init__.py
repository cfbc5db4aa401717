"""Experiments, statistics, figures and benchmarks of Rekindle."""
