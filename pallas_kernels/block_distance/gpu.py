"""Pallas for NVIDIA GPUs: a program per layer of each pair sums the pages of its heads, a few slots at a time, in fixed order.

There are thousands of short programs, and many of them on each multiprocessor keep the memory busy, so tiles are small. The
partner of a channel in the rotation is loaded a second time, from the cache. Slots beyond the tokens are not read.

Vectors of 4-bit codes stay rotated by Hadamard's matrix, which changes no distance. A product with a matrix for each pair turns
the keys of its second page; its four quarters multiply the low and the high halves of bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.block_distance.reference import turn_of_rotated
from pallas_kernels.launch import dot, launch, load
from pallas_kernels.quantised import Format, Numbers, Quantised, is_rotated, numbers_of, why_no_codes

TILE = 1024  # elements of each page per addition
MOST_HEAD_SIZE = 1024
MOST_TURNED = 128  # channels of heads of 4-bit codes that turn: with 256, a program asks for 280,576 bytes of shared memory
LEAST_ROWS = 16  # of a product


def why_not(kv: Any, first: Any, second: Any, num_tokens: Any, angle: Any) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    if reason := why_no_codes(kv):
        return reason
    if not isinstance(kv, Quantised) and kv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the pool must be float32 or bfloat16; got {kv.dtype}"
    if kv.shape[3] > MOST_HEAD_SIZE:
        return f"the head size must be at most {MOST_HEAD_SIZE}; got {kv.shape[3]}"
    if is_rotated(kv) and angle is not None and kv.shape[3] > MOST_TURNED:
        return f"heads of {kv.format.name} must have at most {MOST_TURNED} channels for keys to turn; got {kv.shape[3]}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def block_distance(
    kv: Numbers,
    first: Int[Array, "I L K"],
    second: Int[Array, "I L K"],
    num_tokens: Int[Array, " I"],
    angle: Float[Array, "I half"] | None,
    interpret: Any = False,
) -> Float[Array, "I L 2 3"]:
    """See `pallas_kernels.block_distance`."""
    num_pairs, num_layers, _ = first.shape
    pool, format = ([kv.codes, kv.scale], kv.format) if isinstance(kv, Quantised) else ([kv], None)
    inputs = [first, second, num_tokens, *pool]
    if angle is not None:
        inputs += [turn_of_rotated(angle, kv.shape[3])] if is_rotated(kv) else [jnp.cos(angle), jnp.sin(angle)]
    body: Any = measure_groups if is_rotated(kv) else measure
    return launch(
        functools.partial(body, format, angle is not None),
        *inputs,
        name="block_distance",
        grid=(num_pairs, num_layers),
        out_shape=jax.ShapeDtypeStruct((num_pairs, num_layers, 2, 3), jnp.float32),
        num_warps=4,
        interpret=interpret,
    )


def measure(
    format: Format | None, is_turned: bool, first_ref: Any, second_ref: Any, num_tokens_ref: Any, kv_ref: Any, *refs: Any
) -> None:
    """Sums the squares of one layer of one pair."""
    scale_ref, *refs = refs if format is not None else (None, *refs)  # type: ignore[assignment]
    cos_ref, sin_ref, out_ref = refs if is_turned else (None, None, *refs)
    num_heads, (page_size, head_size) = first_ref.shape[2], kv_ref.shape[2:]
    channels = pl.next_power_of_2(head_size)
    rows = min(pl.next_power_of_2(page_size), max(1, TILE // channels))
    pair, layer = pl.program_id(0), pl.program_id(1)
    num_tokens = num_tokens_ref[pair]
    channel_H = lax.broadcasted_iota(jnp.int32, (rows, channels), 1)
    slot_S = lax.broadcasted_iota(jnp.int32, (rows, channels), 0)
    partner_H = channel_H
    if is_turned:
        half = cos_ref.shape[1]
        is_low_H, is_turning_H = channel_H < half, channel_H < 2 * half
        frequency_H = jnp.where(is_low_H, channel_H, channel_H - half)
        cos_H = load(cos_ref.at[pair, frequency_H], mask=is_turning_H, other=1.0)
        sin_H = load(sin_ref.at[pair, frequency_H], mask=is_turning_H, other=0.0)
        sin_H = jnp.where(is_low_H, -sin_H, sin_H)
        partner_H = jnp.where(is_low_H, channel_H + half, jnp.where(is_turning_H, channel_H - half, channel_H))

    def read(page: Any, part: int, slot: Any, channel_H: Any, is_read: Any) -> Any:
        """Keys or values of some slots and channels in float32."""
        numbers = load(kv_ref.at[page, part, slot, channel_H], mask=is_read, other=0)
        if format is None:
            return numbers.astype(jnp.float32)
        scale = load(scale_ref.at[page, part, slot], mask=is_read, other=0.0)
        return numbers_of(numbers, format, jnp.float32) * scale

    def add(index: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        head, slot = lax.div(index, chunks), lax.rem(index, chunks) * rows + slot_S
        pages = first_ref[pair, layer, head], second_ref[pair, layer, head]
        is_read = (slot < num_tokens) & (channel_H < head_size)
        added = []
        for part in range(2):
            one, other = (read(page, part, slot, channel_H, is_read) for page in pages)
            if is_turned and part == 0:
                other = other * cos_H + read(pages[1], part, slot, partner_H, is_read) * sin_H
            added += [one * one, other * other, jnp.square(one - other)]
        return tuple(old + new for old, new in zip(sums, added, strict=True))

    chunks = pl.cdiv(page_size, rows)
    sums = lax.fori_loop(0, num_heads * chunks, add, (jnp.zeros((rows, channels), jnp.float32),) * 6)
    for i, total in enumerate(sums):
        out_ref[pair, layer, i // 3, i % 3] = jnp.sum(total)


def measure_groups(
    format: Any,
    is_turned: bool,
    first_ref: Any,
    second_ref: Any,
    num_tokens_ref: Any,
    code_ref: Any,
    scale_ref: Any,
    *refs: Any,
) -> None:
    """Sums the squares of one layer of one pair, of 4-bit codes. Arrays of C channels are pairs, for both halves of bytes."""
    matrix_ref, out_ref = refs if is_turned else (None, *refs)
    num_heads, (page_size, num_bytes) = first_ref.shape[2], code_ref.shape[2:]
    rows = max(LEAST_ROWS, TILE // (2 * num_bytes))
    pair, layer = pl.program_id(0), pl.program_id(1)
    num_tokens = num_tokens_ref[pair]
    byte_C, row_S = jnp.arange(num_bytes, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)

    def read(page: Any, part: int, slot_S: Any) -> list[Any]:
        """Rotated keys or values of some slots in float32; 0 beyond the tokens."""
        slot_S1 = slot_S[:, None]
        is_read_S1 = slot_S1 < num_tokens
        byte_SC = load(code_ref.at[page, part, slot_S1, byte_C[None]], mask=is_read_S1, other=0).astype(jnp.int32)
        numbers = []
        for half, code_SC in enumerate((byte_SC & 15, byte_SC >> 4)):
            group_C = lax.div(half * num_bytes + byte_C, format.group)
            bits_SC = load(scale_ref.at[page, part, slot_S1, group_C[None]], mask=is_read_S1, other=0)
            scale_SC = lax.bitcast_convert_type(bits_SC, jnp.float16).astype(jnp.float32)
            numbers.append((code_SC - 8).astype(jnp.float32) * scale_SC)
        return numbers

    def turned(key: list[Any]) -> list[Any]:
        def quarter(of: int, to: int) -> Any:
            place = pair, (of * num_bytes + byte_C)[:, None], (to * num_bytes + byte_C)[None]
            return load(matrix_ref.at[place])

        def product(of: int, to: int) -> Any:
            return dot(key[of], quarter(of, to), precision=lax.Precision.HIGHEST)

        return [product(0, to) + product(1, to) for to in range(2)]

    def add(index: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        head, slot_S = lax.div(index, chunks), lax.rem(index, chunks) * rows + row_S
        pages = first_ref[pair, layer, head], second_ref[pair, layer, head]
        added = []
        for part in range(2):
            one, other = (read(page, part, slot_S) for page in pages)
            if is_turned and part == 0:
                other = turned(other)
            apart = [x - y for x, y in zip(one, other, strict=True)]
            added += [low * low + high * high for low, high in (one, other, apart)]
        return tuple(old + new for old, new in zip(sums, added, strict=True))

    chunks = pl.cdiv(page_size, rows)
    sums = lax.fori_loop(0, num_heads * chunks, add, (jnp.zeros((rows, num_bytes), jnp.float32),) * 6)
    for i, total in enumerate(sums):
        out_ref[pair, layer, i // 3, i % 3] = jnp.sum(total)
