"""`python -m rekindle_lab` runs the command `rekindle-lab`."""

from rekindle_lab.cli import app

app(prog_name="rekindle-lab")
