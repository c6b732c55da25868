"""Pallas for TPU: rotates queries and keys, and writes the new slots into their pages, all in flight at once.

A slot is one sublane of a packed tile, which a DMA cannot write alone. So the tile around each slot is read, changed and
written back. The reads of all rows and heads start before the rotation and are waited for after it. No two tokens share a
page, so their tiles do not overlap. Tokens of the null page are not stored. A quantised pool has tiles of codes and rows of
scales.

Pages of 4-bit codes are transposed, slots in lanes, as XLA stores them. There one product with Hadamard's matrix rotates all
heads of a token and makes columns of them; a column is rolled to the lane of its slot.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import hadamard, nibbles
from pallas_kernels import mosaic as pltpu
from pallas_kernels.quantised import Format, Numbers, Quantised, is_rotated, rounded, scales_of, stored

LANES = 128
SUBLANES = 8
STEP_BYTES = 8 << 20  # of the rows of a grid step, of the 16 MiB of vector memory that a kernel has
MOST_ROW_BYTES = 1 << 20
MOST_SMEM = 512 << 10  # bytes of addresses


def why_not(
    kv: Any, projected: Any, cos: Any, sin: Any, address: Any, ring: Any = None, ring_at: Any = None, layer: Any = None
) -> str | None:
    """Why the kernel cannot take these arguments; None when it can."""
    (num_rows, _, head_size), page_size, tile = projected.shape, kv.shape[2], tile_of(kv)
    if kv.dtype not in (jnp.float32, jnp.bfloat16) or projected.dtype != kv.dtype:
        return f"heads and pool must both be float32 or bfloat16; got {projected.dtype} and {kv.dtype}"
    if isinstance(kv, Quantised) and kv.format.name not in ("int8", "int4"):
        return f"quantised pages must be int8 or int4; got {kv.format.name}"
    if isinstance(kv, Quantised) and page_size % LANES:
        return f"a quantised page must be a multiple of {LANES} slots, for its scales; got {page_size}"
    if head_size % LANES:
        return f"the head size must be a multiple of {LANES}; got {head_size}"
    if is_rotated(kv) and head_size != LANES:
        return f"heads of {kv.format.name} must have {LANES} channels; got {head_size}"
    if is_rotated(kv) and projected.shape[1] > LANES:
        return f"a token of {kv.format.name} must have at most {LANES} heads; got {projected.shape[1]}"
    if page_size % tile:
        return f"a page of {kv.dtype} must be a multiple of {tile} slots; got {page_size}"
    if ring is not None and ring.dtype != kv.dtype:
        return f"ring and pool must have the same dtype; got {ring.dtype} and {kv.dtype}"
    if (size := row_bytes(projected, kv, address.shape[-1])) > MOST_ROW_BYTES:
        return f"heads and tiles of a row must take at most {MOST_ROW_BYTES} bytes; got {size}"
    if (size := 4 * num_rows * (address.shape[-1] + 1)) > MOST_SMEM:
        return f"addresses must take at most {MOST_SMEM} bytes; got {size}"
    return None


def tile_of(kv: Any) -> int:
    """Slots of a tile: 32 bytes of each channel, or a row of lanes."""
    return LANES if is_rotated(kv) else int(32 // stored(kv).dtype.itemsize)


def row_bytes(projected: Any, kv: Any, num_kv_heads: int) -> int:
    """Bytes of vector memory for a row: its heads and rotated queries, double-buffered, its tiles, and their new slots."""
    _, num_heads, head_size = projected.shape
    itemsize = projected.dtype.itemsize
    if is_rotated(kv):
        heads = num_heads + -num_heads % (32 // itemsize)
        codes, scales = head_size // 2 * LANES, 2 * (32 // 2) * LANES  # of a vector's tiles
        return int(4 * head_size * heads * itemsize + 2 * num_kv_heads * (codes + scales) + 4 * LANES * new_rows(kv))
    heads, new = num_heads + -num_heads % (32 // itemsize), 2 * num_kv_heads + -2 * num_kv_heads % SUBLANES
    scales = 4 * LANES * (2 * num_kv_heads + new) * len(scales_of(kv))
    return int(head_size * (4 * heads * itemsize + 2 * num_kv_heads * 32 + 4 * new)) + scales


def new_rows(kv: Any) -> int:
    """Rows of the words of a token's 4-bit codes and of the bits of their scales, a head in each lane."""
    (words, groups) = stored(kv).shape[3] // 4, kv.scale.shape[3]
    return int(words + groups + -groups % SUBLANES)


