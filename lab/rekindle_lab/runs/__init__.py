"""Executes runs of designed experiments (`experiment`) and of the benchmarks (`rekindle_bench`).

`ledger` (a line before and after each run), `execute` (one run between its two lines; removes the remains of a killed
run), `workspace` (folders and network namespaces of a run), `processes` (finds the processes of a run), `files`.
"""
