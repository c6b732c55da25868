"""Tool calls as expressions of texts, in the forms that models write as JSON (`jkv.reasoning.tool_calls.FORMS`)."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jkv.errors import InputError
from jkv.forms.expressions import Expression, Repeat, chain, either, optional, text
from jkv.forms.json_schema import ANNOTATIONS, expression_of_schema
from jkv.forms.json_values import COLON, COMMA, GAP, object_of
from jkv.reasoning.tool_calls import FORMS, CallForm

LINE = optional(text("\n"))
ARGUMENTS = {"hermes": "arguments", "llama3": "parameters", "mistral": "arguments"}  # the member that has them

Spell = Callable[[str], Expression]


def value_of_calls(form: CallForm, functions: Mapping[str, Any], has_many: bool) -> str:
    """The value of a `jkv.forms.Form` of calls: one of some functions, or several where `has_many`.

    Raises:
      ValueError: calls that are not written as JSON.
    """
    if form.name not in ARGUMENTS:
        rule = (
            "{field} can make a model call a tool where it writes calls as JSON ({known}); this model's are {got}. Ask for the "
            "call in a message."
        )
        raise InputError(rule, field="tool_choice", code="unsupported", known=", ".join(ARGUMENTS), got=form.name)
    return json.dumps([form.name, functions, has_many], ensure_ascii=False)


def expression_of_calls(value: Sequence[Any], spell: Spell) -> Expression:
    """The texts of calls; `spell` writes their marks."""
    name, functions, has_many = value
    form, arguments = FORMS[name], {one: arguments_of(schema, one) for one, schema in functions.items()}
    whole = either(call_of(ARGUMENTS[name], one, each) for one, each in arguments.items())
    if name == "llama3":  # without a mark between them, several would be no answer of calls alone
        return whole
    begin, most = spell(form.begin), None if has_many else 1
    if name == "hermes":
        one = chain(begin, LINE, whole, LINE, spell(form.end))
        return chain(one, Repeat(chain(LINE, one), 0, None if has_many else 0))
    named = either(chain(begin, text(one), spell("[ARGS]"), each) for one, each in arguments.items())
    listed = chain(begin, GAP, text("["), whole, Repeat(chain(COMMA, GAP, whole), 0, None if has_many else 0), text("]"))
    return either([listed, Repeat(named, 1, most)])


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
