"""Executes runs, of designed experiments (`experiment`) and of the benchmarks (`rekindle_bench`).

`ledger` (a line before and after each run), `execute` (one run between its two lines; what a killed one has left is
removed), `workspace` (folders and network namespaces of a run), `processes` (which belong to it), `files`.
"""
