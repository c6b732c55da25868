"""The form of an answer, by the fields of OpenAI's clients, of vLLM's and of other servers'."""

import json
from collections.abc import Mapping
from typing import Any

from jkv import forms
from jkv.checks import shown
from jkv.errors import InputError
from jkv.forms import Form
from jkv.forms.calls import value_of_calls
from jkv.reasoning.tool_calls import CallForm

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
TYPES = ("text", "json_object", "json_schema")  # of response_format
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs
HARMLESS = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")  # what is so here anyway


def fields_of(body: Mapping[str, Any]) -> list[str]:
    """The fields that ask for a form."""
    return [name for name in FIELDS if body.get(name) is not None and body[name] != {"type": "text"}]


def field_of(body: Mapping[str, Any]) -> str | None:
    """The field that asks for a form; None where none does.

    Raises:
      InputError: several do.
    """
    found = fields_of(body)
    if len(found) > 1:
        raise InputError(
            "{field} is one form of the answer; got {other} too. Leave one out.",
            field=found[0],
            code="conflict",
            other=found[1],
        )
    return found[0] if found else None


def form_of(name: str, value: Any) -> Form:
    """The form that a field asks for.

    Raises:
      InputError: a form that is none, or is not served; its field is `form`.
    """
    match name:
        case "response_format":
            return of_response_format(value)
        case "structured_outputs":
            return of_structured_outputs(value)
        case "guided_json":
            return forms.json(schema_of(value))
        case "guided_regex":
            return forms.regex(value)
        case "guided_grammar":
            return forms.grammar(value)
    return forms.choice(value)


def of_response_format(value: Mapping[str, Any]) -> Form:
    """The form of OpenAI's `response_format`."""
    kind = value.get("type")
    if kind == "json_schema":
        inner = value.get("json_schema")
        if not isinstance(inner, Mapping):
            raise InputError("{field} must have a schema as json_schema, an object; got {got}.", field="form", got=shown(inner))
        return forms.json(schema_of(inner.get("schema")))
    if kind == "json_object":
        return forms.json(schema_of(value.get("schema")))
    rule = "{field} must have a known type ({known}); got {got}. Correct it."
    raise InputError(rule, field="form", code="unsupported", known=", ".join(TYPES), got=shown(kind))


def of_structured_outputs(value: Mapping[str, Any]) -> Form:
    """The form of vLLM's `structured_outputs`."""
    given = {name: each for name, each in value.items() if each is not None and each is not False and name not in HARMLESS}
    if len(given) != 1 or not given.keys() <= set(KINDS):
        rule = "{field} must have one of {known}; got {got}. Leave out others."
        raise InputError(rule, field="form", code="unsupported", known=", ".join(KINDS), got=shown(", ".join(given)))
    ((name, each),) = given.items()
    if name == "json_object":
        return forms.json()
    return form_of(f"guided_{name}", each)


def schema_of(value: Any) -> Any:
    """A schema, which may come as the text of its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(
            "{field} must be JSON; {error}. Correct it.", field="form", code="bad_json", error=str(error)
        ) from None


def form_of_calls(form: CallForm, functions: Mapping[str, Any], has_many: bool) -> Form:
    """The form of an answer that calls functions.

    Raises:
      InputError: a schema with what is not honoured, or a name that cannot stand between a model's tags.
    """
    return Form("calls", value_of_calls(form, functions, has_many))
