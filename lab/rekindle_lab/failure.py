"""The exit of the lab's commands after an error."""

import sys

import typer


def fail(command: str, error: object, status: int = 2) -> typer.Exit:
    """Prints the error to standard error; returns the exception to raise. Status 2: invalid input; 1: failure."""
    print(f"rekindle-lab {command}: {error}", file=sys.stderr)
    return typer.Exit(status)
