"""Text that knows who wrote each of its characters, and the Jinja environment whose templates make it.

A chat template mixes text of its own with what users send. Both come out as one string, in which a user's `<|im_end|>` looks
like the template's. Here every string inside of a template is a `Marked` one: literals are the template's, messages and
variables are the user's, and slices, concatenations and the usual methods and filters keep the marks. What an operation made
that keeps none is of unknown origin. `jkv/checkpoints/chat_worker.py` renders with it; `jkv.checkpoints.chat_tokens` reads the
marks.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex, TypeVar

from jinja2 import filters, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

USER, OWN, UNKNOWN = b"uo?"  # `ChatText.marks` has the same letters
SIGNS = frozenset("<>[]{}|\uff5c")  # of control tokens, as in `jkv.checkpoints.chat_tokens`
ROLES = (  # which templates put between the signs of a control token; any other role is a user's text
    *("assistant", "critic", "data", "developer", "documents", "environment", "function", "human", "ipython", "knowledge"),
    *("latest_reminder", "model", "observation", "question", "system", "thinking", "tool", "user"),
)
T = TypeVar("T")


class Marked(str):
    """A string with a mark for each character: USER, OWN (the template's) or UNKNOWN."""

    _marks: bytes  # sandboxed templates can read no name that begins so

    def __new__(cls, text: Any = "", marks: bytes | None = None) -> "Marked":
        self = super().__new__(cls, text)
        self._marks = marks_of(text if isinstance(text, str) else self) if marks is None else marks
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return Marked(str.__add__(self, other), self._marks + marks_of(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return Marked(str.__add__(other, self), marks_of(other) + self._marks) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return Marked(str.__mul__(self, count), self._marks * count)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> str:
        marks = self._marks[key]
        return Marked(str.__getitem__(self, key), marks if isinstance(marks, bytes) else bytes((marks,)))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def join(self, parts: Iterable[str]) -> str:
        """As that of a string."""
        texts = list(parts)
        return Marked(str.join(self, texts), self._marks.join(map(marks_of, texts)))

    def strip(self, chars: str | None = None) -> str:
        """As that of a string."""
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        """As that of a string."""
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        """As that of a string."""
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        """As that of a string."""
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        """As that of a string."""
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As that of a string."""
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As that of a string."""
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As that of a string."""
        wholes = self._pieces(str.splitlines(self, True), "")
        return [whole[: len(line)] for whole, line in zip(wholes, str.splitlines(self, keepends), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """As that of a string."""
        head, mark, tail = self._pieces(str.partition(self, sep), "")
        return head, mark, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """As that of a string."""
        head, mark, tail = self._pieces(str.rpartition(self, sep), "")
        return head, mark, tail

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As that of a string."""
        return Marked(new).join(self.split(old, count)) if old else str.replace(self, old, new, count)

    def lower(self) -> str:
        """As that of a string."""
        return self._changed(str.lower)

    def upper(self) -> str:
        """As that of a string."""
        return self._changed(str.upper)

    def casefold(self) -> str:
        """As that of a string."""
        return self._changed(str.casefold)

    def swapcase(self) -> str:
        """As that of a string."""
        return self._changed(str.swapcase)

    def capitalize(self) -> str:
        """As that of a string."""
        return self._changed(str.capitalize)

    def title(self) -> str:
        """As that of a string."""
        return self._changed(str.title)

    def _pieces(self, pieces: Iterable[str], sep: str | None) -> list[str]:
        """The pieces as slices of this text, in which they follow one another with `sep` between them; None is white space."""
        found, start = [], 0
        for piece in pieces:
            start = self.find(piece, start) if sep is None else start
            found.append(self[start : start + len(piece)])
            start += len(piece) + len(sep or "")
        return found

    def _changed(self, change: Callable[[str], str]) -> str:
        """The text in another case, in which a character may become several."""
        text, marks = change(self), self._marks
        if len(text) != len(self):
            marks = b"".join(bytes((mark,)) * len(change(one)) for one, mark in zip(str(self), self._marks, strict=True))
        return Marked(text, marks) if len(text) == len(marks) else text


def marks_of(text: str) -> bytes:
    """The marks of any string."""
    return text._marks if isinstance(text, Marked) else bytes((UNKNOWN,)) * len(text)


def marked(value: T, mark: int) -> T:
    """The same value, its strings and those inside of its lists, tuples and dictionaries all with one mark."""
    found: Any = value
    if isinstance(value, str):
        found = Marked(value, bytes((mark,)) * len(value))
    elif isinstance(value, dict):
        found = {marked(name, mark): marked(one, mark) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        found = type(value)(marked(one, mark) for one in value)
    return found


def has_own(value: Any) -> bool:
    """Whether a string in it has text of the template."""
    return any(OWN in marks_of(text) for text in strings_of(value))


def has_own_signs(value: Any) -> bool:
    """Whether a string in it has a sign of control tokens that the template wrote."""
    texts = strings_of(value)
    return any(
        mark == OWN and sign in SIGNS for text in texts for sign, mark in zip(str.__iter__(text), marks_of(text), strict=True)
    )


def strings_of(value: Any) -> Iterator[str]:
    """The strings in lists, tuples and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings_of([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_of(one)


class MarkingCompiler(CodeGenerator):
    """Compiles literals as text of the template."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        """Writes a constant."""
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes the operator `~`."""
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class MarkingTemplate(Template):
    """A template whose variables are the user's, except those named in `own_names`, and the usual roles of messages."""

    own_names: frozenset[str] = frozenset()

    def render(self, *args: Any, **kwargs: Any) -> str:
        """The text, marked."""
        given = dict(*args, **kwargs)
        values = {name: marked(value, OWN if name in self.own_names else USER) for name, value in given.items()}
        for message in values.get("messages") or ():
            if message.get("role") in ROLES:
                message["role"] = marked(message["role"], OWN)
        return super().render(values)


class MarkingEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, in which text keeps its marks."""

    code_generator_class = MarkingCompiler
    template_class = MarkingTemplate

    @staticmethod
    def own(value: T) -> T:
        """A literal of the template."""
        return marked(value, OWN)

    @staticmethod
    def concat(parts: Iterable[Any]) -> str:  # type: ignore[override]
        """Parts of the output, and the operands of `~`, as one text."""
        return Marked("", b"").join(map(str, parts))

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """Compiles a template, after transformers has set its own filters."""
        wrapped = {name: following(function) for name, function in self.filters.items()}
        # In JSON, a role or a name of the template has quotes around it, and is no part of a control token.
        self.filters.update(wrapped | {"join": join, "tojson": following(self.filters["tojson"], has_own_signs)})
        return super().from_string(*args, **kwargs)


def following(function: Callable[..., Any], is_own: Callable[[Any], bool] = has_own) -> Callable[..., Any]:
    """A filter whose strings of unknown origin are the user's, if none of its arguments is the template's."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        is_unknown = type(found) in (str, Marked) and UNKNOWN in marks_of(found)
        return marked(found, USER) if is_unknown and not is_own([*args, *kwargs.values()]) else found

    return wrapped


@pass_eval_context
def join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, whose default separator is no string of ours."""
    return filters.sync_do_join(context, value, Marked(d), attribute)
