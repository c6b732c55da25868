"""The last keys and values of each row in the layers with a sliding window: a ring of fixed pages, outside of the pool.

A query reads the last W tokens, its own included, and nothing else. So the token of position p takes the slot `p % W` of its
row's ring, over the token that has just left the window, and a decode step reads every filled slot without a mask. The pages
of a ring belong to one layer, row and KV head for good: no allocator, nothing to compact, nothing to share. Policies do not
see these layers. A fork copies a row's rings; so do swapping and the rows kept for a next turn.

Steps that append up to T tokens to a row have rings of W + T - 1 slots. So a token that is rejected afterwards has overwritten
none that a later query reads, and each place reads its own window by a mask.

Rings hold floats, also where the pool is quantised.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels as kernels
from jkv.cache.pool import EMPTY, NULL_PAGE, num_pages_of
from jkv.cache.sink_logit import add_sink, sink_of_rows
from jkv.model.rotary import turn_in
from jkv.pytrees import PyTree, static
from pallas_kernels.quantised import put
from pallas_kernels.rotate_append.reference import rotate


class Windows(PyTree):
    """The rings of all rows, on the device; rows that do not run have their address in page 0."""

    kv: Annotated[Any, "P 2 page H"]
    size: int = static()  # W
    num_layers: int = static()  # L
    places: int = static(default=1)  # T: the tokens that a step may append to a row

    @property
    def num_slots(self) -> int:
        """Slots of a ring: the windows of T tokens that follow each other."""
        return self.size + self.places - 1

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.shape[2]

    @property
    def max_pages(self) -> int:
        """Pages of a ring (MP)."""
        return num_pages_of(self.num_slots, self.page_size)

    def tables(self, num_rows: int) -> Int[Array, "L B K MP"]:
        """The pages of each ring, which never change. K may be another than that of the pool."""
        page = jnp.arange(1, self.kv.shape[0], dtype=jnp.int32)
        return page.reshape(self.num_layers, num_rows, -1, self.max_pages)


def create(
    *,
    num_layers: int,
    num_rows: int,
    num_kv_heads: int,
    head_size: int,
    window: int,
    page_size: int,
    dtype: Any,
    poison: bool,
    places: int = 1,
) -> Windows:
    """Empty rings of `num_layers` layers with a window of `window` tokens; NaN with `poison`, for tests."""
    num_pages = num_layers * num_rows * num_kv_heads * num_pages_of(window + places - 1, page_size)
    kv = jnp.full((1 + num_pages, 2, page_size, head_size), jnp.nan if poison else 0, dtype)
    return Windows(kv, window, num_layers, places)


def read_row(windows: Windows, tables: Int[Array, "L B K MP"], row: Int[Array, ""]) -> Float[Array, "L K MP 2 page H"]:
    """A copy of one row's rings."""
    return windows.kv[tables[:, row]]


def write_rows(
    windows: Windows, tables: Int[Array, "L B K MP"], target: Int[Array, " R"], content: Float[Array, "L K MP 2 page H"]
) -> Windows:
    """Rings of rows `target` with the content of one row; targets equal to the number of rows, at the end, are ignored."""

    def write(i: Int[Array, ""], kv: Any) -> Any:
        return put(kv, (tables[:, target[i]],), content)

    return windows.replace(kv=jax.lax.fori_loop(0, (target < tables.shape[1]).sum(dtype=jnp.int32), write, windows.kv))


