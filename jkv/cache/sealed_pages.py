"""Pages that are sealed when they are full (`pallas_kernels.sealed`), and the floats of each row beside them.

The pool holds records. The first page of a text and its last ones are floats, in three pages of each layer, row and KV head
that are not in the pool: one for the first page, and a ring of two, in which page b of the text has place `1 + (b - 1) % 2`.
If steps append several tokens, the ring has three pages: a guess may be the first token of a page while the step's first query
still reads floats of the page before the last. Only accepted tokens are sealed, as a page is sealed at the end of a chunk.

What a query reads depends on its position alone, not on how prompts were cut or steps fell into chunks: a token of the first
page as floats, and one of page b as a record from position `(b + 2) * page - 1` on, when the page after it is full. A page is
sealed at the end of the chunk of steps that fills it, or in the piece of the prompt that does, so its record is there in time:
a chunk has fewer steps than a page has slots. Its floats are there until the ring needs their place, which is later.

Policies may drop whole pages of the text, but neither the first one nor any that a row still has as floats.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels as kernels
from jkv.cache import pool as pages
from jkv.cache.moved_sinks import merge
from jkv.cache.page_selection import ReadRules, choose_in
from jkv.cache.pool import EMPTY, NULL_PAGE, Pool
from jkv.cache.sink_logit import add_sink, sink_of_rows
from jkv.model import decoder
from jkv.model.rotary import turn_in
from pallas_kernels import sealed
from pallas_kernels.quantised import put

OPEN_END = np.iinfo(np.int32).max  # the end of a column that is never evicted


def is_record_from(position: Int[Array, "*A"], page_size: int) -> Int[Array, "*A"]:
    """The first query that reads a token from its record; `OPEN_END` for tokens of the first page, which have none."""
    page = position // page_size
    return jnp.where(page == 0, OPEN_END, (page + 2) * page_size - 1)


def num_float_pages(places: int) -> int:
    """Pages of floats of each row, in an engine whose steps append up to so many tokens."""
    return 3 if places == 1 else 4


def place_of(page: Int[Array, "*A"], num_pages: int) -> Int[Array, "*A"]:
    """The place of a page of the text among a row's `num_pages` pages of floats."""
    return jnp.where(page == 0, 0, 1 + (page - 1) % (num_pages - 1))


