"""How arrays are split over a mesh: the `PartitionSpec` of each array follows from the axes in its annotation.

The dimension letters of `jkv.__init__` decide. KV heads, query heads and pages are split over the mesh axis "tensor", and so
are the MLP width and the vocabulary of weights (Megatron-LM, arXiv 1909.08053). Experts are split by their
number, or by their width too, if the configuration says so. Other axes are replicated. There is no table
of arguments or fields: one without axes, or with an unknown axis, is an error when `jkv.engine.mesh` builds the program.

Where devices outnumber KV heads, the axis becomes two: `HEADS` splits KV heads and their pages, and both together all else. The
devices along `COPIES` compute the same keys and values and keep the same pages, each with its query heads. What a policy reads
of queries is gathered, or summed, over the copies, so all of them evict the slots that one device evicts. Without such an axis
`gather_copies` and its like return their argument.
"""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import AbstractArray, Array, Shaped

from jkv.errors import refused
from jkv.model.joined import is_joined, separate_weights
from jkv.model.params import AdapterStack, Codes, LowRank, Model, ModelConfig, Params
from jkv.pytrees import PyTree
from pallas_kernels.blocks import Blocks

HEADS = "tensor"  # the mesh axis that splits KV heads
COPIES = "copies"  # the one along which devices hold copies of them


def num_copies(config: ModelConfig, num_devices: int) -> int:
    """How many devices hold each KV head; 1 unless they are a multiple of the heads, which `may_be_copied`."""
    heads = config.num_kv_heads
    return num_devices // heads if may_be_copied(config) and heads < num_devices and num_devices % heads == 0 else 1


def may_be_copied(config: ModelConfig) -> bool:
    """Whether all layers split their heads alike: none has another number of KV heads, and none a recurrent state."""
    return config.delta_net is None and config.window_kv_heads in (0, config.num_kv_heads)


def copies_here() -> int:
    """The size of the axis `COPIES` where a program is traced; 1 outside of a mesh that has it."""
    try:
        return jax.lax.axis_size(COPIES)
    except NameError:  # no such axis
        return 1


def sum_over_copies(x: Shaped[Array, "*A"]) -> Shaped[Array, "*A"]:
    """The sum of what the copies have of their query heads."""
    return jax.lax.psum(x, COPIES) if copies_here() > 1 else x


def mean_over_copies(x: Shaped[Array, "*A"]) -> Shaped[Array, "*A"]:
    """The mean of what the copies have of their query heads."""
    return jax.lax.pmean(x, COPIES) if copies_here() > 1 else x


def gather_copies(x: Shaped[Array, "*A"], axis: int) -> Shaped[Array, "*B"]:
    """All query heads of the KV heads here, which are at `axis`."""
    return jax.lax.all_gather(x, COPIES, axis=axis, tiled=True) if copies_here() > 1 else x


P: Any = PartitionSpec  # typed as Any: records hold specs in place of their arrays
BOTH = (HEADS, COPIES)
SPLIT = frozenset("KNP")  # P: pages of all shards, one shard after the other
SPLIT_WEIGHTS = frozenset("KNFV")
OF_KV_HEADS = frozenset("KP")  # copied where devices outnumber them; what else is split, is split over all devices
EXPERTS = "X"  # split in place of the width of their matrices
WHOLE = frozenset(
    [*"ABDEFGHILMRSTVWX", "MP", "choices", "entries", "half", "joined", "page", "steps", "top"]
)  # E: stop tokens, I: entries of a list, top: most likely tokens
KV_COUNTS = "num_kv_heads", "window_kv_heads"  # 0 for what a model does not have
HEAD_COUNTS = *KV_COUNTS, "num_query_heads"
WIDTHS = (
    "mlp_width",
    "dense_width",
    "shared_width",
    "sharing_mlp_width",
)  # fields of `ModelConfig` that are F of some block; 0 if it has none
ANY: Any = object()  # in place of a value that does not exist yet; all of its optional parts count as present


