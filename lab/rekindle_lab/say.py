"""How the lab's commands end when they cannot go on."""

import sys

import typer


def fail(command: str, error: object, status: int = 2) -> typer.Exit:
    """Say why on standard error; gives what to raise. Status 2: what was given is wrong; 1: it went wrong."""
    print(f"rekindle-lab {command}: {error}", file=sys.stderr)
    return typer.Exit(status)
