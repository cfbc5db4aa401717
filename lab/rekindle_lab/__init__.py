"""Experiments, statistics, models, plans and figures for Rekindle."""