def spec_of(letters: str, split: frozenset[str] = SPLIT) -> Any:
    """The `PartitionSpec` of an array with these axes, of which those in `split` are split. The first factor decides for an
    axis such as `N*H`.

    Raises:
      ValueError: an unknown axis, or two axes that are both to be split.

    >>> spec_of("L B K MP") == P(None, None, "tensor")
    True
    >>> spec_of("B V") == P(), spec_of("D V", SPLIT_WEIGHTS) == P(None, BOTH)
    (True, True)
    >>> spec_of("X F D", SPLIT_WEIGHTS) == P(None, BOTH), spec_of("X F D", SPLIT_WEIGHTS | {EXPERTS}) == P(BOTH)
    (True, True)
    """
    if EXPERTS in split and EXPERTS in letters.split():
        split = frozenset(EXPERTS)
    axes: list[Any] = []
    for axis in letters.split():
        first, *others = axis.split("*")
        unknown = [name for name in (first, *others) if not (name.isdigit() or name in split | WHOLE)]
        if unknown or split & set(others):
            known = ", ".join(sorted(split | WHOLE))
            raise ValueError(f"Axis {axis!r} of {letters!r} must be one of {known}, or a number. Add it to jkv.model.sharding.")
        axes.append((HEADS if first in OF_KV_HEADS else BOTH) if first in split else None)
    if len(axes) - axes.count(None) > 1:
        raise ValueError(f"At most one axis may be split over {HEADS!r}; got two in {letters!r}. Change the layout.")
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def specs_of(hint: Any, value: Any = ANY, name: str = "value", split: frozenset[str] = SPLIT) -> Any:
    """The specs of a value of an annotated type: a tree of `PartitionSpec`, each of which applies to all arrays below it.

    Args:
      hint: a jaxtyping array, `Annotated[Any, "L B K"]`, a record or tuple of these, or one of them or None.
      value: gives the optional parts that are present, the number of layers and the static fields. With `ANY`, all parts are
        present, and a record with static fields becomes a dict.
      name: the name of the value in errors.
      split: the axes that are split; below a `Params`, its weights decide them.

    Raises:
      ValueError: a part whose annotation names no axes.
    """
    letters = letters_of(hint)
    if value is None:
        return None
    if letters is not None:
        try:
            spec = spec_of(letters, split)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return matrix_specs(spec, value)
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        arrays = [member for member in members if member not in (type(None), int, float, bool)]
        present = [member for member in arrays if len(arrays) == 1 or value is ANY or type(value) is member]
        if present:  # of several records, the value's own
            return specs_of(present[0], value, name, split)
    if origin is dict:
        spec = specs_of(members[1], name=name, split=split)
        return spec if value is ANY else dict.fromkeys(value, spec)
    if origin is tuple:
        if members[-1] is Ellipsis:
            members = members[:1] * (1 if value is ANY else len(value))
        pairs = enumerate(zip(members, parts(value, members), strict=True))
        return tuple(specs_of(member, part, f"{name}[{i}]", split) for i, (member, part) in pairs)
    if hasattr(hint, "_fields"):  # a NamedTuple
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = zip(hint._fields, parts(value, hint._fields), strict=True)
        return hint(*(specs_of(hints[field], part, f"{name}.{field}", split) for field, part in fields))
    if isinstance(hint, type) and issubclass(hint, PyTree):
        if hint is Params:
            if value is not ANY and is_joined(value):
                raise refused(
                    f"{name} must have an array for each matrix, which a mesh can split; several are joined. Pass "
                    "jkv.separate_weights(params), or load with joined=False.",
                    params="unsupported",
                )
            by_number = value is not ANY and splits_experts(value.config)
            split = SPLIT_WEIGHTS | {EXPERTS} if by_number else SPLIT_WEIGHTS
        specs = {
            field: specs_of(leaf_hint, getattr(value, field, ANY), f"{name}.{field}", split)
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
    """The annotations of a `PyTree` record's fields, without the static ones and what its class says."""
    hints = typing.get_type_hints(record, include_extras=True)
    fields: Any = record.__dataclass_fields__  # type: ignore[attr-defined]
    leaves = [name for name, field in fields.items() if not field.metadata.get("static")]
    return {name: hints[name] for name in leaves if typing.get_origin(hints[name]) is not typing.ClassVar}


def parts(value: Any, members: Sequence[Any]) -> Any:
    """The parts of a tuple; for `ANY`, one `ANY` per member."""
    return [ANY] * len(members) if value is ANY else value


def matrix_specs(spec: Any, weight: Any) -> Any:
    """The specs of a matrix in its parts: an adapter is split on the same side as its base, and scales with what they scale."""
    rows, columns = (*spec, None, None)[:2]
    if isinstance(weight, LowRank):
        down, up = (P(rows), P()) if rows else (P(), P(None, columns))
        return weight.replace(base=matrix_specs(spec, weight.base), down=down, up=up)
    if isinstance(weight, AdapterStack):
        down, up = (P(None, rows), P()) if rows else (P(), P(None, None, columns))
        return AdapterStack(down=down, up=up, scale=P())
    if isinstance(weight, Codes):
        of_scale = spec if weight.code.ndim == 3 else P(columns) if columns else P()
        return Codes(code=spec, scale=of_scale)
    if isinstance(weight, Blocks):
        raise refused(
            "A mesh splits matrices of floats or of 8 bits; got one in the blocks of its GGUF file. Load the model without "
            'weight_dtype="blocks".',
            params="unsupported",
        )
    return spec


def is_spec(x: Any) -> bool:
    """Whether `x` is a `PartitionSpec`."""
    return isinstance(x, P)


def check_divides(config: ModelConfig, num_shards: int) -> None:
    """Refuses a number of shards that does not divide a model's heads, MLP width or experts, and vocabulary.

    It may be a multiple of the KV heads instead (`num_copies`).
    """
    for field in (*HEAD_COUNTS, *split_sizes(config), "vocab_size"):
        size = getattr(config, field)
        shards = num_shards if field not in KV_COUNTS else num_shards // num_copies(config, num_shards)
        if size % shards:
            remedy = " or jkv.split_by_width(model), to load it jkv.load(..., split_by_width=True)" * (field == "num_experts")
            or_copied = ", or divide their number" * (field == "num_kv_heads" and may_be_copied(config))
            raise refused(
                f'{field}={size} must be a multiple of the {num_shards} devices of the axis "{HEADS}"{or_copied}; '
                f"{size} / {num_shards} = {size / num_shards:.2f}. Use a mesh of fewer devices{remedy}.",
                mesh="does_not_fit",
            )
    for field in ("num_key_heads", "num_value_heads"):
        size = num_shards if config.delta_net is None else getattr(config.delta_net, field)
        if size % num_shards:
            raise refused(
                f'delta_net.{field}={size} must be a multiple of the {num_shards} devices of the axis "{HEADS}"; '
                f"{size} / {num_shards} = {size / num_shards:.2f}. Use a mesh of fewer devices.",
                mesh="does_not_fit",
            )


def placed(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """The `NamedSharding` of each array in a tree."""

    def below(spec: Any, arrays: Any) -> Any:
        return jax.tree.map(lambda _: NamedSharding(mesh, fitted(spec, mesh)), arrays)

    return jax.tree.map(below, specs, tree, is_leaf=is_spec)


def fitted(spec: Any, mesh: Any) -> Any:
    """A spec on a mesh that may have no copies of KV heads."""
    return spec if COPIES in mesh.axis_names else P(*(HEADS if axis == BOTH else axis for axis in spec))


def fitted_all(specs: Any, mesh: Any) -> Any:
    """A tree of specs on a mesh that may have no copies of KV heads."""
    return jax.tree.map(lambda spec: fitted(spec, mesh), specs, is_leaf=is_spec)


def with_copies(mesh: Any, config: ModelConfig) -> Any:
    """The mesh, whose axis "tensor" becomes two where its devices outnumber the model's KV heads.

    Raises:
      ValueError: a mesh that is split for another number of KV heads, or one that `jax.set_mesh` gives unsplit.
    """
    count, shape = num_copies(config, num_parts(mesh)), dict(mesh.shape)
    heads = f"{config.num_kv_heads} KV heads on {num_parts(mesh)} devices"
    if COPIES in shape and shape[COPIES] != count:
        raise refused(
            f'The axis "{COPIES}" of a mesh must have {count} devices for {heads}; got {shape}. Give a mesh with the axis '
            f'"{HEADS}" in place of both, which is split as the model needs.',
            mesh="does_not_fit",
        )
    if COPIES in shape or count == 1:
        return mesh
    set_names = jax.sharding.get_abstract_mesh().axis_names
    if not isinstance(mesh, Mesh) or (HEADS in set_names and COPIES not in set_names):
        raise refused(
            f'The mesh of jax.set_mesh must have an axis "{COPIES}" for {heads}; got one without. '
            "Set the mesh of the weights, params.embedding.sharding.mesh, where jkv.shard(params, mesh) has placed them.",
            mesh="missing",
        )
    at = mesh.axis_names.index(HEADS)
    names = *mesh.axis_names[:at], *BOTH, *mesh.axis_names[at + 1 :]
    sizes = [mesh.shape[name] for name in mesh.axis_names]
    sizes[at : at + 1] = sizes[at] // count, count
    return Mesh(np.asarray(mesh.devices).reshape(sizes), names)


def num_parts(mesh: Any) -> int:
    """Over how many devices a mesh splits each row: the size of the axis "tensor", with that of copies."""
    shape = dict(mesh.shape)
    return shape.get(HEADS, 1) * shape.get(COPIES, 1)


def shardings(params: Params, mesh: Mesh) -> Params:
    """The `NamedSharding` of each weight on a mesh, as `jkv.restore` takes them; of weights or of `jkv.weight_shapes`.

    A mesh may have axes other than "tensor", along which devices hold copies: scoring and training split their rows there.
    Where the devices of "tensor" outnumber the KV heads, several hold the keys' and values' weights of one head, and the mesh
    of the shardings has one more axis, "copies".

    Raises:
      ValueError: a mesh without an axis "tensor", or joined matrices.
    """
    if HEADS not in mesh.axis_names:
        rule = f'The mesh of weights must have an axis "{HEADS}"; got {dict(mesh.shape)}. Rename its axis.'
        raise refused(rule, mesh="unsupported")
    return placed(with_copies(mesh, params.config), specs_of(Params, params, "params"), params)


def shard(params: Params, mesh: Mesh) -> Params:
    """The weights, split over the axis "tensor" of a mesh; weights that are already in place are not copied.

    Joined matrices are separated first, and are in memory twice meanwhile; `jkv.load(..., mesh=mesh)` reads them apart.
    """
    params = separate_weights(params)
    return jax.device_put(params, shardings(params, mesh))


def splits_experts(config: ModelConfig) -> bool:
    """Whether a mesh splits the experts of a model by their number."""
    return bool(config.num_experts and config.whole_experts)


def split_sizes(config: ModelConfig) -> tuple[str, ...]:
    """The fields with sizes of feed-forward blocks that a mesh splits."""
    return ("num_experts", *WIDTHS[1:]) if splits_experts(config) else WIDTHS


def split_by_width(model: Model) -> Model:
    """The same model, of each of whose experts every device of a mesh will have a part of the width.

    By default each device has some whole experts. Both add up partial sums once in a layer. Programs for TPUs write parts of
    experts in another layout before they read them, which takes as much memory again (`tests/aot/test_mesh.py`). Use this where
    the number of devices divides the width of experts and not their number, or with very few rows, which then read less.

    Raises:
      ValueError: a model without experts.
    """
    return dataclasses.replace(model, params=model.params.replace(config=without_whole_experts(model.config)))


def without_whole_experts(config: ModelConfig) -> ModelConfig:
    """The configuration of a model whose experts are split by their width.

    Raises:
      ValueError: a model without experts.
    """
    if not config.num_experts:
        rule = f"Only experts can be split in two ways; this {config.family} model has none. Leave it as it is."
        raise refused(rule, model="unsupported")
    return dataclasses.replace(config, whole_experts=False)


def local_config(config: ModelConfig, num_shards: int) -> ModelConfig:
    """The configuration of one shard, with its part of the heads, and of the MLP width or of the experts."""
    parts = {field: getattr(config, field) // num_shards for field in ("num_query_heads", *split_sizes(config))}
    parts |= {field: getattr(config, field) // (num_shards // num_copies(config, num_shards)) for field in KV_COUNTS}
    if splits_experts(config):
        parts["num_own_experts"] = parts.pop("num_experts")
    delta_net = config.delta_net
    if delta_net is not None:
        heads = {field: getattr(delta_net, field) // num_shards for field in ("num_key_heads", "num_value_heads")}
        delta_net = dataclasses.replace(delta_net, **heads)
    return dataclasses.replace(config, **parts, delta_net=delta_net)


def part_of(params: Params) -> Params:
    """The weights of one shard, inside of a `jax.shard_map`; the decoder adds up the partial sums of all shards."""
    copies = copies_here()
    config = local_config(params.config, jax.lax.axis_size(HEADS) * copies)
    return params.replace(config=config, axis=HEADS if copies == 1 else BOTH)
