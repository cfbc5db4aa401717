"""Analysis of an experiment, as in section 4.3 of the paper (Towards Fast OS Rejuvenation), with newer methods added.

- `runs` reads and checks the runs; `judge` decides for each response whether the levels differ, with the tests of
  `anova`, their `assumptions`, the sizes of the differences (`effects`) and the corrections for several responses
  (`correct`); `tables` lays the results out as the paper's tables 3 to 11; `command` prints them.
- `power` computes the number of runs before an experiment. `paper` recomputes the numbers that the paper prints.
"""
