"""One self-contained HTML page per experiment, with its plots as PNG and its tables and runs as CSV in the same folder.

- `plots` draws the plots.
- `page` writes the page, from the template `page.html.jinja`.
- `results` writes a page in Markdown, for lab/results/campaigns.
- `command` is `rekindle-lab report`.
"""
