"""How arrays are split over a mesh: the `PartitionSpec` of each array follows from the axes in its annotation.

The dimension letters of `jkv.__init__` decide. KV heads, query heads and pages are split over the mesh axis "tensor", and so
are the MLP width and the vocabulary of weights (Megatron-LM, arXiv 1909.08053). Other axes are replicated. There is no table
of arguments or fields: one without axes, or with an unknown axis, is an error when `jkv.engine.mesh` builds the program.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
from jax.sharding import PartitionSpec
from jaxtyping import AbstractArray

from jkv.model.params import LowRank, ModelConfig, Params

P: Any = PartitionSpec  # typed as Any: records hold specs in place of their arrays
HEADS = "tensor"  # the mesh axis
SPLIT = frozenset("KNP")  # P: pages of all shards, one shard after the other
SPLIT_WEIGHTS = frozenset("KNFV")
WHOLE = frozenset([*"BDEFGHILMRSTVWX", "MP", "half", "page", "steps"])  # E: stop tokens, I: entries of a list, X: experts
ANY: Any = object()  # in place of a value that does not exist yet; all of its optional parts count as present


def spec_of(letters: str, is_weight: bool = False) -> Any:
    """The `PartitionSpec` of an array with these axes. The first factor decides for an axis such as `N*H`.

    Raises:
      ValueError: an unknown axis, or two axes that are both to be split.

    >>> spec_of("L B K MP") == P(None, None, "tensor")
    True
    >>> spec_of("B V") == P(), spec_of("D V", is_weight=True) == P(None, "tensor")
    (True, True)
    """
    split = SPLIT_WEIGHTS if is_weight else SPLIT
    axes: list[str | None] = []
    for axis in letters.split():
        first, *others = axis.split("*")
        unknown = [name for name in (first, *others) if not (name.isdigit() or name in split | WHOLE)]
        if unknown or split & set(others):
            known = ", ".join(sorted(split | WHOLE))
            raise ValueError(f"Axis {axis!r} of {letters!r} must be one of {known}, or a number. Add it to jkv.model.sharding.")
        axes.append(HEADS if first in split else None)
    if axes.count(HEADS) > 1:
        raise ValueError(f"At most one axis may be split over {HEADS!r}; got two in {letters!r}. Change the layout.")
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def specs_of(hint: Any, value: Any = ANY, name: str = "value", is_weight: bool = False) -> Any:
    """The specs of a value of an annotated type: a tree of `PartitionSpec`, each of which applies to all arrays below it.

    Args:
      hint: a jaxtyping array, `Annotated[Any, "L B K"]`, a record or tuple of these, or one of them or None.
      value: gives the optional parts that are present, the number of layers and the static fields. With `ANY`, all parts are
        present, and a record with static fields becomes a dict.
      name: the name of the value in errors.

    Raises:
      ValueError: a part whose annotation names no axes.
    """
    letters = letters_of(hint)
    if value is None:
        return None
    if letters is not None:
        try:
            spec = spec_of(letters, is_weight)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return adapter_specs(spec, value) if isinstance(value, LowRank) else spec
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        arrays = [member for member in members if member not in (type(None), int, float, bool)]
        present = [member for member in arrays if len(arrays) == 1 or value is ANY or type(value) is member]
        if present:  # of several records, the value's own
            return specs_of(present[0], value, name, is_weight)
    if origin is dict:
        spec = specs_of(members[1], name=name, is_weight=is_weight)
        return spec if value is ANY else dict.fromkeys(value, spec)
    if origin is tuple:
        if members[-1] is Ellipsis:
            members = members[:1] * (1 if value is ANY else len(value))
        pairs = enumerate(zip(members, parts(value, members), strict=True))
        return tuple(specs_of(member, part, f"{name}[{i}]", is_weight) for i, (member, part) in pairs)
    if hasattr(hint, "_fields"):  # a NamedTuple
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = zip(hint._fields, parts(value, hint._fields), strict=True)
        return hint(*(specs_of(hints[field], part, f"{name}.{field}", is_weight) for field, part in fields))
    if isinstance(hint, type) and issubclass(hint, flax.struct.PyTreeNode):
        specs = {
            field: specs_of(leaf_hint, getattr(value, field, ANY), f"{name}.{field}", is_weight or hint is Params)
            for field, leaf_hint in leaf_hints(hint).items()
        }
        return specs if value is ANY else value.replace(**specs)
    raise ValueError(
        f"{name} must name its axes, so that a mesh can split it; {hint} names none. Annotate it with a jaxtyping "
        "shape, or list a static argument in jkv.engine.mesh.SETTINGS."
    )


def letters_of(hint: Any) -> str | None:
    """The axes in the annotation of an array; None if it names none."""
    if typing.get_origin(hint) is typing.Annotated:
        return next((note for note in hint.__metadata__ if isinstance(note, str)), None)
    return hint.dim_str if isinstance(hint, type) and issubclass(hint, AbstractArray) else None


def leaf_hints(record: type) -> dict[str, Any]:
    """The annotations of a `flax.struct` record's fields, without the static ones."""
    hints = typing.get_type_hints(record, include_extras=True)
    fields: Any = record.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: hints[name] for name, field in fields.items() if field.metadata.get("pytree_node", True)}


def parts(value: Any, members: Sequence[Any]) -> Any:
    """The parts of a tuple; for `ANY`, one `ANY` per member."""
    return [ANY] * len(members) if value is ANY else value


def adapter_specs(spec: Any, weight: LowRank) -> LowRank:
    """The specs of a low-rank adapter, which is split on the same side as its base: `down` by rows or `up` by columns."""
    down, up = (P(HEADS), P()) if spec == P(HEADS) else (P(), P(None, HEADS))
    return weight.replace(base=spec, down=down, up=up)


def is_spec(x: Any) -> bool:
    """Whether `x` is a `PartitionSpec`."""
    return isinstance(x, P)


def check_divides(config: ModelConfig, num_shards: int) -> None:
    """Refuses a number of shards that does not divide a model's heads, MLP width and vocabulary."""
    for field in ("num_kv_heads", "num_query_heads", "mlp_width", "vocab_size"):
        size = getattr(config, field)
        if size % num_shards:
            raise ValueError(
                f'{field}={size} must be a multiple of the {num_shards} devices of the axis "{HEADS}"; '
                f"{size} / {num_shards} = {size / num_shards:.2f}. Use a mesh of fewer devices."
            )


def local_config(config: ModelConfig, num_shards: int) -> ModelConfig:
    """The configuration of one shard, with its part of the heads and of the MLP width."""
    parts = {field: getattr(config, field) // num_shards for field in ("num_query_heads", "num_kv_heads", "mlp_width")}
    return dataclasses.replace(config, **parts)


def part_of(params: Params) -> Params:
    """The weights of one shard, inside of a `jax.shard_map`; the decoder adds up the partial sums of all shards."""
    return params.replace(config=local_config(params.config, jax.lax.axis_size(HEADS)), axis=HEADS)
