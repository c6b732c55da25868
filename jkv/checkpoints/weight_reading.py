"""Reads the weights of a checkpoint to their devices, one leaf of `Params` after the other.

On a mesh, each device's part of a leaf is read by itself, so a host never holds more than its devices' weights and one tensor.
Tensors in MXFP4 and in GGUF files are read whole, one at a time, because they are dequantised.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jkv.checkpoints.architectures import text_tensors
from jkv.checkpoints.checkpoint_tensors import (
    DTYPES,
    FP8,
    MXFP4,
    PACKED,
    Bounds,
    Origin,
    Part,
    Stored,
    check_tensors,
    list_files,
    list_some,
    list_tensors,
    origins_of,
    read_mxfp4,
    stacked_shape,
    tensor_parts,
    with_mxfp4,
)
from jkv.checkpoints.families import find_family
from jkv.checkpoints.fp8_tensors import fp8_block, read_codes, read_fp8, with_fp8
from jkv.checkpoints.gguf_families import NAMES
from jkv.checkpoints.gguf_files import gguf_family, kind_of, read_blocks, read_gguf_weight, stored_dtype, why_not_blocks
from jkv.checkpoints.gguf_header import GgufHeader
from jkv.checkpoints.json_files import AGAIN, printable, read_json
from jkv.checkpoints.packed_tensors import Packing, packing_of, read_packed, with_packed
from jkv.checks import shown
from jkv.errors import InputError, refused
from jkv.model.eight_bits import AS_STORED, coded, format_of, quantise_weights
from jkv.model.joined import filled, is_joined, join_weights, joins_by_default, separate_weights
from jkv.model.params import Codes, ModelConfig, Params
from jkv.model.sharding import check_divides, num_parts, shardings, without_whole_experts
from jkv.model.weight_shapes import weight_shapes
from jkv.model.weights import all_finite, shapes_of
from pallas_kernels.blocks import BLOCKS, Blocks
from pallas_kernels.choice import is_old_gpu

ROWS = 1 << 12  # of two tensors that are compared at once
Index: TypeAlias = tuple[slice, ...]  # of a tensor; an empty one is the whole tensor
Read: TypeAlias = Callable[[str, Index], np.ndarray]


class Kept(NamedTuple):
    """How weights are kept."""

    dtype: Any  # None is the default
    weight_dtype: str | None  # of matrices in 8 bits, or `AS_STORED`
    mesh: Mesh | None = None  # None is the default device
    splits_width: bool = False  # whether a mesh splits each expert by its width
    joined: bool | None = None  # whether matrices that multiply the same input are one array; None: on a GPU without a mesh
    max_positions: int | None = None  # of the model; None is all that it has

    def chosen(self, stored: Any) -> "Kept":
        """With the default dtype for weights that are stored in this dtype, if none is given."""
        default = jnp.float32 if computes_in_float32() else stored
        return self._replace(dtype=float_dtype(default if self.dtype is None else self.dtype))

    @property
    def joins(self) -> bool:
        """Whether matrices that multiply the same input are one array."""
        return joins_by_default() and self.mesh is None if self.joined is None else self.joined

    def arranged(self, config: ModelConfig) -> ModelConfig:
        """The configuration with experts that are split as they shall be, and the positions that it shall have.

        Raises:
          ValueError: a width to split, and no experts, or more positions than the model has.
        """
        if self.max_positions is not None:
            if not 1 <= self.max_positions <= config.max_positions:
                raise InputError(
                    "{field} must be from 1 to the {most} positions of the model; got {got}. Correct it, or leave it out.",
                    field="max_positions",
                    code="out_of_range",
                    most=config.max_positions,
                    got=self.max_positions,
                )
            config = dataclasses.replace(config, max_positions=self.max_positions)
        return without_whole_experts(config) if self.splits_width else config

    def places(self, config: ModelConfig) -> Params | None:
        """The shardings of the weights on the mesh.

        Raises:
          ValueError: a mesh without an axis "tensor", or one that does not divide the model.
        """
        if self.mesh is None:
            return None
        shapes = weight_shapes(config)
        found = shardings(shapes if self.weight_dtype is None else quantise_weights(shapes, self.weight_dtype), self.mesh)
        check_divides(config, num_parts(self.mesh))
        return found


def kept_as(params: Params) -> tuple[Kept, Params]:
    """How weights are kept, and the shardings of each matrix, for new ones that replace them."""
    kept = Kept(params.embedding.dtype, format_of(params), joined=is_joined(params))
    return kept, jax.tree.map(lambda leaf: leaf.sharding, separate_weights(shapes_of(params)))


def computes_in_float32() -> bool:
    """Whether the default device computes in float32 whatever the dtype: a CPU, or a GPU from before Ampere."""
    return jax.default_backend() == "cpu" or is_old_gpu()


def float_dtype(dtype: Any) -> np.dtype:
    """The dtype of weights, checked."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES.values():
        raise refused(
            f"dtype must be float32, bfloat16 or float16; got {found.name if found else shown(dtype)}.", dtype="unknown_name"
        )
    return found


