"""Context-free grammars, and JSON schemas that no finite automaton follows, by the parser of the package llguidance.

A parser runs on the host, for forms alone that no automaton can have (`jkv.forms.form.by_automaton_or_grammar`).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.checks import install
from jkv.errors import InputError
from jkv.forms.json_schema import ANNOTATIONS, CHOICES, MOST_DEPTH

LONGEST_MESSAGE = 400  # characters of llguidance's own message
AFTER_MESSAGE = re.compile(r"<state>|<backtrace>|\n +\d+ \| ")  # what it repeats of the grammar, and its own insides
JSON_RULES = {  # as automata have it; a schema cannot ask for others
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
NO_FORCING = '%llguidance {"no_forcing": true}'  # else a text that must come may come in one way alone to cut it into tokens
INSIDE = ("items", "additionalProperties")  # keywords whose value is a schema
LISTS = ("anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "$defs", "definitions")


def llguidance(why: str) -> Any:
    """The package.

    Raises:
      ValueError: it is missing; `why` it is needed.
    """
    try:
        import llguidance
    except ImportError:
        rule = "{field} {why}, for which the package llguidance is needed; it is missing. Run: {command}."
        raise InputError(rule, field="form", code="unsupported", why=why, command=install("grammar")) from None
    return llguidance


class Tokens:
    """The tokens of a vocabulary, as llguidance takes them: control tokens have no bytes, and one more ends a text.

    Args:
      pieces: the bytes of each token.
    """

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens, self.eos_token_id = [*pieces, b"<|end|>"], len(pieces)
        self.special_token_ids = (self.eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        """No tokens: parsers only ask for the tokens of texts that they force, and they force none (`NO_FORCING`)."""
        return []


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar over the tokens of a vocabulary.

    Attributes:
      start: a parser (`llguidance.LLMatcher`) before the first token.
      num_tokens: V.
    """

    start: Any
    num_tokens: int

    def parser(self) -> Any:
        """A new parser, before the first token."""
        return self.start.deep_copy()

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether it accepts a text of these tokens."""
        parser = self.parser()
        return parser.try_consume_tokens(list(tokens)) == len(tokens) and parser.is_accepting()

    def following(self, parser: Any) -> np.ndarray:
        """Which tokens may come next, `[V]` bool."""
        bits = np.frombuffer(parser.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self.num_tokens, bitorder="little").astype(bool)


def tokens_for_parsers(pieces: Sequence[bytes]) -> Any:
    """The tokens with these bytes (`llguidance.LLTokenizer`); takes a second for 100,000 of them."""
    package = llguidance("is a grammar")
    return package.LLTokenizer(package.TokenizerWrapper(Tokens(pieces)), n_vocab=len(pieces) + 1)


def grammar_of(kind: str, value: str, tokens: Any) -> Grammar:
    """A grammar, or a schema as one, over tokens (`tokens_for_parsers`).

    Raises:
      ValueError: a grammar that is none, which no text has, or which these tokens cannot write.
    """
    text = lark_of(value) if kind == "grammar" else f"start: %json {json.dumps(closed(json.loads(value)))}"
    inner = json.dumps({"grammars": [{"lark_grammar": f"{text}\n{NO_FORCING}"}]})
    start = llguidance(f"is a {kind}").LLMatcher(tokens, inner, log_level=0)
    if start.is_error():
        raise faulty(kind, start.get_error())
    grammar = Grammar(start, tokens.vocab_size - 1)
    if not grammar.following(grammar.parser()).any():
        rule = "{field} must allow a text that the model's tokens can write; got a {kind} that allows none."
        raise InputError(rule, field="form", code="unsupported", kind=kind)
    return grammar


def faulty(kind: str, message: Any) -> InputError:
    """The error about a grammar or schema that llguidance refuses."""
    rule = "{field} must be a {kind} that llguidance takes; it says: {message}. Correct it."
    told = " ".join(AFTER_MESSAGE.split(str(message))[0].split())[:LONGEST_MESSAGE]
    return InputError(rule, field="form", code="unsupported", kind=kind, message=told)


@functools.lru_cache(maxsize=64)
def grammar_alone(kind: str, value: str) -> Grammar:
    """A grammar over bytes."""
    return grammar_of(kind, value, tokens_for_parsers([bytes([each]) for each in range(256)]))


def lark_of(text: str) -> str:
    """A grammar in Lark's syntax, which may be given in llama.cpp's (GBNF).

    Raises:
      ValueError: a rule of GBNF that is none.
    """
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # of its own type, or an IndexError at the end of the text
        raise faulty("grammar", error) from None


def closed(schema: Any) -> Any:
    """A schema read as automata read it: its objects with `properties` have no other members, unless it asks for them.

    Raises:
      ValueError: schemas that all hold, which llguidance would merge in exponential time.
    """
    return {**closed_within(schema, 0), "x-guidance": JSON_RULES}


def closed_within(schema: Any, depth: int) -> Any:
    """A part of a schema, without annotations; a `oneOf` with a discriminator becomes the `anyOf` that it is."""
    if not isinstance(schema, Mapping):
        return schema
    if depth > MOST_DEPTH:
        rule = "{field} must be nested less deep; got more than {most} levels. Flatten it."
        raise InputError(rule, field="form", code="unsupported", most=MOST_DEPTH)
    found = {name: value for name, value in schema.items() if name not in ANNOTATIONS or name in MAPS}
    several = found.keys() - {"$defs", "definitions"}
    for name in CHOICES:
        if name in several and (name == "allOf" or len(several) > 1):
            rule = (
                "{field} must have no schemas that all hold, as {names} do, where it refers to itself or is large. Merge them."
            )
            raise InputError(rule, field="form", code="unsupported", names=", ".join(sorted(several)))
    if "discriminator" in schema and "oneOf" in found:  # whose schemas exclude each other by a member's value
        found["anyOf"] = found.pop("oneOf")
    for name in found.keys() & {*INSIDE}:
        found[name] = closed_within(found[name], depth + 1)
    for name in LISTS:
        if isinstance(found.get(name), list):
            found[name] = [closed_within(each, depth + 1) for each in found[name]]
    for name in MAPS:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: closed_within(each, depth + 1) for key, each in found[name].items()}
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found
