"""JSON schemas as expressions of texts.

What comes out satisfies the schema. Not every value that does can come out: members have the schema's order, objects with
`properties` have no others unless `additionalProperties` says so, and values of which nothing is known are nested up to
`json_values.DEPTH` deep. A keyword that would not be honoured is refused by name.
"""

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from jkv.checks import did_you_mean, shown
from jkv.errors import InputError
from jkv.forms.automaton import AutomatonError, both, only_first, overlap
from jkv.forms.expressions import NOTHING, Either, Expression, Repeat, either, text
from jkv.forms.json_values import (
    CHARACTER,
    DEPTH,
    STRING,
    Member,
    any_object,
    any_value,
    array_of,
    literal,
    object_of,
    quoted,
    spelled,
)
from jkv.forms.numerals import LONGEST_BOUND, integers, multiples, numbers
from jkv.forms.patterns import expression_of

MOST_COUNT = 10_000  # of lengths and numbers of items
MOST_DEPTH = 64  # of a schema
MOST_STEP = 1_000  # of multipleOf
MOST_SCHEMAS = 5_000  # that are read, each as often as something refers to it
MOST_EXCLUSIVE = 50  # schemas of a oneOf
KEYWORDS = {  # of each type
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties"),
}
OF_INTEGERS = KEYWORDS["number"]
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
CHOICES = ("anyOf", "oneOf", "allOf", "$ref")
GENERAL = ("type", "enum", "const", *CHOICES)
ANNOTATIONS = {  # which no value breaks
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
KNOWN = {*GENERAL, *(name for names in KEYWORDS.values() for name in names)}
DAYS = r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])"
DATE = rf"[1-9]\d{{3}}-({DAYS})"  # without the 29th of February, which not every year has
TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
NAME = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {  # some texts of each, and none that is not of it
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "hostname": rf"{NAME}(\.{NAME}){{0,3}}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,31}})?@{NAME}(\.{NAME}){{1,3}}",
    "uri": r"https?://[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*(:\d{1,4})?(/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?",
}


def refuse(rule: str, where: str, **values: Any) -> InputError:
    """The error about a part of a schema."""
    return InputError(rule, field="form", code="unsupported", where=where, **values)


def expression_of_schema(schema: Any) -> Expression:
    """The texts of JSON that a schema allows.

    Raises:
      ValueError: no schema, or one with what is not honoured: it is named, with its place.
    """
    return Reader(schema).read(schema, "$")


