"""The command `rekindle-lab`: one subcommand from each package of the lab."""

import typer

from rekindle_lab.aging.command import app as aging
from rekindle_lab.analysis.command import command as analyse
from rekindle_lab.experiment.command import command as experiment
from rekindle_lab.models.command import command as model
from rekindle_lab.plan.command import command as plan
from rekindle_lab.report.command import command as report

app = typer.Typer(
    name="rekindle-lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Compare techniques on this machine, model their availability, and plan renewals."""


app.command("experiment")(experiment)
app.command("analyse")(analyse)
app.command("report")(report)
app.command("model")(model)
app.add_typer(aging, name="aging")
app.command("plan")(plan)

if __name__ == "__main__":
    app()
