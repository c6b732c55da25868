"""The table of the page on the server beside other servers: each row names a test that exists."""

import ast
import re

from tests.repository.pages import ROOT

TABLE = re.compile(r"^## Beside other servers$(.*?)^## ", re.MULTILINE | re.DOTALL)


def rows_of(page):
    """The cells of each row of the table, without its two head rows."""
    (table,) = TABLE.findall(page)
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_each_row_names_a_test_that_exists():
    rows = rows_of((ROOT / "docs" / "server.md").read_text())
    assert len(rows) > 25
    assert len({row[0] for row in rows}) == len(rows)
    for row in rows:
        assert len(row) == 5, row
        assert all(row), row
        path, _, name = row[4].strip("`").partition("::")
        functions = [
            one.name for one in ast.parse((ROOT / "tests" / path).read_text()).body if isinstance(one, ast.FunctionDef)
        ]
        assert name in functions, row
