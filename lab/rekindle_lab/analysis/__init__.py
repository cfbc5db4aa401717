"""Judging an experiment: section 4.3 of the evaluation of fast OS reboots, with what has been learnt since beside it.

`runs` (reading them, and what is wrong with them), `anova`, `assumptions`, `effects`, `power`, `judge` (one response,
then all with their corrections), `tables` (laid out as the paper's 3 to 11), `paper` (its own tables, computed again).
"""