# From files


def read_weights(folder: Path, config: ModelConfig, kept: Kept, places: Params | None = None) -> Params:
    """The weights of a checkpoint folder, in the layout of `Params`.

    `places` are the shardings of the weights, of `Codes` where these are kept in 8 bits; None is the default device.
    """
    from safetensors import SafetensorError, safe_open

    files, family = list_files(folder), find_family(config.family)
    names, listed = family.tensors, list_tensors(files)
    on_disk = text_tensors(listed, family, str(folder))
    stored = {name: listed[full] for name, full in on_disk.items()}
    stored = with_mxfp4(stored) if family.reads_mxfp4 else stored
    fields, every = read_json(folder / "config.json"), stored
    quantised = fields.get("quantization_config") or fields.get("compression_config") or {}
    block = fp8_block(quantised)
    packing = None if block else packing_of(quantised, str(folder))
    stored = with_fp8(stored, block) if block else with_packed(stored, packing) if packing else stored
    warn_of_dequantised(stored, kept, folder, packing)
    wanted = tensor_parts(config, family.as_stored(stored))
    check_tensors(wanted, stored, config)
    with contextlib.ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read_stored(name: str, index: Index = ()) -> np.ndarray:
            file = listed[on_disk[name]].file
            if name in stored and stored[name].dtype == FP8:
                return read_codes(stored[name])
            try:
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, "numpy"))
                if not index:
                    return opened[file].get_tensor(on_disk[name])
                near = opened[file].get_slice(on_disk[name])[tuple(slice(one.start, one.stop) for one in index)]
                return near[tuple(slice(None, None, one.step) for one in index)]
            except (SafetensorError, OSError) as error:
                raise refused(f"{file} must be a safetensors file: {printable(error)}. {AGAIN}", file="invalid") from error

        dequantise: dict[str, Callable[[str], np.ndarray]] = {
            MXFP4: lambda name: read_mxfp4(read_stored, name),
            FP8: lambda name: read_fp8(read_stored, name, every, block or (0, 0)),
            PACKED: lambda name: read_packed(read_stored, name, every, packing or Packing("", 0, 0)),
        }
        read_whole = one_at_a_time(lambda name: dequantise[stored[name].dtype](name))

        def read(name: str, index: Index) -> np.ndarray:
            return read_whole(name, index) if stored[name].dtype in dequantise else read_stored(name, index)

        kept = kept.chosen(DTYPES.get(stored[names["embedding"]].dtype, jnp.bfloat16))
        params = read_leaves(config, wanted, read, kept, lambda name: f"{stored[name].file}: {name}", places)
        if config.tie_embeddings and names["unembedding"] in stored:
            check_tied(read_stored, names["embedding"], names["unembedding"], config, stored[names["unembedding"]].file)
    return params


def warn_of_dequantised(stored: Mapping[str, Stored], kept: Kept, folder: Path, packing: Packing | None) -> None:
    """Warns that weights in FP8 or in packed integers are kept in another form."""
    dtypes = {tensor.dtype for tensor in stored.values()} & {FP8, PACKED}
    if dtypes:
        form = FP8 if packing is None else f"{packing.bits} bits ({packing.method})"
        keeps = "fp8" if packing is None else "int8"
        now = (
            f"requantised to {kept.weight_dtype}" if kept.weight_dtype else f'dequantised; weight_dtype="{keeps}" keeps 8 bits'
        )
        warnings.warn(f"{folder}: weights in {form} are {now}. Activations are not quantised.", stacklevel=4)


