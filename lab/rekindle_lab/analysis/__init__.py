"""Analysis of an experiment: section 4.3 of the evaluation of fast OS reboots, with newer methods added.

`runs` (reads and checks runs), `anova`, `assumptions`, `effects`, `power`, `judge` (judges one response, then all with
corrections), `tables` (laid out as the paper's 3 to 11), `paper` (recomputes the paper's tables).
"""
