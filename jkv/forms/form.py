"""The form of an answer, as a request has it: a value that can be compared, hashed and sent elsewhere."""

import dataclasses
import functools
import json as json_texts
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jkv.checks import check_length, shown
from jkv.errors import InputError
from jkv.forms.automaton import Automaton, AutomatonError, automaton_of
from jkv.forms.calls import expression_of_calls
from jkv.forms.expressions import Expression, either, text
from jkv.forms.grammars import Grammar, grammar_alone, llguidance
from jkv.forms.json_schema import any_json_object, expression_of_schema
from jkv.forms.patterns import expression_of
from jkv.forms.vocabulary import Vocabulary
from jkv.reasoning.tool_calls import FORMS

KINDS = ("json", "schema", "regex", "choice", "calls", "grammar")
MOST_TEXT = 1_000_000  # characters of a form
MOST_CHOICES = 10_000
ByAutomaton = TypeVar("ByAutomaton")
ByGrammar = TypeVar("ByGrammar")


@dataclasses.dataclass(frozen=True)
class Form:
    """What every answer of a request must be; `jkv.forms.json`, `regex`, `choice` and `grammar` make one.

    The model draws only tokens with which the answer can still get the form, and ends only where it has it. What the model
    thinks before its answer is free. Of n samples each has the form.

    Attributes:
      kind: of the form, one of KINDS.
      value: the schema as JSON, the regular expression, the texts as JSON, or the grammar.

    Raises:
      ValueError: a schema, an expression or a grammar that is none, or that has what is not honoured; it is named.
    """

    kind: str
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            rule = "{field} must be of a known kind ({known}); got {got}. Use jkv.forms.json, regex, choice or grammar."
            raise InputError(rule, field="form", code="unknown_name", known=", ".join(KINDS), got=shown(self.kind))
        if len(self.value) > MOST_TEXT:
            rule = "{field} must have at most {most:,} characters; got {got:,}. Make it smaller."
            raise InputError(rule, field="form", code="too_long", most=MOST_TEXT, got=len(self.value))
        acceptor_of(self)

    def __str__(self) -> str:
        return f"{self.kind} {self.value}".strip()

    def matches(self, answer: str) -> bool:
        """Whether a text is of the form."""
        return acceptor_of(self).accepts(answer.encode())

    @property
    def has_channels(self) -> bool:
        """Whether answers of this form are messages in channels."""
        return self.kind == "calls" and FORMS[json_texts.loads(self.value)[0]].has_channels

    def expression_in(self, vocabulary: Vocabulary | None = None) -> Expression:
        """The texts that it allows; tool calls with the marks of a vocabulary, or with marks letter by letter."""
        match self.kind:
            case "json":
                return any_json_object()
            case "schema":
                return expression_of_schema(json_texts.loads(self.value))
            case "regex":
                return expression_of(self.value)
            case "choice":
                return either(map(text, json_texts.loads(self.value)))
        return expression_of_calls(json_texts.loads(self.value), text if vocabulary is None else vocabulary.expression)


def json(schema: Mapping[str, Any] | bool | None = None) -> Form:
    """The form of JSON that satisfies a schema; any object without one.

    Members come in the order of the schema, without white space but for one space after `,` and `:`. A keyword that would not
    be honoured, such as `uniqueItems`, is refused by name. A schema that refers to itself, or is too large for an automaton, is
    followed on the host, as a grammar is.

    Args:
      schema: a JSON schema, such as `Model.model_json_schema()` of pydantic.

    >>> import jkv
    >>> form = jkv.forms.json({"type": "object", "properties": {"age": {"type": "integer"}}})
    >>> form.matches('{"age": 3}'), form.matches('{"age": "three"}')
    (True, False)
    """
    if schema is None:
        return Form("json")
    if not isinstance(schema, Mapping | bool):
        rule = "{field} must be a JSON schema, as a dictionary; got {got}. Load its text by json.loads."
        raise InputError(rule, field="form", code="wrong_type", got=shown(schema))
    try:
        return Form("schema", json_texts.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "{field} must be a JSON schema; got {error}.", field="form", code="wrong_type", error=str(error)
        ) from None


def regex(pattern: str) -> Form:
    r"""The form of texts that a regular expression matches as a whole, in Python's syntax; `\d`, `\w` and `\s` are ASCII's.

    >>> import jkv
    >>> jkv.forms.regex(r"\d{4}-\d\d").matches("2026-11")
    True
    """
    if not isinstance(pattern, str):
        raise InputError(
            "{field} must be a regular expression; got {got}.", field="form", code="wrong_type", got=shown(pattern)
        )
    return Form("regex", pattern)


def choice(texts: Sequence[str]) -> Form:
    """The form of one of some texts.

    >>> import jkv
    >>> jkv.forms.choice(["yes", "no"]).matches("maybe")
    False
    """
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not texts or not all(isinstance(each, str) and each for each in texts):
        rule = "{field} must be a list of texts to choose from, none empty; got {got}."
        raise InputError(rule, field="form", code="wrong_type", got=shown(texts))
    check_length("form", texts, MOST_CHOICES, "texts")
    return Form("choice", json_texts.dumps(list(dict.fromkeys(texts)), ensure_ascii=False))


def grammar(text: str) -> Form:
    """The form of texts of a context-free grammar, in Lark's syntax as llguidance takes it, or in llama.cpp's (GBNF).

    The package llguidance follows it on the host, so that chunks have one step while a request with a grammar runs.

    Raises:
      ValueError: a grammar that llguidance refuses, with its message; or the package is missing.

    >>> import jkv
    >>> form = jkv.forms.grammar('start: "(" start ")" | "x"')
    >>> form.matches("((x))"), form.matches("((x)")
    (True, False)
    """
    if not isinstance(text, str) or not text.strip():
        rule = '{field} must be a grammar, such as \'start: "a" start | "b"\'; got {got}.'
        raise InputError(rule, field="form", code="wrong_type", got=shown(text))
    return Form("grammar", text)


def by_automaton_or_grammar(
    form: Form, by_automaton: Callable[[], ByAutomaton], by_grammar: Callable[[], ByGrammar]
) -> ByAutomaton | ByGrammar:
    """What follows a form: an automaton where there is one, and else, for grammars and schemas, a parser on the host.

    Raises:
      ValueError: neither can, or llguidance is needed and missing.
    """
    if form.kind == "grammar":
        llguidance("is a grammar")
        return by_grammar()
    try:
        return by_automaton()
    except AutomatonError as error:
        if form.kind != "schema":
            raise
        llguidance(f"is no form of a small finite automaton ({error})")
        return by_grammar()


@functools.lru_cache(maxsize=64)
def acceptor_of(form: Form) -> Automaton | Grammar:
    """What knows which texts are of a form, over bytes and without thinking before them."""
    return by_automaton_or_grammar(form, lambda: automaton_alone(form), lambda: grammar_alone(form.kind, form.value))


@functools.lru_cache(maxsize=64)
def automaton_alone(form: Form) -> Automaton:
    """The automaton of a form's texts, without thinking before them.

    Raises:
      ValueError: the form allows no text, or is too large.
    """
    automaton = automaton_of(form.expression_in())
    if not len(automaton.next):
        raise InputError("{field} must allow a text; got {got}, which allows none.", field="form", got=shown(form.value))
    return automaton
