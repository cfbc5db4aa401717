"""One self-contained HTML page per experiment, with its plots as PNG and its tables and runs as CSV in the same folder.

`plots`, `page` (and `page.html.jinja`), `results` (a page in Markdown, for lab/results/campaigns), `command`.
"""
