"""How objects look in a notebook: tables and texts that take its own font and colours."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

LOOK = "text-align:left;padding:2px 12px 2px 0;white-space:pre-wrap"


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; every cell is text, whatever it holds.

    >>> "<b>" in table("a caption", ["name"], [["<b>"]])
    False
    """
    head = "".join(f'<th scope="col" style="{LOOK}">{html.escape(name)}</th>' for name in columns)
    lines = ("".join(f'<td style="{LOOK}">{html.escape(str(cell))}</td>' for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    top = f'<caption style="caption-side:top;text-align:left">{html.escape(caption)}</caption>'
    return f"<table>{top}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(content: str) -> str:
    """A text in HTML, with its line breaks and columns."""
    return f'<pre style="white-space:pre-wrap">{html.escape(content)}</pre>'
