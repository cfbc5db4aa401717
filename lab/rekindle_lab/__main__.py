"""`python -m rekindle_lab`: the same as `rekindle-lab`."""

from rekindle_lab.cli import app

app(prog_name="rekindle-lab")