class WindowChunk(NamedTuple):
    """What a chunk of a prompt reads in a layer with a window: the window before it, and itself."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    begin: Int[Array, "B K S"]  # positions that read the slot, from here
    end: Int[Array, "B K S"]  # to here


class WindowDecode(NamedTuple):
    """Attention of each row's next tokens to their windows: one, or one at each of T places, of which some may be void.

    The places of a row read its ring one by one, as rows of their own: each has another window.
    """

    tables: Int[Array, "L B K MP"]
    position: Int[Array, "B T"]
    is_new: Bool[Array, "B T"]
    cos: Float[Array, "BT half"]  # of the new tokens' rotations, place after place of each row
    sin: Float[Array, "BT half"]
    unrotated: tuple[int, ...] = ()  # layers without RoPE

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """`jkv.model.decoder.Attend`, which rotates queries and keys."""
        windows, places, (_, num_rows, num_kv_heads, max_pages) = cache.windows, query.shape[1], self.tables.shape
        turn = turn_in(layer, self.cos, self.sin, self.unrotated)
        kv, rotated = windows.kv, query
        if is_stored:
            rotated = rotate(query, *(part.reshape(num_rows, places, -1) for part in turn))
        else:
            kv, rotated = self.append(layer, query, key, value, windows, turn)
        num_seen = self.position[:, :1] + jnp.cumsum(self.is_new, axis=1, dtype=jnp.int32)
        length = jnp.repeat(jnp.minimum(num_seen, windows.num_slots).reshape(-1), num_kv_heads)
        table = jnp.repeat(self.tables[layer], places, axis=0).reshape(-1, max_pages)
        weight = None
        if windows.places > 1:
            slot = jnp.arange(max_pages * windows.page_size, dtype=jnp.int32)
            is_read = (num_seen.reshape(-1, 1) - 1 - slot) % windows.num_slots < windows.size
            weight = jnp.repeat(jnp.where(is_read, 0.0, -jnp.inf), num_kv_heads, axis=0)
        rotated = rotated.reshape(len(table), -1, query.shape[-1])
        out, log_total, _ = kernels.paged_attention(rotated, kv, table, length, weight)
        if sink is not None:
            out, _ = add_sink(out, log_total, sink_of_rows(sink, num_rows * places, num_kv_heads))
        return out.reshape(query.shape), cache._replace(windows=windows.replace(kv=kv))

    def append(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        windows: Windows,
        turn: tuple[Float[Array, "BT half"], Float[Array, "BT half"]],
    ) -> tuple[Any, Float[Array, "BT N H"]]:
        """The rings with each row's new tokens, and the rotated queries."""
        slot = (self.position % windows.num_slots)[..., None]
        page = self.tables[layer, :, None, :, 0] + slot // windows.page_size  # a ring's pages follow each other
        address = jnp.where(self.is_new[..., None], page * windows.page_size + slot % windows.page_size, NULL_PAGE)
        address = address.reshape(-1, address.shape[-1])
        flat = jnp.concatenate([x.reshape(len(address), -1) for x in (query, key, value)], axis=1)
        projected = flat.reshape(len(flat), -1, query.shape[-1])
        kv, rotated, _ = kernels.rotate_append(windows.kv, projected, *turn, address, places=query.shape[1])
        return kv, rotated


class WindowPrefill(NamedTuple):
    """Attention of a chunk of one row's prompt to the row's window and to itself."""

    tables: Int[Array, "L B K MP"]
    row: Int[Array, " 1"]
    position: Int[Array, "1 T"]
    num_new: Int[Array, " 1"]

    def __call__(
        self,
        layer: int,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 T K H"],
        value: Float[Array, "1 T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "1 T N H"], Any]:
        """`jkv.model.decoder.Attend`."""
        windows, num_kv_heads, size = cache.windows, key.shape[2], cache.windows.size
        if is_stored:  # the ring holds the chunk by now, over tokens that its first queries read
            assert cache.chunk is not None
            key, value, begin, end = cache.chunk
            return kernels.replay_attention(query, key, value, self.position, begin, end, sink=sink), cache
        page = self.tables[layer, self.row[0]]  # [K, MP]
        old_KP2SH = windows.kv[page]
        old_SK2H = jnp.transpose(old_KP2SH, (1, 3, 0, 2, 4)).reshape(-1, num_kv_heads, 2, key.shape[-1])
        new_TK2H = jnp.stack([key[0], value[0]], axis=2).astype(windows.kv.dtype)
        offset = jnp.arange(len(new_TK2H), dtype=jnp.int32)
        is_new = offset < self.num_new
        new = jnp.where(is_new, self.position[0], EMPTY)
        begin = jnp.concatenate([old_positions(windows, self.position[0, 0]), new])
        end = jnp.where(begin == EMPTY, EMPTY, begin + size)
        begin, end = (jnp.broadcast_to(x, (1, num_kv_heads, *x.shape)) for x in (begin, end))
        kv_SK2H = jnp.concatenate([old_SK2H, new_TK2H])
        key, value = kv_SK2H[None, :, :, 0], kv_SK2H[None, :, :, 1]
        out = kernels.replay_attention(query, key, value, self.position, begin, end, sink=sink)
        # The ring is written as a whole: what is written then depends on what was read, so XLA need not copy the rings.
        is_last = is_new & (offset >= self.num_new - windows.num_slots)  # others would be overwritten by later ones
        slot = jnp.where(is_last, self.position[0] % windows.num_slots, len(old_SK2H))
        ring_SK2H = old_SK2H.at[slot].set(new_TK2H, mode="drop", unique_indices=True)
        ring = ring_SK2H.reshape(windows.max_pages, windows.page_size, num_kv_heads, 2, -1)
        kv = put(windows.kv, (page,), jnp.transpose(ring, (2, 0, 3, 1, 4)))
        return out, cache._replace(windows=windows.replace(kv=kv), chunk=WindowChunk(key, value, begin, end))


def old_positions(windows: Windows, num_seen: Int[Array, ""]) -> Int[Array, " S"]:
    """The position of the token in each slot of a ring after `num_seen` tokens, EMPTY in empty slots.

    In: a window of 4 tokens, 6 seen -> Out: 4, 5, 2, 3.
    """
    slot = jnp.arange(windows.max_pages * windows.page_size, dtype=jnp.int32)
    position = num_seen - 1 - (num_seen - 1 - slot) % windows.num_slots
    return jnp.where((slot < windows.num_slots) & (position >= 0), position, EMPTY)
