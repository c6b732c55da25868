"""Immutable records of arrays (weights, the pool, a batch) over whose fields JAX maps; a change makes a new record."""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the tree's structure: hashable, and another value compiles a program anew."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
class PyTree:
    """The base of such a record: a subclass is a frozen dataclass, and JAX knows its fields as leaves, by name.

    >>> class Point(PyTree):
    ...     x: jax.Array
    ...     unit: str = static(default="m")
    >>> jax.tree.map(lambda x: 2 * x, Point(3)).replace(unit="cm")
    Point(x=6, unit='cm')
    """

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in these fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]