def read_gguf_weights(header: GgufHeader, config: ModelConfig, kept: Kept, places: Params | None = None) -> Params:
    """The weights of a GGUF file, in the layout of `Params`: dequantised one by one, or in their blocks; `places`: see
    `read_weights`.
    """
    wanted = tensor_parts(config, gguf_family(header, config))
    read = one_at_a_time(lambda name: read_gguf_weight(header, name, stacked_shape(wanted[name]), config))
    kept, where = kept.chosen(DTYPES[stored_dtype(header)]), lambda name: f"{header.file}: {name}"
    if kept.weight_dtype != AS_STORED:
        return read_leaves(config, wanted, read, kept, where, places)
    warn_of_decoded(header, wanted)
    read_whole = one_at_a_time(lambda name: read_blocks(header, name, config))

    def rows(origin: Origin) -> jax.Array:
        outputs, inputs = origin.part.shape
        bounds = (inputs, outputs) if origin.part.is_transposed else (outputs, inputs)
        of_leaf = origin.slices([(0, size) for size in bounds])[:1]
        return jax.device_put(read_whole(origin.tensor, of_leaf), may_alias=False)

    blocks = functools.partial(in_blocks, header, kept.dtype, rows)
    own = kept._replace(weight_dtype=None, joined=False)
    params = read_leaves(config, wanted, read, own, where, places, blocks=blocks)
    return join_weights(params) if kept.joins else params


def in_blocks(header: GgufHeader, dtype: Any, rows: Callable[[Origin], Any], origin: Origin) -> Blocks | None:
    """A leaf in the blocks of its tensor, whose rows `rows` gives; None for one that is kept in floats.

    Blocks are the embedding and the matrices that a product multiplies.
    """
    part, name = origin.part, origin.tensor
    may_be = name == NAMES["embedding"] or (part.code_axis == 0 and len(part.shape) == 2 and part.expert is None)
    if not may_be or why_not_blocks(header, name):
        return None
    return Blocks(rows(origin), kind_of(header, name), np.dtype(dtype), part.is_transposed)


