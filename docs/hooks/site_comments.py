"""What records and functions of this project say in a way of their own, for griffe, which reads the source for mkdocstrings.

A field may be described in a comment at the end of its line. "temperature, top_p: how tokens are drawn" in a section of a
docstring describes several arguments or fields at once. A doctest stands at the end, outside of any section.
"""

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object, ObjectNode

SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", flags=re.MULTILINE)
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)


class OwnStyle(Extension):
    """Makes descriptions of comments, one line for each of several names, and code of doctests."""

    def on_attribute_instance(self, *, node: ast.AST | ObjectNode, attr: Attribute, **_: Any) -> None:
        """Called for each attribute that is read."""
        if attr.docstring is None and attr.lineno == attr.endlineno and attr.source:
            _, mark, comment = attr.source.partition("  # ")
            if mark:
                attr.docstring = Docstring(comment.strip(), parent=attr)

    def on_instance(self, *, node: ast.AST | ObjectNode, obj: Object, **_: Any) -> None:
        """Called for each object that is read."""
        if obj.docstring is not None:
            text = SEVERAL.sub(for_each, obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", text)


def for_each(found: re.Match[str]) -> str:
    r"""A description of several names, once for each.

    >>> SEVERAL.sub(for_each, "  a, b: numbers")
    '  a: numbers\n  b: numbers'
    """
    return "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", "))