@functools.partial(jax.jit, static_argnames=("interpret",))
def rotate_append(
    kv: Numbers,
    projected: Float[Array, "B heads H"],
    cos: Float[Array, "B half"],
    sin: Float[Array, "B half"],
    address: Int[Array, "*L B K"],
    ring: Float[Array, "C N H"] | None = None,
    ring_at: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int | None = None,
    interpret: Any = False,
) -> tuple[Numbers, Float[Array, "B N H"], Float[Array, "C N H"] | None]:
    """See `pallas_kernels.rotate_append`."""
    address = address if layer is None else address[layer]
    (num_rows, num_heads, head_size), num_kv_heads = projected.shape, address.shape[1]
    num_query_heads, half, tile = num_heads - 2 * num_kv_heads, cos.shape[1], tile_of(kv)
    steps = pl.cdiv(num_rows, max(1, STEP_BYTES // row_bytes(projected, kv, num_kv_heads)))
    rows = pl.cdiv(num_rows, steps)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, steps * rows - num_rows), *[(0, 0)] * (x.ndim - 1)])

    # Every channel's factors: of itself, and of the other channel of its pair. Channels beyond the pairs have 1 and 0.
    beyond = [(0, 0), (0, head_size - 2 * half)]
    own = jnp.pad(jnp.concatenate([cos, cos], axis=1), beyond, constant_values=1)
    other = jnp.pad(jnp.concatenate([-sin, sin], axis=1), beyond)
    factors = jnp.stack([own, other], axis=1)

    def this(step: Any, *_: Any) -> tuple[Any, ...]:
        return step, 0, 0

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    # XLA stores a ring whose heads do not fill its tiles in another order, and would copy it for the kernel.
    kernel_ring = ring if num_query_heads % SUBLANES == 0 else None
    pool, treedef = jax.tree.flatten(kv)  # numbers, or codes and scales
    is_transposed = is_rotated(kv)
    if is_transposed:
        pool = [jnp.swapaxes(x, 2, 3) for x in pool]  # as XLA stores them, so nothing moves
        tile_shapes: list[Any] = [(2, x.shape[2], LANES) for x in pool]
        new_shapes: list[Any] = [((rows, new_rows(kv), LANES), jnp.int32)]
        matrices = [nibbles.reordered(hadamard.signs(head_size, jnp.dtype(jnp.float32))).T.astype(kv.dtype)]
    else:
        tile_shapes = [(2, tile, head_size), *[(2, LANES) for _ in scales_of(kv)]]
        heads = rows, 2 * num_kv_heads
        new_shapes = [((*heads, head_size), jnp.int32 if isinstance(kv, Quantised) else jnp.float32)]
        new_shapes += [((*heads, LANES), jnp.float32) for _ in scales_of(kv)]
        matrices = []
    pools = [*pool, *([] if kernel_ring is None else [kernel_ring])]
    format = kv.format if isinstance(kv, Quantised) else None
    tiles = rows * num_kv_heads
    places = jnp.zeros_like(address[:, 0]) if ring_at is None else ring_at
    query, *updated = pl.pallas_call(
        functools.partial(rotate_rows, half, num_rows, rows, num_kv_heads, format),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[
                pl.BlockSpec((rows, num_heads, head_size), this),
                pl.BlockSpec((rows, 2, head_size), this),
                *[pl.BlockSpec(matrix.shape, lambda *_: (0, 0)) for matrix in matrices],
                *[hbm for _ in pools],
            ],
            out_specs=[pl.BlockSpec((rows, num_query_heads, head_size), this), *[hbm for _ in pools]],
            scratch_shapes=[
                *[pltpu.VMEM((tiles, *shape), x.dtype) for shape, x in zip(tile_shapes, pool, strict=True)],
                *[pltpu.VMEM(shape, dtype) for shape, dtype in new_shapes],
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((steps * rows, num_query_heads, head_size), kv.dtype),
            *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        ],
        input_output_aliases={4 + len(matrices) + i: 1 + i for i in range(len(pools))},
        # Addresses are in bounds, as XLA's scatter assumes too.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="rotate_append",
    )(pad(address).reshape(-1), pad(places), pad(projected), pad(factors), *matrices, *pools)
    query, updated_pool = query[:num_rows], updated[: len(pool)]
    if is_transposed:
        updated_pool = [jnp.swapaxes(x, 2, 3) for x in updated_pool]
    if ring is not None:
        ring = ring.at[ring_at].set(query) if kernel_ring is None else updated[-1]
    return jax.tree.unflatten(treedef, updated_pool), query, ring