def gguf_shapes(header: GgufHeader, config: ModelConfig, dtype: Any) -> Params:
    """The shapes of the weights of a file that stay in its blocks, and of the others in `dtype`."""
    origins, (shapes, structure) = (
        origins_of(tensor_parts(config, gguf_family(header, config))),
        jax.tree.flatten(weight_shapes(config, dtype)),
    )

    def rows(origin: Origin) -> jax.ShapeDtypeStruct:
        kind, (outputs, inputs) = BLOCKS[kind_of(header, origin.tensor)], origin.part.shape
        return jax.ShapeDtypeStruct((outputs, inputs // kind.weights * kind.bytes), np.uint8)

    leaves = [in_blocks(header, dtype, rows, origins[index][0]) or shape for index, shape in enumerate(shapes)]
    return jax.tree.unflatten(structure, leaves)


def warn_of_decoded(header: GgufHeader, wanted: Mapping[str, list[Part]]) -> None:
    """Warns of quantised matrices that cannot be kept in their blocks."""
    is_float = {name: kind_of(header, name) in DTYPES for name in wanted}
    reasons = {name: why_not_blocks(header, name) for name in wanted if not is_float[name]}
    if odd := [name for name, reason in reasons.items() if reason]:
        warnings.warn(
            f"{header.file}: {list_some(odd)} cannot be kept in blocks and become floats ({odd[0]} {reasons[odd[0]]}). Blocks "
            f"may be {', '.join(BLOCKS)}, of matrices without experts.",
            stacklevel=5,
        )


def one_at_a_time(read_whole: Callable[[str], np.ndarray]) -> Read:
    """Reads whole tensors, and holds the last one for the parts of it that are asked for next."""
    held: dict[str, np.ndarray] = {}

    def read(name: str, index: Index) -> np.ndarray:
        if name not in held:
            held.clear()  # before the next one is read
            held[name] = read_whole(name)
        return held[name][index]

    return read


def check_tied(read: Read, embedding: str, unembedding: str, config: ModelConfig, file: Path) -> None:
    """Refuses a tied unembedding that differs from the embedding; `file` has it."""
    for first in range(0, config.vocab_size, ROWS):
        rows = slice(first, min(first + ROWS, config.vocab_size)), slice(0, config.width)
        if not np.array_equal(read(embedding, rows), read(unembedding, rows)):
            raise refused(
                f"{file}: {unembedding} must equal {embedding}, because config.json sets tie_word_embeddings; "
                "it differs. Set that to false, or remove the tensor.",
                tie_word_embeddings="conflict",
            )


# To devices


def read_leaves(
    config: ModelConfig,
    wanted: Mapping[str, list[Part]],
    read: Read,
    kept: Kept,
    where: Callable[[str], str],
    places: Params | None,
    advice: str = AGAIN,
    blocks: Callable[[Origin], Any] = lambda origin: None,
) -> Params:
    """All weights. `wanted` are the tensors, `read` gives a part of one, and `where` has its name in errors, with `advice`.

    `blocks` gives the leaves that are kept as their tensor has them, and None for others.
    """
    origins, (shapes, structure) = origins_of(wanted), jax.tree.flatten(weight_shapes(config))
    targets = [None] * len(shapes) if places is None else jax.tree.leaves(places, is_leaf=lambda x: isinstance(x, Codes))

    def leaf(index: int) -> Any:
        if (as_stored := blocks(origins[index][0])) is not None:
            return as_stored
        shape, place = shapes[index].shape, targets[index]
        part, names = origins[index][0].part, [where(origin.tensor) for origin in origins[index]]
        own = kept._replace(dtype=jnp.float32) if part.is_exact else kept
        between = functools.partial(read_between, origins[index], read, own.dtype)
        floats = put(shape, between, place.code if isinstance(place, Codes) else place)
        return finished(floats, own, part.code_axis, place, names, advice)

    return filled(structure, leaf, kept.joins)


def read_between(origins: Sequence[Origin], read: Read, dtype: Any, bounds: Bounds) -> np.ndarray:
    """What lies between these bounds of a leaf, in host memory."""
    out = np.empty([end - first for first, end in bounds], dtype)
    targets: Any = [(out, origins[0])]
    if origins[0].part.expert is not None:
        (first, end), *bounds = bounds
        targets = zip(out, origins[first:end], strict=True)
    for target, origin in targets:
        rows = read(origin.tensor, origin.slices(bounds))
        with np.errstate(over="ignore"):  # `finished` reports it
            target[...] = np.swapaxes(rows, -1, -2) if origin.part.is_transposed else rows
    return out


def put(shape: tuple[int, ...], between: Callable[[Bounds], np.ndarray], place: Sharding | None) -> jax.Array:
    """An array whose parts `between` reads, each once, on the default device or where `place` says."""
    if place is None:
        return jax.device_put(between([(0, size) for size in shape]), may_alias=False)  # a trainer may donate it
    indices = place.addressable_devices_indices_map(shape)
    holders: dict[Any, list[Any]] = {}
    for device, index in indices.items():
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    arrays: dict[Any, Any] = {}
    for bounds, devices in holders.items():
        part = between(bounds)  # a CPU may keep it as the array itself
        arrays |= {device: jax.device_put(part, device) for device in devices}
        jax.block_until_ready(arrays[devices[-1]])  # so that the host does not hold the next ones too
    return jax.make_array_from_single_device_arrays(shape, place, [arrays[device] for device in indices])


def finished(leaf: jax.Array, kept: Kept, code_axis: int | None, place: Any, names: Sequence[str], advice: str = AGAIN) -> Any:
    """A leaf as it is kept: in its dtype, checked, and in 8 bits where `kept` says so; its tensors have these `names`.

    Raises:
      ValueError: numbers that are not finite.
    """
    dtype = jnp.dtype(kept.dtype)
    leaf = leaf.astype(dtype)
    if not all_finite(leaf):
        is_finite = jnp.isfinite(leaf)
        name = names[int(jnp.argmin(is_finite.reshape(len(names), -1).all(axis=1)))] if len(names) > 1 else names[0]
        wider = "" if dtype == jnp.float32 else ' Or load with dtype="float32".'
        raise refused(f"{name} must be finite, got NaN or infinity as {dtype}. {advice}{wider}", **{name: "out_of_range"})
    if kept.weight_dtype is None or code_axis is None:
        return leaf
    codes = coded(leaf, kept.weight_dtype, code_axis)
    return codes if place is None else jax.device_put(codes, place)
