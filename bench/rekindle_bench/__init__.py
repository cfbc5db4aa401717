"""Benchmarks: each topic measures Rekindle and its peers in turn; the analysis of the raw rows is a separate step.

Words: a *topic* is a package here, such as `vmm`. A *case* is one function of a topic, which measures one thing and
appends *rows* (dataclass `Row` of the topic) to a CSV file. A *plan* has the repetitions and sizes. A *peer* does
the same job without Rekindle. A *way* (column `how`) is one of the things that are compared; ways are measured by turns
in *rounds*. A *trial* only checks that every case works. `README.md` describes the modules of a topic.
"""
