r"""Formulas and code in a text, as syntax trees that can be compared.

ReasonCache asks whether the edit distance of two trees is zero. That is equality, so trees are nested tuples here. Three kinds
of spans are parsed: fenced code (Python, with `ast`), LaTeX between dollars or in `\(...\)` and `\[...\]` (with pylatexenc),
and bare equations such as `d=b*c` (with `ast`, where `=` means equality). A span that does not parse is compared by its tokens,
without white space, and counted. A thought ends at a blank line, so a fence with a blank line in it is cut there.
"""

import ast
import functools
import re
import warnings
from typing import Any

# No pattern here takes more than linear time: two repetitions that could match the same characters never follow each other.
FENCE = re.compile(r"```[ \t]*(?:(\w+)[ \t]*)?\n(.*?)(?:```|\Z)", re.DOTALL)
LATEX = re.compile(  # spans have a maximum length, so that an opening without an end costs little
    r"\$\$(.{1,2000}?)\$\$|\\\[(.{1,2000}?)\\\]|\\\((.{1,2000}?)\\\)|\$([^$\n]{1,2000})\$", re.DOTALL
)
OPERAND = r"[-+]?[\w.()]+"
EQUATION = re.compile(rf"(?<![\w.()]){OPERAND}(?:[ \t]*[-+*/^=]+[ \t]*{OPERAND})+")
TOKEN = re.compile(r"\\?[A-Za-z_]+|\d+(?:\.\d+)?|\S")
NAMES = re.compile(r"\\[A-Za-z]+|[A-Za-z]|\d+(?:\.\d+)?|\S")  # in mathematics each letter is a variable
MOST_CHARACTERS = 8_000  # longer texts are compared by tokens
LONGEST_KNOWN = 200  # characters of a span whose tree is kept: a tree takes a hundred times their bytes


def form_of(text: str) -> tuple[tuple[Any, ...], int]:
    """The trees of the formulas and code in a text, in order, and the number of spans that did not parse.

    >>> form_of("Thus d=b*c.") == form_of("Wait, d = b * c")
    True
    >>> form_of("$2x+5=10$") == form_of("$2x-5=10$")
    False
    """
    if len(text) > MOST_CHARACTERS:
        return (("tokens", *TOKEN.findall(text)),), 1
    spans: list[tuple[int, str, str]] = []

    def take(kind: str, match: re.Match[str]) -> str:
        body = next(group for group in reversed(match.groups()) if group is not None)
        spans.append((match.start(), kind, body))
        return " " * len(match[0])  # so that no later pattern matches it

    text = FENCE.sub(functools.partial(take, "code"), text)
    text = LATEX.sub(functools.partial(take, "latex"), text)
    spans += [(match.start(), "equation", match[0].rstrip(".")) for match in EQUATION.finditer(text) if "=" in match[0]]
    trees = [tree_of(kind, body) for _, kind, body in sorted(spans)]
    return tuple(trees), sum(tree[0] == "tokens" for tree in trees)


def tree_of(kind: str, body: str) -> tuple[Any, ...]:
    """The tree of one span; ("tokens", ...) if it does not parse. Those of short spans, which come again, are kept."""
    return known_tree(kind, body) if len(body) <= LONGEST_KNOWN else parse_span(kind, body)


@functools.lru_cache(maxsize=4096)
def known_tree(kind: str, body: str) -> tuple[Any, ...]:
    """`parse_span`, once for each span."""
    return parse_span(kind, body)


def parse_span(kind: str, body: str) -> tuple[Any, ...]:
    """The tree of one span."""
    parse = {"code": tree_of_code, "latex": tree_of_latex, "equation": tree_of_equation}[kind]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as the SyntaxWarning for `1 is 1`
            return parse(body)
    except Exception:  # on arbitrary text a parser may raise anything, RecursionError included
        return "tokens", *TOKEN.findall(body)


def tree_of_code(body: str) -> tuple[Any, ...]:
    """Python's syntax tree."""
    return canonical(ast.parse(body))


def tree_of_equation(body: str) -> tuple[Any, ...]:
    """The tree of `a=b=c`, each side an expression."""
    body = re.sub(r"(\d|\))[ \t]*(?=[A-Za-z(])", r"\1*", body.replace("^", "**"))  # 2x is 2*x
    return "=", *(canonical(ast.parse(side.strip(), mode="eval").body) for side in re.split("=+", body))


def canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, without line and column numbers."""
    if isinstance(node, ast.AST):
        return type(node).__name__, *(canonical(value) for _, value in ast.iter_fields(node))
    if isinstance(node, list):
        return tuple(canonical(one) for one in node)
    return type(node).__name__, repr(node)


def tree_of_latex(body: str) -> tuple[Any, ...]:
    """The tree of macros, groups and environments. Characters are split into variables, numbers and signs."""
    from pylatexenc.latexwalker import LatexWalker

    nodes, *_ = LatexWalker(body, tolerant_parsing=False).get_latex_nodes()
    return "latex", *branches(nodes)


def branches(nodes: Any) -> tuple[Any, ...]:
    """The trees of several LaTeX nodes."""
    return tuple(branch for node in nodes or () if node is not None for branch in branches_of(node))


def branches_of(node: Any) -> tuple[Any, ...]:
    """The tree of one LaTeX node: its characters, or its name with the trees inside."""
    if hasattr(node, "chars"):
        return tuple(NAMES.findall(node.chars))
    if hasattr(node, "comment"):
        return ()
    name = next(
        (getattr(node, field) for field in ("macroname", "environmentname", "specials_chars") if hasattr(node, field)), ""
    )
    arguments = getattr(node, "nodeargd", None)
    inner = branches(getattr(arguments, "argnlist", None)) + branches(getattr(node, "nodelist", None))
    return ((type(node).__name__, name, inner),)
