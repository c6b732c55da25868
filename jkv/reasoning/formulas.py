r"""Formulas and code in a text, as syntax trees that can be compared.

ReasonCache asks whether the edit distance of two trees is zero. That is equality, so trees are nested tuples here. Three kinds
of spans are parsed: fenced code (Python, with `ast`), LaTeX between dollars or in `\(...\)` and `\[...\]` (with pylatexenc),
and every run in the plain text that holds an operator, a relation or a macro, such as `d=b*c`, `x ≥ 3` and `\frac{1}{2}+1`
(with `ast`, where `=` means equality, or pylatexenc). A span that does not parse is compared by its tokens, without white
space, and counted. A thought ends at a blank line, so a fence with a blank line in it is cut there.
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
RELATIONS = r"=<>\u2190-\u21ff\u2208-\u220d\u221d-\u22ff"  # and arrows, in a class of characters
OPERATORS = rf"\-+*/^\u00d7\u00f7\u00b1\u00b7\u2212\u2213\u2218\u2219{RELATIONS}"  # times, over, plus or minus, dots, minus
ATOM = r"(?:[\w.()\[\]{}\u00ac\u2202\u2207\u220f\u2211\u221a\u221e\u222b]|\\[A-Za-z]++[ \t]*+)++"  # "\sin x" is one
OPERAND = rf"[-+\u2212]?{ATOM}"
RUN = re.compile(
    rf"(?<![\w.(){{}}])(?P<relation>(?<![{RELATIONS}])[{RELATIONS}]++[ \t]*+)?{OPERAND}"
    rf"(?P<more>(?:[ \t]*+(?:[{OPERATORS}]++|!=)[ \t]*+{OPERAND})+)?"
)
COMPOUND = re.compile(r"(?<!\w)[^\W\d_]{2,}+(?:-[^\W\d_]{2,}+)+")  # of words
MARKS = re.compile(r"</?\w[\w-]{0,40}>|(?<![\w)])\*\*(?=\S)|(?<=\S)\*\*(?![\w(])")  # tags, and what makes words bold
PLAIN = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2219": "*", "\u00f7": "/", "\u2212": "-", "^": "**"}
    | {"\u2264": "<=", "\u2265": ">=", "\u2260": "!="}
)
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
    spans += runs(MARKS.sub(lambda match: " " * len(match[0]), text))
    trees = [tree_of(kind, body) for _, kind, body in sorted(spans)]
    return tuple(trees), sum(tree[0] == "tokens" for tree in trees)


def runs(text: str) -> list[tuple[int, str, str]]:
    """Where each formula of a plain text begins, what parses it, and the formula."""
    found = []
    for match in RUN.finditer(text):
        body = match[0].rstrip(". \t")
        if "\\" in body:
            found.append((match.start(), "latex", body))
        elif (match["more"] or match["relation"]) and not COMPOUND.fullmatch(body):
            found.append((match.start(), "equation", body))
    return found


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
    """The tree of `a=b=c` or `a+b`, or of what is compared with nothing, as in `≤ 3`."""
    body = re.sub(r"(?<![<>!=])=+", "==", body.translate(PLAIN).strip())
    body = re.sub(r"(\d|\))[ \t]*(?=[A-Za-z(])", r"\1*", body)  # 2x is 2*x
    return canonical(ast.parse(f"_{body}" if body[0] in "<>=!" else body, mode="eval").body)


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
