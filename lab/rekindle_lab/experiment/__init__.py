"""Runs designed experiments (docs/experiment-format.md).

`definition` (the TOML file), `order` (drawn once, written before the first run), `session` (executes the runs in order,
resumes after an interruption), `runner` (interface of a run), `command`. `rekindle_lab.runs` executes and records each
run.

For a run with a guest of Rekindle: `settings` (known settings), `guest` (the run), `subject` (the VM), `load` (the VM's
client, and `wrk.lua`), `action` (the reboot), `sampling` and `inside` (resource use of host and guest).
"""