class Reader:
    """Reads a schema.

    Args:
      root: where references point to.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._open: list[str] = []  # references that are being read
        self._read: dict[str, Expression] = {}  # what they are
        self._any = any_value()
        self._num_read = 0

    def read(self, schema: Any, where: str) -> Expression:
        """The texts of a schema at a place."""
        self._num_read += 1
        if self._num_read > MOST_SCHEMAS:
            rule = "{field} must have at most {most:,} schemas, with references written out. Simplify it."
            raise refuse(rule, where, most=MOST_SCHEMAS)
        if schema is True or schema == {}:
            return self._any
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise refuse(
                "{field} must be a JSON schema, an object or true or false; got {got} at {where}.", where, got=shown(schema)
            )
        if where.count(".") > MOST_DEPTH:
            rule = "{field} must be nested less deep; got more than {most} levels. Flatten it."
            raise refuse(rule, where, most=MOST_DEPTH)
        given = {name: value for name, value in schema.items() if name not in ANNOTATIONS and not str(name).startswith("x-")}
        for name in given:
            if name not in KNOWN:
                rule = "{field} has a keyword that is not honoured, {got} at {where}; known: {known}.{near} Leave it out."
                known, near = ", ".join(sorted(KNOWN)), did_you_mean(str(name), sorted(KNOWN))
                raise refuse(rule, where, got=shown(name), known=known, near=near)
        if given.keys() & set(CHOICES):
            return self._branches(given, where)
        if "enum" in given or "const" in given:
            return self._values(given, where)
        kinds = types_of(given, where)
        if kinds == TYPES and len(given) == ("type" in given):
            return self._any
        return either(self._of_type(kind, given, where) for kind in kinds)

    def _branches(self, given: dict[str, Any], where: str) -> Expression:
        """A schema that is made of others: each together with what is beside it."""
        name = next(name for name in CHOICES[::-1] if name in given)
        rest, value = {other: each for other, each in given.items() if other != name}, given[name]
        if name == "$ref":
            if not rest:
                return self._reference(value, where)
            return self.read(merged([rest, self._find(value, where)], where), where)
        if not isinstance(value, list) or not value:
            rule = "{field} must have a list of schemas as {name}; got {got} at {where}."
            raise refuse(rule, where, name=name, got=shown(value))
        if name == "allOf":
            return self.read(merged([rest, *(self._resolved(each, where) for each in value)], where), where)
        places = [f"{where}.{name}.{i}" for i in range(len(value))]
        schemas = [merged([rest, self._resolved(each, where)], where) if rest else each for each in value]
        found = [self.read(each, place) for each, place in zip(schemas, places, strict=True)]
        if name == "oneOf" and len(found) > MOST_EXCLUSIVE:
            rule = "{field} must have at most {most} schemas in oneOf; got {got} at {where}. Write anyOf."
            raise refuse(rule, where, most=MOST_EXCLUSIVE, got=len(found))
        if name == "oneOf" and len(found) > 1 and overlap(*found):
            rule = "{field} must have schemas in oneOf that exclude each other; got some that do not at {where}. Write anyOf."
            raise refuse(rule, where)
        return either(found)

    def _resolved(self, schema: Any, where: str) -> Any:
        """A schema without the reference that it is."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            self._enter(schema["$ref"], where)
            found = self._resolved(self._find(schema["$ref"], where), where)
            self._open.pop()
            return merged([rest, found], where)
        return schema

    def _enter(self, name: Any, where: str) -> None:
        if name in self._open:
            rule = (
                "{field} must not refer to itself, as {got} does at {where}: its texts would be no finite automaton's. Write "
            )
            rule += "out as many levels as you need."
            raise AutomatonError(rule, field="form", code="unsupported", got=shown(name), where=where)
        self._open.append(name)

    def _reference(self, name: Any, where: str) -> Expression:
        if name not in self._read:
            target = self._find(name, where)
            self._enter(name, where)
            self._read[name] = self.read(target, "$" + name[1:].replace("/", "."))
            self._open.pop()
        return self._read[name]

    def _find(self, name: Any, where: str) -> Any:
        """What a reference points to."""
        found = self.root
        is_local = isinstance(name, str) and (name == "#" or name.startswith("#/"))
        for part in name.split("/")[1:] if is_local else ():
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                is_local = False
                break
        if not is_local:
            rule = "{field} must have references to its own parts, such as #/$defs/name; got {got} at {where}."
            raise refuse(rule, where, got=shown(name))
        return found

    def _values(self, given: dict[str, Any], where: str) -> Expression:
        """One of some values, as far as the rest of the schema allows them."""
        values = [given["const"]] if "const" in given else given["enum"]
        if not isinstance(values, list) or not values:
            raise refuse("{field} must have a list of values as enum; got {got} at {where}.", where, got=shown(values))
        if "const" in given and "enum" in given:
            values = [value for value in values if any(same(value, other) for other in given["enum"])]
        rest = {name: value for name, value in given.items() if name not in ("enum", "const", "type")}
        allowed = types_of({"type": given["type"]}, where) if "type" in given else TYPES
        values = [value for value in values if is_of(value, allowed)]
        found = either(literal(value) for value in values)
        return both(found, self.read({**rest, "type": list(allowed)}, where)) if rest and values else found

    def _of_type(self, kind: str, given: Mapping[str, Any], where: str) -> Expression:
        """The values of one type."""
        if kind == "null":
            return text("null")
        if kind == "boolean":
            return Either((text("true"), text("false")))
        make: dict[str, Callable[..., Expression]] = {
            "string": self._string,
            "number": self._number,
            "integer": self._number,
            "array": self._array,
            "object": self._object,
        }
        return make[kind](given, where, **({"is_whole": kind == "integer"} if kind in ("number", "integer") else {}))

    def _string(self, given: Mapping[str, Any], where: str) -> Expression:
        least, most = counts(given, "minLength", "maxLength", where)
        if most is not None and most < least:
            return NOTHING
        rules = [quoted(Repeat(CHARACTER, least, most))] if least or most is not None else []
        if "pattern" in given:
            if not isinstance(given["pattern"], str):
                raise refuse("{field} must have a text as pattern; got {got} at {where}.", where, got=shown(given["pattern"]))
            rules.append(quoted(expression_of(given["pattern"], spelled, is_whole=False)))
        if "format" in given:
            if given["format"] not in FORMATS:
                rule = "{field} must have a known format ({known}); got {got} at {where}. Leave it out, or write a pattern."
                raise refuse(rule, where, known=", ".join(FORMATS), got=shown(given["format"]))
            rules.append(quoted(expression_of(FORMATS[given["format"]], spelled)))
        if not rules:
            return STRING
        return rules[0] if len(rules) == 1 else both(*rules)

    def _number(self, given: Mapping[str, Any], where: str, is_whole: bool) -> Expression:
        (low, is_low_open), (high, is_high_open) = bound(given, "Minimum", where), bound(given, "Maximum", where)
        step = given.get("multipleOf", 1)
        is_step = isinstance(step, int | float) and not isinstance(step, bool) and step == int(step) and 0 < step <= MOST_STEP
        if not is_step:
            rule = "{field} must have a whole number up to {most} as multipleOf; got {got} at {where}. Leave it out."
            raise refuse(rule, where, most=MOST_STEP, got=shown(step))
        if not is_whole and "multipleOf" not in given:
            return numbers(low, high, is_low_open, is_high_open)
        first = None if low is None else math.floor(low) + 1 if is_low_open else math.ceil(low)
        last = None if high is None else math.ceil(high) - 1 if is_high_open else math.floor(high)
        found = integers(first, last)
        return both(found, multiples(int(step))) if step > 1 else found

    def _array(self, given: Mapping[str, Any], where: str) -> Expression:
        if given.get("uniqueItems", False) is not False:
            rule = "{field} cannot have uniqueItems, which no finite automaton knows; got it at {where}. Leave it out."
            raise refuse(rule, where)
        least, most = counts(given, "minItems", "maxItems", where)
        first = given.get("prefixItems", [])
        if not isinstance(first, list) or isinstance(given.get("items"), list):
            rule = "{field} must have one schema as items, and a list of them as prefixItems; got {got} at {where}."
            raise refuse(rule, where, got=shown(given.get("items") if isinstance(first, list) else first))
        items = [self.read(each, f"{where}.prefixItems.{i}") for i, each in enumerate(first)]
        rest: Expression | None = None
        if given.get("items", True) is not False and not (
            "prefixItems" in given and "items" not in given and least <= len(items)
        ):
            rest = self._inner(given["items"], f"{where}.items") if "items" in given else self._shallower()
        return array_of(items, rest, least, most)

    def _object(self, given: Mapping[str, Any], where: str) -> Expression:
        properties, required = given.get("properties", {}), given.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            rule = (
                "{field} must have an object of schemas as properties, and a list of names as required; got {got} at {where}."
            )
            raise refuse(rule, where, got=shown({"properties": properties, "required": required}))
        names = dict.fromkeys([*properties, *map(str, required)])
        more = given.get("additionalProperties", True if not names else None)
        values = {
            name: self.read(properties[name], f"{where}.properties.{name}") if name in properties else self._other(more, where)
            for name in names
        }
        members = [Member(literal(name), value, name in required) for name, value in values.items() if value is not None]
        if more is None or more is False:
            return object_of(members)
        keys = only_first(STRING, either(map(literal, names))) if names else STRING
        return object_of(members, Member(keys, self._other(more, where), False))

    def _other(self, more: Any, where: str) -> Expression:
        """The value of a member that has no schema of its own."""
        return self._shallower() if more in (None, True) else self._inner(more, f"{where}.additionalProperties")

    def _inner(self, schema: Any, where: str) -> Expression:
        return self._shallower() if schema is True or schema == {} else self.read(schema, where)

    def _shallower(self) -> Expression:
        """Any value inside of another one."""
        return any_value(DEPTH - 1)


