"""One self-contained HTML page per experiment, with its plots as PNG and its tables and runs as CSV beside it.

`plots`, `page` (and `page.html.jinja`), `command`.
"""
