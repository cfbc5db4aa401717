"""Runs designed experiments (docs/experiment-format.md).

`definition` (the TOML file), `order` (drawn once, written before the first run), `session` (runs in order, resumed
after an interruption), `runner` (interface of a run), `command`. `rekindle_lab.runs` executes and records each run.

For a run with a guest of Rekindle's: `settings` (known settings), `guest` (the run), `subject` (the VM), `load` (its
client, and `wrk.lua`), `action` (the reboot), `sampling` and `inside` (use of host and guest).
"""