def rotate_rows(
    half: int,
    num_rows: int,
    rows: int,
    num_kv_heads: int,
    format: Format | None,
    # inputs
    address_smem_ref: Any,
    ring_at_smem_ref: Any,
    projected_vmem_ref: Any,
    factors_vmem_ref: Any,
    *refs: Any,
) -> None:
    """Rotates and stores some rows. The pool and the ring, if there is one, are the same as the inputs before."""
    *others, semaphores = refs
    is_transposed = format is not None and format.group is not None
    arrays = 1 if format is None else 2  # of the pool: numbers, or codes and scales
    num_new = 1 if is_transposed else arrays
    matrix_vmem_ref, *others = others if is_transposed else (None, *others)
    *others, tile_refs, new_refs = *others[: -arrays - num_new], others[-arrays - num_new : -num_new], others[-num_new:]
    query_vmem_ref, *updated = others[len(others) // 2 :]
    pool_refs, rings = updated[:arrays], updated[arrays:]
    num_queries, page_size = query_vmem_ref.shape[1], pool_refs[0].shape[3 if is_transposed else 2]
    first_row = pl.program_id(0) * rows
    num_real = lax.min(num_rows - first_row, rows)
    reads, writes, ring_writes = (semaphores.at[i] for i in range(3))

    def address_of(row: Any, head: int) -> Any:
        return address_smem_ref[(first_row + row) * num_kv_heads + head]

    def copies_of(row: Any, head: int, is_write: bool) -> list[Any]:
        """The copies that read or write the tiles around a slot."""
        page, offset = divided(address_of(row, head), page_size)
        copies = []
        for pool_ref, tile_ref in zip(pool_refs, tile_refs, strict=True):
            tile = tile_ref.shape[3 if is_transposed else 2]
            slots = pl.ds(pl.multiple_of(offset - divided(offset, tile)[1], tile), tile)
            place_ref = pool_ref.at[page, :, :, slots] if is_transposed else pool_ref.at[page, :, slots]
            ends = place_ref, tile_ref.at[row * num_kv_heads + head]
            copies.append(pltpu.make_async_copy(*(ends[::-1] if is_write else ends), writes if is_write else reads))
        return copies

    def start(row: Any, head: int, copies: list[Any]) -> None:
        """Starts the copies of a slot, if it is stored."""

        @pl.when(is_stored(row, head))
        def _() -> None:
            for copy in copies:
                copy.start()

    def is_stored(row: Any, head: int) -> Any:
        return address_of(row, head) >= page_size

    def read(row: Any, num_stored: Any) -> Any:
        for head in range(num_kv_heads):
            start(row, head, copies_of(row, head, is_write=False))
            num_stored += is_stored(row, head).astype(jnp.int32)
        return num_stored

    def rotate(row: Any, _: None) -> None:
        x = projected_vmem_ref[row].astype(jnp.float32)
        own, other = (factors_vmem_ref[row, i : i + 1] for i in range(2))
        turned = x * own + partners(x, half) * other
        is_rotated = lax.broadcasted_iota(jnp.int32, x.shape, 1) < 2 * half
        is_value = lax.broadcasted_iota(jnp.int32, x.shape, 0) >= num_queries + num_kv_heads
        out = jnp.where(is_rotated & ~is_value, turned, x).astype(query_vmem_ref.dtype)
        query_vmem_ref[row] = out[:num_queries]
        if is_transposed:
            store_columns(row, out)
            return
        new = out[num_queries:].astype(jnp.float32)
        if format is not None:
            new, scale = rounded(new, format)
            new, new_refs[1][row] = new.astype(jnp.int32) & 0xFF, jnp.broadcast_to(scale[:, None], new_refs[1].shape[1:])
        new_refs[0][row] = new

    def store_columns(row: Any, out_NH: Any) -> None:
        """Stores the codes and scales of a token's heads, a head in each lane: those of queries too, which nobody reads."""
        assert matrix_vmem_ref is not None
        assert format is not None
        turned_HN = lax.dot_general(
            matrix_vmem_ref[...],
            out_NH,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if out_NH.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        words_XN, bits_XN = nibbles.packed(turned_HN * out_NH.shape[1] ** -0.5, format)
        heads, num_words = pl.ds(0, len(out_NH)), len(words_XN)
        new_refs[0][row, pl.ds(0, num_words), heads] = words_XN
        new_refs[0][row, pl.ds(num_words, len(bits_XN)), heads] = bits_XN

    def write_column(row: Any, head: int) -> None:
        """Changes the tiles around a slot of 4-bit codes."""
        own, lane = row * num_kv_heads + head, divided(address_of(row, head), LANES)[1]
        code_ref, scale_ref = tile_refs
        for part in range(2):
            column = num_queries + part * num_kv_heads + head
            new_XS = pltpu.roll(new_refs[0][row], lane - column & LANES - 1, 1)
            words_XS, bits_XS = pltpu.bitcast(code_ref[own, part], jnp.int32), scale_ref[own, part].astype(jnp.int32)
            num_words, groups = len(words_XS), len(bits_XS)
            is_own_XS = lax.broadcasted_iota(jnp.int32, new_XS.shape, 1) == lane
            words_XS = jnp.where(is_own_XS[:num_words], new_XS[:num_words], words_XS)
            code_ref[own, part] = pltpu.bitcast(words_XS, code_ref.dtype)
            bits_XS = jnp.where(is_own_XS[:groups], new_XS[num_words : num_words + groups], bits_XS)
            scale_ref[own, part] = bits_XS.astype(scale_ref.dtype)

    def write(row: Any, _: None) -> None:
        for head in range(num_kv_heads):
            if is_transposed:
                write_column(row, head)
                start(row, head, copies_of(row, head, is_write=True))
                continue
            copies, own, address = copies_of(row, head, is_write=True), row * num_kv_heads + head, address_of(row, head)
            tile_ref, *scale_refs = tile_refs
            _, offset = divided(address, tile_ref.shape[2])
            for part in range(2):
                new_1H = new_refs[0][row, pl.ds(part * num_kv_heads + head, 1)]
                tile_ref[own, part] = replaced(tile_ref[own, part], new_1H, offset)
            for scale_ref in scale_refs:
                new_2X = new_refs[1][row, pl.ds(head, 2, stride=num_kv_heads)]
                is_own_2X = lax.broadcasted_iota(jnp.int32, new_2X.shape, 1) == divided(address, LANES)[1]
                scale_ref[own] = jnp.where(is_own_2X, new_2X, scale_ref[own])
            start(row, head, copies)

    def wait(num_tiles: Any, semaphore: Any) -> None:
        """Waits for that many tiles. A wait has a constant size: 13 tiles are waits for 8, 4 and 1."""

        def wait_for(size: int) -> None:
            for tile_ref in tile_refs:
                some = tile_ref.at[pl.ds(0, size)]
                pltpu.make_async_copy(some, some, semaphore).wait()

        for bit in range((rows * num_kv_heads).bit_length()):
            pl.when((num_tiles >> bit) & 1 == 1)(functools.partial(wait_for, 1 << bit))

    def ring_copy(row: Any) -> Any:
        place = rings[0].at[ring_at_smem_ref[first_row + row]]
        return pltpu.make_async_copy(query_vmem_ref.at[row], place, ring_writes)

    num_stored = lax.fori_loop(0, rows, read, jnp.int32(0))
    lax.fori_loop(0, rows, rotate, None)
    if rings:
        lax.fori_loop(0, num_real, lambda row, _: ring_copy(row).start(), None)
    wait(num_stored, reads)
    lax.fori_loop(0, rows, write, None)
    wait(num_stored, writes)
    if rings:
        lax.fori_loop(0, num_real, lambda row, _: ring_copy(row).wait(), None)


def divided(x: Any, size: int) -> tuple[Any, Any]:
    """Quotient and rest of a number that is not negative. A signed division takes longer than all else of a slot."""
    if size & (size - 1):
        return lax.div(x, size), lax.rem(x, size)
    return x >> (size.bit_length() - 1), x & (size - 1)


def partners(x: Float[Array, "heads H"], half: int) -> Float[Array, "heads H"]:
    """The other channel of each channel's pair; channels beyond the pairs get any."""
    head_size = x.shape[1]
    later = pltpu.roll(x, head_size - half, 1)
    if 2 * half == head_size:
        return later
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < half, later, pltpu.roll(x, half, 1))


def replaced(old: Shaped[Array, "tile H"], new: Shaped[Array, "1 H"], offset: Any) -> Shaped[Array, "tile H"]:
    """A tile with another slot at an offset. Two slots of 16 bits are one word, the even one in its lower half; four codes too.

    Codes come as the lowest bytes of words, numbers in float32.
    """
    if old.dtype == jnp.float32:
        return jnp.where(lax.broadcasted_iota(jnp.int32, old.shape, 0) == offset, new, old)
    if old.dtype == jnp.int8:
        words, shift = pltpu.bitcast(old, jnp.int32), 8 * (offset & 3)
        is_place = lax.broadcasted_iota(jnp.int32, words.shape, 0) == offset >> 2
        return pltpu.bitcast(jnp.where(is_place, words & ~(0xFF << shift) | new << shift, words), old.dtype)
    index, parity = divided(offset, 2)
    words, word = pltpu.bitcast(old, jnp.uint32), pltpu.bitcast(new, jnp.uint32)  # whose lower half is empty
    kept = jnp.where(parity == 1, jnp.uint32(0xFFFF), jnp.uint32(0xFFFF0000))
    word = jnp.where(parity == 1, word, word >> 16)
    is_place = lax.broadcasted_iota(jnp.int32, words.shape, 0) == index
    return pltpu.bitcast(jnp.where(is_place, words & kept | word, words), old.dtype)
