"""Invented rows, in the files of the real runs."""

from rekindle_bench.rows import RowFile


def write_rows(kind, path, rows):
    """Writes rows of a topic (`kind`: its module `rows`) as a run does, and reads them again."""
    file = RowFile(path, kind.Row)
    for row in rows:
        file.append(row)
    file.close()
    return kind.read(path)
