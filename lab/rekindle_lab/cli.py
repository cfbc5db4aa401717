"""The command `rekindle-lab`."""

import typer

from rekindle_lab.analysis.command import command as analyse
from rekindle_lab.models.command import command as model

app = typer.Typer(
    name="rekindle-lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Which technique is better here, what does that mean for availability, so what should be done and when."""


app.command("analyse")(analyse)
app.command("model")(model)

if __name__ == "__main__":
    app()