def num_records(num_slots: Int[Array, "*A"], page_size: int) -> Int[Array, "*A"]:
    """How many pages a query reads as records, of so many slots with its own; they follow the first page."""
    return jnp.maximum(num_slots // page_size - 1, 1) - 1


def seal_filled(cache: Any, num_before: Int[Array, " B"]) -> Pool:
    """The pool with records of the pages that rows have filled since they had `num_before` tokens, at most one each.

    One row at a time, so that a record's bits do not depend on how many there are, and rows that filled none cost nothing.
    """
    pool, tail = cache.pool, cache.tail.kv
    num_full = pool.logical_length // pool.page_size
    is_filled = (num_before // pool.page_size < num_full) & (num_full > 1)
    rows = jnp.argsort(~is_filled, stable=True)

    def write(i: Int[Array, ""], kv: Any) -> Any:
        row = rows[i]
        numbers = tail[cache.tails[:, row, :, 0] + place_of(num_full[row] - 1, cache.tail.max_pages)]
        entry = pool.length[:, row, :, None] // pool.page_size - 1
        page = jnp.take_along_axis(pool.page_table[:, row], entry, axis=-1)[..., 0]
        return put(kv, (page,), sealed.seal(numbers, kv.format, kv.dtype))

    return pool.replace(kv=jax.lax.fori_loop(0, is_filled.sum(dtype=jnp.int32), write, pool.kv))


class SealedDecode(NamedTuple):
    """Attention of each row's next tokens to its floats and to its records: one, or one at each of T places, some of them void.

    The places of a row read its pages one by one, as rows of their own: each has another number of records.
    """

    address: Int[Array, "L B K T"]  # in the pool, of whose pages the new tokens count
    length: Int[Array, "L B K T"]  # filled slots, the new ones up to each place included
    position: Int[Array, "B T"]
    is_new: Bool[Array, "B T"]
    cos: Float[Array, "BT half"]  # of the new tokens' rotations, place after place of each row
    sin: Float[Array, "BT half"]
    reads: ReadRules | None = None  # None if every policy reads all pages
    unrotated: tuple[int, ...] = ()  # layers without RoPE

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """`jkv.model.decoder.Attend`, which rotates queries and keys."""
        pool, (batch, places, _, head_size), num_heads = cache.pool, query.shape, key.shape[2]
        page_size, tokens, rows, is_read = pool.page_size, batch * places, batch * places * num_heads, cache.is_read
        turn, num_floats = turn_in(layer, self.cos, self.sin, self.unrotated), cache.tail.max_pages
        first = cache.tails[layer, :, None, :, 0]
        page = first + place_of(self.position // page_size, num_floats)[..., None]
        address = jnp.where(self.is_new[..., None], page * page_size + (self.position % page_size)[..., None], NULL_PAGE)
        flat = jnp.concatenate([x.reshape(tokens, -1) for x in (query, key, value)], axis=1)
        given = flat.reshape(tokens, -1, head_size), *turn, address.reshape(tokens, -1)
        tail, query_BNH, _ = kernels.rotate_append(cache.tail.kv, *given, places=places)
        query_RGH = query_BNH.reshape(rows, -1, head_size)
        if pool.bounds is not None:
            rotated = decoder.rotate(key, *(x.reshape(batch, places, -1) for x in turn))
            pool = pages.widen_bounds(pool, self.address[layer], jnp.moveaxis(rotated, 1, 2))

        whole = jnp.repeat(pool.page_table[layer], places, axis=0).reshape(rows, -1)
        length = jnp.moveaxis(self.length[layer], 2, 1).reshape(rows)
        num_seen = self.position[:, :1] + jnp.cumsum(self.is_new, axis=1, dtype=jnp.int32)
        newest = jnp.repeat(num_seen.reshape(-1), num_heads) // page_size
        newest = jnp.maximum(newest - 1, 1)  # the first page of the text that is not a record, but for the first of all
        entries = [jnp.zeros_like(newest), place_of(newest, num_floats), place_of(newest + 1, num_floats)]
        of_rows = jnp.broadcast_to(first, (batch, places, num_heads)).reshape(rows, 1)
        float_table, count, table = of_rows + jnp.stack(entries, axis=-1), num_records(length, page_size), whole[:, 1:]
        float_length = length - count * page_size
        if self.reads is not None:
            assert is_read is not None
            reads = ReadRules(*(jnp.repeat(x, places) for x in self.reads))
            chosen = choose_in(layer, reads, query_RGH, pool, whole, length).is_read
            is_read = is_read.at[layer].set(chosen.reshape(batch, places, *is_read.shape[2:])[:, 0])
            table, count, float_table, float_length = chosen_tables(chosen, table, count, float_table, length, page_size)
        out, log_total, _ = kernels.paged_attention(query_RGH, tail, float_table, float_length)
        records_out, records_total = kernels.sealed_attention(query_RGH, pool.kv, table, count)
        out = merge((out, records_out), (log_total, records_total))
        if sink is not None:
            out, _ = add_sink(out, jnp.logaddexp(log_total, records_total), sink_of_rows(sink, tokens, num_heads))
        return out.reshape(query.shape), cache._replace(pool=pool, tail=cache.tail.replace(kv=tail), is_read=is_read)


def chosen_tables(
    is_read: Bool[Array, "R MP"],
    table: Int[Array, "R I"],
    count: Int[Array, " R"],
    float_table: Int[Array, "R 3"],
    length: Int[Array, " R"],
    page_size: int,
) -> tuple[Int[Array, "R I"], Int[Array, " R"], Int[Array, "R 3"], Int[Array, " R"]]:
    """The tables of records (without the first entry) and of floats, and how far they are read, where only some pages are.

    The newest page is read always, and stays the last of the floats.
    """
    is_record = is_read[:, 1:] & (jnp.arange(table.shape[1], dtype=jnp.int32) < count[:, None])
    entry = jnp.stack([jnp.zeros_like(count), count + 1, count + 2], axis=-1)
    is_float = jnp.take_along_axis(is_read, entry, axis=1, mode="fill", fill_value=False)
    (table, count), (float_table, num_floats) = (
        (jnp.take_along_axis(x, jnp.argsort(~chosen, axis=1, stable=True), axis=1), chosen.sum(axis=1, dtype=jnp.int32))
        for x, chosen in ((table, is_record), (float_table, is_float))
    )
    return table, count, float_table, num_floats * page_size - jnp.where(num_floats > 0, -length % page_size, 0)


class SealedPrefill(NamedTuple):
    """Causal attention of a chunk of one row's prompt to the row's records and floats, and to itself; seals what it fills."""

    address: Int[Array, "L 1 K T"]
    row: Int[Array, " 1"]
    position: Int[Array, "1 T"]
    num_new: Int[Array, " 1"]
    num_pages: int | None = None  # of the row, the new ones included; None are all that it can have

    def __call__(
        self,
        layer: int,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 T K H"],
        value: Float[Array, "1 T K H"],
        cache: Any,
        sink: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "1 T N H"], Any]:
        """`jkv.model.decoder.Attend`."""
        pool, row, start = cache.pool, self.row[0], self.position[0, 0]
        if pool.bounds is not None:
            pool = pages.widen_bounds(pool, self.address[layer], jnp.moveaxis(key, 1, 2))
        page = cache.tails[layer, row]
        old_K3 = jax.lax.optimization_barrier(cache.tail.kv[page])  # read once, before it is written
        new_K2TH = jnp.moveaxis(jnp.stack([key[0], value[0]]), 2, 0).astype(old_K3.dtype)
        text = self.text(old_K3, new_K2TH)
        pool = pool.replace(kv=self.sealed(layer, pool, text))
        # The floats of a row are written as a whole: what is written then depends on what was read, so XLA need not copy them.
        tail = cache.tail.replace(kv=put(cache.tail.kv, (page,), self.floats(old_K3, text)))

        length = pool.length.at[layer, self.row].add(self.num_new[:, None])
        old_key, old_value, position = pages.gather(pool.replace(length=length), layer, self.row, self.num_pages)
        slot, num_slots = jnp.arange(position.shape[-1], dtype=jnp.int32), length[layer, self.row][..., None]
        is_record = (slot >= pool.page_size) & (slot < num_slots // pool.page_size * pool.page_size)
        begin = jnp.where(is_record, is_record_from(position, pool.page_size), OPEN_END)
        new = jnp.where(jnp.arange(query.shape[1], dtype=jnp.int32) < self.num_new, self.position[0], EMPTY)
        seen = jnp.concatenate([old_positions(start, pool.page_size, cache.tail.max_pages), new])
        until = jnp.where(seen == EMPTY, EMPTY, is_record_from(seen, pool.page_size))
        seen, until = (jnp.broadcast_to(x, (*position.shape[:2], len(x))) for x in (seen, until))
        old_K2SH = jnp.moveaxis(old_K3, 2, 1).reshape(*new_K2TH.shape[:2], -1, key.shape[-1])
        floats_1K2SH = jnp.concatenate([old_K2SH, new_K2TH], axis=2)[None]
        key, value = (
            jnp.moveaxis(jnp.concatenate([floats_1K2SH[:, :, half], records], axis=2), 1, 2)
            for half, records in ((0, old_key), (1, old_value))
        )
        begin, end = jnp.concatenate([seen, begin], axis=-1), jnp.concatenate([until, jnp.full_like(begin, OPEN_END)], axis=-1)
        out = kernels.replay_attention(query, key, value, self.position, begin, end, sink=sink)
        return out, cache._replace(pool=pool, tail=tail)

    def text(self, old: Float[Array, "K floats 2 page H"], new: Float[Array, "K 2 T H"]) -> Float[Array, "K I 2 page H"]:
        """The pages of the text that the new tokens are in: the floats of the first, and then the new ones, in their slots."""
        num_heads, _, num_new, size = new.shape
        page_size, start = old.shape[3], self.position[0, 0]
        num_pages = pages.num_pages_of(num_new, page_size) + 1
        first = old[:, place_of(start // page_size, old.shape[1])]
        slots = jnp.pad(first, [(0, 0), (0, 0), (0, (num_pages - 1) * page_size), (0, 0)])
        slots = jax.lax.dynamic_update_slice_in_dim(slots, new, start % page_size, axis=2)
        return jnp.moveaxis(slots.reshape(num_heads, 2, num_pages, page_size, size), 2, 1)

    def sealed(self, layer: int, pool: Pool, text: Float[Array, "K I 2 page H"]) -> Any:
        """The pool's records, with new ones for the pages that the new tokens fill."""
        page_size, start = pool.page_size, self.position[0, 0]
        index = jnp.arange(text.shape[1], dtype=jnp.int32)
        number = start // page_size + index
        is_full = ((number + 1) * page_size <= start + self.num_new[0]) & (number > 0)
        table = pool.page_table[layer, self.row[0]]
        entry = jnp.minimum(pool.length[layer, self.row[0], :, None] // page_size + index, table.shape[-1] - 1)
        page = jnp.where(is_full, jnp.take_along_axis(table, entry, axis=-1), NULL_PAGE)
        return put(pool.kv, (page,), sealed.seal(text, pool.kv.format, pool.kv.dtype))

    def floats(
        self, old: Float[Array, "K floats 2 page H"], text: Float[Array, "K I 2 page H"]
    ) -> Float[Array, "K floats 2 page H"]:
        """The pages of floats of the row with the new tokens."""
        page_size, start = old.shape[3], self.position[0, 0]
        number = pages_at_places(start + self.num_new[0], page_size, old.shape[1])
        index = number - start // page_size
        is_new = (index >= 0) & (number != EMPTY)
        taken = text[:, jnp.clip(index, 0, text.shape[1] - 1)]
        return jnp.where(is_new[:, None, None, None], taken, old)


def pages_at_places(num_seen: Int[Array, ""], page_size: int, num_pages: int) -> Int[Array, " floats"]:
    """The page of the text at each of a row's `num_pages` places after `num_seen` tokens, EMPTY for none.

    In: pages of 16 slots, three places, 50 seen -> Out: 0, 3, 2.
    """
    newest, place = (num_seen - 1) // page_size, jnp.arange(num_pages, dtype=jnp.int32)
    number = jnp.where(place == 0, 0, newest - (newest - place) % (num_pages - 1))
    return jnp.where((number <= newest) & ((number > 0) | (place == 0)), number, EMPTY)


def old_positions(num_seen: Int[Array, ""], page_size: int, num_pages: int) -> Int[Array, " S"]:
    """The position of the token in each slot of a row's floats after `num_seen` tokens, EMPTY in empty slots."""
    number = pages_at_places(num_seen, page_size, num_pages)[:, None]
    position = number * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return jnp.where((number != EMPTY) & (position < num_seen), position, EMPTY).reshape(-1)
