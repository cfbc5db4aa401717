"""Checks of TOML files that users write, shared by the loaders of all definitions."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class DefinitionError(ValueError):
    """A file with invalid content. The text names file, place and remedy."""


def known(table: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raises unless all keys of `table` are among `names`; the text names the nearest known key."""
    names = list(names)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise DefinitionError(f"{where}: unknown key '{key}'; {hint}there are: {', '.join(names)}")


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns the array of tables at `key`."""
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise DefinitionError(f"{key}: must be [[{key}]]")
    return value


def text(table: dict[str, Any], key: str, default: str | None = None) -> str:
    """Returns the text at `key`."""
    value = table.get(key, default)
    if not isinstance(value, str):
        raise DefinitionError(
            f"{key}: {'is missing' if value is None else f'{json.dumps(value, default=repr)} is not a text'}"
        )
    return value


def whole(table: dict[str, Any], key: str, default: int | None = None, *, low: int) -> int:
    """Returns the whole number at `key`, at least `low`."""
    value = table.get(key, default)
    if value is None:
        raise DefinitionError(f"{key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise DefinitionError(f"{key}: {value!r}; it must be a whole number of at least {low}")
    return value
