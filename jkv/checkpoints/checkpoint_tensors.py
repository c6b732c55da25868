"""Which tensor of a checkpoint each weight lies in, and where in it.

A tensor may hold several leaves of `Params` (fused projections), and a leaf may be made of several tensors (experts). An
`Origin` turns bounds of a leaf into an index of its tensor, so that no more than a device's part of a weight has to be read.
`jkv.checkpoints.weight_reading` reads, and `jkv.checkpoints.loading` finds the files and writes them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import Family, field_of
from jkv.checkpoints.mxfp4 import MXFP4
from jkv.checkpoints.weight_files import Stored
from jkv.model.eight_bits import code_axis
from jkv.model.params import ModelConfig
from jkv.model.weight_shapes import leaf_name, weight_shapes

DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}  # by their names in safetensors headers
EXACT = frozenset({"experts.choice_bias"})  # fields in float32, because a bias may be large where scores are nearly equal
Bounds: TypeAlias = Sequence[tuple[int, int]]  # of each axis the first index, and the one after the last


class Part(NamedTuple):
    """A leaf of `Params` inside a tensor of the checkpoint."""

    leaf: int  # index among the leaves
    shape: tuple[int, ...]  # in the file, rows first
    is_transposed: bool  # by its last two axes
    is_interleaved: bool = False  # with the other parts of the tensor, by its last axis
    code_axis: int | None = None  # over which a scale of its codes is found, of a matrix that may be kept in 8 bits
    expert: int | None = None  # whose matrix it is, in a leaf with the matrices of all experts
    is_exact: bool = False  # whether it is float32 whatever the dtype of the others
    stacking_axis: int = 0  # by which the parts of a tensor are stacked: the rows


class Origin(NamedTuple):
    """Where a leaf of `Params`, or an expert's matrix of one, comes from."""

    tensor: str
    parts: list[Part]  # of the tensor
    place: int  # of the leaf among these

    @property
    def part(self) -> Part:
        """The leaf's own part of the tensor."""
        return self.parts[self.place]

    def slices(self, bounds: Bounds) -> tuple[slice, ...]:
        """The index in the tensor of what lies between these bounds of the leaf (without the axis of experts).

        >>> query, key = Part(0, (8, 4), is_transposed=True), Part(1, (2, 4), is_transposed=True)
        >>> Origin("qkv", [query, key], 1).slices([(0, 4), (1, 2)])  # the last channel of key, of all inputs
        (slice(9, 10, None), slice(0, 4, None))
        """
        ends = list(bounds)
        if self.part.is_transposed:
            ends[-2:] = reversed(ends[-2:])
        if self.part.is_interleaved:
            (first, end), count = ends.pop(), len(self.parts)
            return (*(slice(*pair) for pair in ends), slice(first * count + self.place, end * count, count))
        axis = self.part.stacking_axis
        before = sum(part.shape[axis] for part in self.parts[: self.place])
        ends[axis] = ends[axis][0] + before, ends[axis][1] + before
        return tuple(slice(*pair) for pair in ends)


def tensor_parts(config: ModelConfig, family: Family | None = None) -> dict[str, list[Part]]:
    """For each tensor of the checkpoint, the leaves of `Params` that are stacked or interleaved in it; `family` names it."""
    parts: dict[str, list[Part]] = {}
    family = family or find_family(config.family)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(weight_shapes(config))[0]):
        name = leaf_name(path)
        tensor, field = family.tensor_of(name, config.expert_layers), field_of(name)
        is_of_expert = "{}" in tensor
        shape = leaf.shape[is_of_expert:]
        is_transposed = len(shape) > 1 and field not in family.untransposed | {"embedding"}
        stored = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        part = Part(index, stored, is_transposed, field in family.interleaved, code_axis(name), is_exact=field in EXACT)
        if field.startswith("experts."):  # each expert has rows of its own
            part = part._replace(stacking_axis=max(len(stored) - 2, 0))
        for expert in range(leaf.shape[0]) if is_of_expert else (None,):
            parts.setdefault(tensor.format(expert), []).append(part._replace(expert=expert))
    return parts


def stacked_shape(parts: list[Part]) -> tuple[int, ...]:
    """The shape of a tensor of the checkpoint."""
    if parts[0].is_interleaved:
        return (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    shape, axis = parts[0].shape, parts[0].stacking_axis
    return (*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :])


def check_tensors(wanted: Mapping[str, list[Part]], stored: Mapping[str, Stored], config: ModelConfig) -> None:
    """Refuses missing, unexpected and misshapen tensors."""
    family = find_family(config.family)
    unembedding = family.tensors["unembedding"]
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = " (or set tie_word_embeddings to true, if they are tied)" if unembedding in missing else ""
        raise ValueError(f"{files} must contain {list_some(missing)}; missing. Download the checkpoint again{hint}.")
    for name, parts in wanted.items():
        file, shape, dtype = stored[name]
        if shape != stacked_shape(parts):
            raise ValueError(f"{file}: {name} must have shape {stacked_shape(parts)}, got {shape}. Use its own config.json.")
        if dtype not in DTYPES and dtype != MXFP4:
            raise ValueError(f"{file}: {name} must be one of {', '.join(DTYPES)}, got {dtype}. Convert the weights first.")
    redundant = {unembedding} if config.tie_embeddings else set()
    shares = range(config.num_owners, config.num_layers)  # layers whose own keys and values nothing reads
    redundant |= {family.tensor_of(f"layers.{i}.{field}") for i in shares for field in ("key", "value", "key_norm")}
    surplus = [name for name in stored.keys() - wanted.keys() - redundant if not name.endswith("rotary_emb.inv_freq")]
    surplus = [name for name in surplus if not family.is_prediction(name, config.num_layers, stored.keys())]
    if surplus:
        raise ValueError(
            f"{files} must not contain {list_some(sorted(surplus))}: config.json defines no such weights. Use the config.json "
            "of these weights."
        )


def list_some(names: list[str]) -> str:
    """The first three names of a list, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def joined(pieces: list[np.ndarray], parts: list[Part]) -> np.ndarray:
    """A tensor of a checkpoint, made of its parts; `Origin.slices` finds them in it."""
    if parts[0].is_interleaved:
        return np.stack(pieces, axis=-1).reshape(stacked_shape(parts))
    return np.concatenate(pieces, parts[0].stacking_axis)


def origins_of(wanted: Mapping[str, list[Part]]) -> dict[int, list[Origin]]:
    """For each leaf of `Params`, by its index, where it comes from; of one with matrices of experts, an origin for each."""
    origins: dict[int, list[Origin]] = {}
    for tensor, parts in wanted.items():
        for place, part in enumerate(parts):
            origins.setdefault(part.leaf, []).append(Origin(tensor, parts, place))
    return {leaf: sorted(found, key=lambda origin: origin.part.expert or 0) for leaf, found in origins.items()}
