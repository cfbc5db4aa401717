"""Running a designed experiment (docs/experiment-format.md).

`definition` (the TOML file), `order` (drawn once, written before the first run), `ledger` (finished runs, a line each),
`session` (one run after the other, again after an interruption), `runner` (what a run is), `command`.

A run with a guest of Rekindle's: `settings` (what it understands), `guest` (the run), `subject` (the VM), `load` (its
client, and `wrk.lua`), `action` (the reboot), `sampling` and `inside` (what host and guest take), `leftover` (what a
kill leaves), `processes` (which are the run's).
"""