def any_json_object() -> Expression:
    """Any object of JSON, up to `DEPTH` levels deep."""
    return any_object(any_value(DEPTH - 1))


def types_of(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The types of a schema: as it says, or as its keywords do."""
    kinds = given.get("type")
    if kinds is None:
        implied = tuple(kind for kind, names in KEYWORDS.items() if any(name in given for name in names))
        return implied or TYPES
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or not all(kind in TYPES for kind in kinds):
        rule = "{field} must have types of JSON ({known}); got {got} at {where}."
        raise refuse(rule, where, known=", ".join(TYPES), got=shown(given["type"]))
    return tuple(kind for kind in TYPES if kind in kinds and not (kind == "integer" and "number" in kinds))


def counts(given: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    """The least and the greatest number of something."""
    for name in (low, high):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_COUNT or value != int(value):
            rule = "{field} must have a whole number in [0, {most:,}] as {name}; got {got} at {where}."
            raise refuse(rule, where, most=MOST_COUNT, name=name, got=shown(value))
    return int(given.get(low, 0)), int(given[high]) if high in given else None


def bound(given: Mapping[str, Any], name: str, where: str) -> tuple[Decimal | None, bool]:
    """The bound of numbers by `minimum` and `exclusiveMinimum`, or by their opposites; and whether it is open."""
    found: list[tuple[Decimal, bool]] = []
    for keyword, is_open in ((name.lower(), False), (f"exclusive{name}", True)):
        if keyword in given:
            value = given[keyword]
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise refuse(
                    "{field} must have a number as {name}; got {got} at {where}.", where, name=keyword, got=shown(value)
                )
            try:
                number = Decimal(repr(value))
            except InvalidOperation:
                number = Decimal(value)
            if len(f"{number:f}") > LONGEST_BOUND:
                rule = "{field} must have a bound of at most {most} digits as {name}; got {got} at {where}."
                raise refuse(rule, where, most=LONGEST_BOUND, name=keyword, got=shown(value))
            found.append((number, is_open))
    if not found:
        return None, False
    return max(found) if name == "Minimum" else min(found, key=lambda each: (each[0], not each[1]))


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON, in which `1` is `1.0` and is not `true`."""
    return json.dumps(canonical(one), sort_keys=True) == json.dumps(canonical(other), sort_keys=True)


def canonical(value: Any) -> Any:
    """A value with whole numbers as such."""
    if isinstance(value, dict):
        return {key: canonical(each) for key, each in value.items()}
    if isinstance(value, list):
        return [canonical(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_of(value: Any, kinds: tuple[str, ...]) -> bool:
    """Whether a value is of one of the types."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object") in kinds


def merged(schemas: list[Any], where: str) -> Any:
    """One schema with the rules of several.

    Raises:
      ValueError: rules about the same that no one schema has.
    """
    found: dict[str, Any] = {}
    for schema in schemas:
        if schema is True:
            continue
        if not isinstance(schema, Mapping):
            return False
        for name, value in schema.items():
            if name in ANNOTATIONS or name not in found or same(found[name], value):
                found[name] = value
            elif name == "required":
                found[name] = list(dict.fromkeys([*found[name], *value]))
            elif name == "properties" and not found[name].keys() & value.keys():
                found[name] = {**found[name], **value}
            else:
                rule = "{field} must say {name} once; got several that differ at {where}, in schemas that all hold. Merge them."
                raise refuse(rule, where, name=name)
    closed = sum(isinstance(each, Mapping) and "properties" in each for each in schemas) > 1
    if closed and found.get("additionalProperties", True) is not True:
        rule = "{field} must not have additionalProperties in schemas that all hold; got it at {where}. Merge them."
        raise refuse(rule, where)
    return found
