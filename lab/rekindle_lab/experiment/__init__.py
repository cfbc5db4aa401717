"""Running a designed experiment (docs/experiment-format.md).

`definition` (the TOML file), `order` (drawn once, written before the first run), `ledger` (finished runs, a line each),
`session` (one run after the other, again after an interruption), `runner` (what a run is), `guest` (a run with a guest
of Rekindle's), `sampling` and `inside` (what host and guest take), `command`.
"""
