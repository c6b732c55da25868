"""Errors as data: what a caller passed, and which rule it breaks."""

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

Code = Literal[
    "bad_json",
    "conflict",  # two arguments exclude each other
    "does_not_fit",  # the model's positions, the pool or a row
    "invalid",
    "missing",
    "not_found",
    "out_of_range",
    "too_long",
    "unknown_name",
    "unsupported",
    "wrong_type",
]
CODES: tuple[str, ...] = get_args(Code)


class InputError(ValueError):
    """A caller's input is refused.

    `str(error)` is the rule with the argument's own name. A server that has other names for arguments writes `told(names)`.

    Args:
      rule: what must hold, what was got, and how to fix it, as a template of `str.format`. `{field}` is the argument's name;
        a name in braces without a value is another argument's name.
      field: the argument that is wrong; None where it is no single one.
      code: the kind of mistake.
      values: what the template shows; another error is shown with the same names.

    >>> error = InputError("{field} must be at most {most}; got {got}.", field="stop_ids", most=8, got=9)
    >>> str(error), error.told({"stop_ids": "stop_token_ids"})
    ('stop_ids must be at most 8; got 9.', 'stop_token_ids must be at most 8; got 9.')
    """

    def __init__(self, rule: str, *, field: str | None = None, code: Code = "invalid", **values: Any) -> None:
        super().__init__(rule)
        self.rule, self.field, self.code, self.values = rule, field, code, values

    def __str__(self) -> str:
        return self.told({})

    def __repr__(self) -> str:
        return f"InputError({str(self)!r})"

    def told(self, names: Mapping[str, str]) -> str:
        """The message, with other names for some arguments."""
        field = None if self.field is None else names.get(self.field, self.field)
        values = {name: value.told(names) if isinstance(value, InputError) else value for name, value in self.values.items()}
        return self.rule.format_map(_Words({**names, "field": field, **values}))


def refused(message: str, **fields: str) -> InputError:
    """The error of a plain message, which is no template, about one argument and its `Code`: the kind of mistake.

    For arguments that have one name everywhere. Of a file, the field is the name of what is wrong in it, else the file's.

    >>> error = refused("rows must be below 4; got 5. Lower it.", rows="out_of_range")
    >>> str(error), error.field, error.code
    ('rows must be below 4; got 5. Lower it.', 'rows', 'out_of_range')
    """
    ((field, code),) = fields.items()
    return InputError(message.replace("{", "{{").replace("}", "}}"), field=field, code=cast(Code, code))


class _Words(dict[str, Any]):
    """The words of a template; a name that is none of them is written as it is."""

    def __missing__(self, name: str) -> str:
        return name
