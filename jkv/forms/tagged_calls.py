"""Tool calls as expressions of texts, in the forms that models write with a tag around each argument.

`jkv.reasoning.tagged_calls` reads them: a value of a string type is the text between its tags, and any other one is JSON.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jkv.errors import InputError
from jkv.forms.automaton import both, only_first
from jkv.forms.expressions import LAST_CHARACTER, NOTHING, Expression, Repeat, chain, characters, either, optional, text
from jkv.forms.json_schema import ANNOTATIONS, CHOICES, FORMATS, Reader, counts, merged, types_of
from jkv.forms.patterns import expression_of
from jkv.reasoning.tagged_calls import Tags, listed
from jkv.reasoning.tagged_calls import types_of as types_read

CHARACTER = characters([(0, LAST_CHARACTER)])
LINE = optional(text("\n"))

Spell = Callable[[str], Expression]


class Written(NamedTuple):
    """How calls are written, in the places where readers skip white space as models write it.

    Attributes:
      name, key: around a name.
      value, value_end: what begins and ends a value.
      end: of the call.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: str
    value_end: str
    end: str


WRITTEN = {
    "qwen3_coder": Written(("<function=", ">"), ("<parameter=", ">"), "\n", "\n</parameter>", "</function>"),
    "glm": Written(("", ""), ("<arg_key>", "</arg_key>"), "\n<arg_value>", "</arg_value>", ""),
}


def call_in_tags(form: str, tags: Tags, name: str, schema: Mapping[str, Any], spell: Spell) -> Expression:
    """A call of a function, with the arguments of a schema in its order; `spell` writes marks.

    Raises:
      ValueError: a name that cannot stand between tags, or a schema with what is not honoured.
    """
    if schema.get("type", "object") != "object":
        rule = "{field} must have objects as arguments; the parameters of {name} are of another type. Correct its schema."
        raise InputError(rule, field="tools", code="unsupported", name=name)
    written, reader = WRITTEN[form], Reader(schema)
    reader.read({"type": "object", **schema}, "$")  # refuses what is not honoured
    begin, end = written.name
    check_name(name, tags.name.pattern.match(f"{begin}{name}{end}<"))
    properties, required = schema.get("properties", {}), schema.get("required", [])
    parts = [spell(begin), text(name), spell(end), LINE]
    for key in dict.fromkeys([*properties, *required]):
        (key_begin, key_end), value = written.key, properties.get(key, {})
        check_name(key, tags.key.pattern.match(f"{key_begin}{key}{key_end}\n<arg_value>"))
        inner = value_in_tags(reader, value, types_read(schema, key), f"$.properties.{key}")
        ended = text(tags.value_end)  # which a value may not have, however it is cut into tokens
        inner = only_first(inner, chain(Repeat(CHARACTER), ended, Repeat(CHARACTER)))
        shown = spell(key_begin), text(key), spell(key_end + written.value), inner, spell(written.value_end), LINE
        parts.append(chain(*shown) if key in required else optional(chain(*shown)))
    return chain(*parts, spell(written.end))


def check_name(name: str, found: Any) -> None:
    """Refuses a name that a reader would not read as it is."""
    if found is None or found[1] != name:
        rule = "{field} must have names of at most 100 characters, without <, > and white space; got {got}. Rename it."
        raise InputError(rule, field="tools", code="unsupported", got=repr(name)[:100])


def value_in_tags(reader: Reader, schema: Any, types: set[str], where: str) -> Expression:
    """The texts that are read as values of a schema. A string stands without quotes and escapes; any other value is JSON."""
    if "string" not in types:
        return reader.read(schema, where)
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "oneOf")}
    branches = [merged([rest, one], where) for name in ("anyOf", "oneOf") for one in listed(schema, name)] or [schema]
    found = either(bare_texts(one, where) for one in branches)
    is_null = "null" in types and any("null" in types_of(one, where) for one in branches if not set(CHOICES) & one.keys())
    return either([found, text("null")]) if is_null else found


def bare_texts(schema: Any, where: str) -> Expression:
    """The strings of a schema, without quotes and escapes; none where it is of other types."""
    given = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    if set(CHOICES) & given.keys():
        rule = "{field} must not have {names} beside a string between tags, at {where}. Merge them, or use one type."
        names = ", ".join(sorted(set(CHOICES) & given.keys()))
        raise InputError(rule, field="tools", code="unsupported", names=names, where=where)
    if "type" in given and "string" not in types_of(given, where):
        return NOTHING
    least, most = counts(given, "minLength", "maxLength", where)
    rules: list[Expression] = [Repeat(CHARACTER, least, most)]
    for name in ("enum", "const"):
        if name in given:
            values = given[name] if name == "enum" else [given[name]]
            rules.append(either(text(value) for value in values if isinstance(value, str)))
    if "pattern" in given:
        rules.append(expression_of(given["pattern"], is_whole=False))
    if "format" in given:
        rules.append(expression_of(FORMATS[given["format"]]))
    return both(*rules) if len(rules) > 1 else rules[0]
