"""Formats rows as tables: in plain text for a terminal, in Markdown for a page."""

from typing import Any


def table(rows: list[dict[str, Any]], title: str = "") -> str:
    """Formats rows as a table in plain text: numbers aligned to the right, words to the left."""
    if not rows:
        return f"{title}\n  (nothing)" if title else "(nothing)"
    head = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key)) for key in head] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(head, *cells, strict=True)]
    is_number_column = [all(isinstance(row.get(key), int | float | None) for row in rows) for key in head]
    lines = []
    for texts in [head, ["-" * width for width in widths], *cells]:
        aligned = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(texts, widths, is_number_column, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([title, *lines] if title else lines)


def pipes(rows: list[dict[str, Any]]) -> str:
    """Formats rows as a table in Markdown."""
    if not rows:
        return "(nothing)"
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([_cell(row.get(key)) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
