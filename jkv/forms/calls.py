"""Tool calls as expressions of texts, in the forms of `jkv.reasoning.tool_calls.FORMS`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jkv.errors import InputError
from jkv.forms.expressions import EMPTY, Expression, Repeat, chain, either, text
from jkv.forms.json_schema import ANNOTATIONS, expression_of_schema
from jkv.forms.json_values import COLON, COMMA, GAP, object_of
from jkv.forms.tagged_calls import LINE, call_in_tags, check_name
from jkv.reasoning.channels import CHANNEL, FUNCTIONS, MESSAGE, RECIPIENT
from jkv.reasoning.tool_calls import FORMS, CallForm

ARGUMENTS = {"hermes": "arguments", "llama3": "parameters", "mistral": "arguments"}  # the member that has them

Spell = Callable[[str], Expression]


def value_of_calls(form: CallForm, functions: Mapping[str, Any], has_many: bool) -> str:
    """The value of a `jkv.forms.Form` of calls: one of some functions, or several where `has_many`."""
    return json.dumps([form.name, functions, has_many], ensure_ascii=False)


def expression_of_calls(value: Sequence[Any], spell: Spell) -> Expression:
    """The texts of calls; `spell` writes their marks."""
    name, functions, has_many = value
    form = FORMS[name]
    if form.tags is not None:
        whole = either(call_in_tags(name, form.tags, one, schema, spell) for one, schema in functions.items())
        return repeated(chain(spell(form.begin), LINE if name != "glm" else EMPTY, whole, LINE, spell(form.end)), has_many)
    arguments = {one: arguments_of(schema, one) for one, schema in functions.items()}
    if form.has_channels:  # one call ends a completion
        return either(in_channel(one, each, spell) for one, each in arguments.items())
    whole = either(call_of(ARGUMENTS[name], one, each) for one, each in arguments.items())
    if name == "llama3":  # without a mark between them, several would be no answer of calls alone
        return whole
    begin, most = spell(form.begin), None if has_many else 1
    if name == "hermes":
        return repeated(chain(begin, LINE, whole, LINE, spell(form.end)), has_many)
    named = either(chain(begin, text(one), spell("[ARGS]"), each) for one, each in arguments.items())
    listed = chain(begin, GAP, text("["), whole, Repeat(chain(COMMA, GAP, whole), 0, None if has_many else 0), text("]"))
    return either([listed, Repeat(named, 1, most)])


def in_channel(name: str, arguments: Expression, spell: Spell) -> Expression:
    """A call as a message of the harmony format (`jkv.reasoning.channels`)."""
    check_name(name, RECIPIENT.search(f"to={name}<"))
    begin, end = spell(f"{CHANNEL}commentary to={FUNCTIONS}"), spell(f" <|constrain|>json{MESSAGE}")
    return chain(begin, text(name), end, arguments)


def messages_before(call: Expression, spell: Spell, up_to: Callable[[str], Expression]) -> tuple[Expression, Expression]:
    """A call after any number of messages that are not the answer; and the same, from inside the first such message.

    `up_to(mark)` matches any text up to a mark.
    """
    body = chain(up_to("<|end|>"), spell("<|start|>assistant"))
    channel = chain(spell(CHANNEL), either(map(spell, ("analysis", "commentary"))), spell(MESSAGE))
    whole = chain(Repeat(chain(channel, body)), call)
    return whole, chain(body, whole)


def repeated(call: Expression, has_many: bool) -> Expression:
    """A call between its marks, or several where `has_many`."""
    return chain(call, Repeat(chain(LINE, call), 0, None if has_many else 0))


def call_of(member: str, name: str, arguments: Expression) -> Expression:
    """A call as one object of JSON."""
    quoted = text(json.dumps(name, ensure_ascii=False))
    parts: Iterator[Expression] = iter((text('{"name"'), COLON, GAP, quoted, COMMA, GAP, text(f'"{member}"'), COLON, GAP))
    return chain(*parts, arguments, text("}"))


def arguments_of(schema: Mapping[str, Any], name: str) -> Expression:
    """The arguments of a function: an object, empty where its schema names none.

    Raises:
      ValueError: the schema has what is not honoured.
    """
    says_nothing = not any(value for name, value in schema.items() if name not in ("type", *ANNOTATIONS))
    if says_nothing and schema.get("type", "object") == "object":
        return object_of(())
    if schema.get("type", "object") != "object":
        rule = "{field} must have objects as arguments; the parameters of {name} are of another type. Correct its schema."
        raise InputError(rule, field="tools", code="unsupported", name=name)
    return expression_of_schema({"type": "object", **schema})
