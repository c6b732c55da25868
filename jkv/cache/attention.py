"""Attention over the pool: one `Attend` for decode steps, one for chunks of a prompt.

Both append the new keys and values and then read the pool. Both store the last queries if a policy scores by them.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

import pallas_kernels as kernels
from jkv.cache import pool as pages
from jkv.cache.in_step_eviction import StepRules, add_mass, choose_victim
from jkv.cache.moved_sinks import MOST_SINKS, SinkRules, merge
from jkv.cache.page_selection import Choice, ReadRules, choose_in
from jkv.cache.pool import EMPTY, Pool
from jkv.cache.sink_logit import add_sink, sink_of_rows
from jkv.cache.states import States
from jkv.cache.windows import WindowChunk, Windows
from jkv.model import decoder
from jkv.model.params import MeshAxis
from jkv.model.rotary import turn_in
from jkv.model.sharding import HEADS, sum_over_copies
from pallas_kernels.dispatch import possible_platforms, runs_native

PLACES = 16  # queries of a prompt that read a page at once, where pages are read in place
OPEN_END = jnp.iinfo(jnp.int32).max  # the end of a column that is never evicted


class Cache(NamedTuple):
    """The state that attention carries through the layers."""

    pool: Pool
    query_ring: Float[Array, "L B W N H"] | None  # the query of position p is at p % W; None if no policy needs it
    victim: Int[Array, "L B K"] | None = None  # slots that the current step evicts; None if it evicts none
    is_read: Bool[Array, "L B K MP"] | None = None  # pages that the current step reads; None if it reads all
    windows: Windows | None = None  # None if no layer has a sliding window
    states: States | None = None  # None if no layer has a recurrent state
    states_after: States = ()  # after each of several places of a step, [T, B, ...], within a pass
    tail: Windows | None = None  # each row's pages that are not sealed; None unless the pool holds records
    chunk: WindowChunk | None = None  # what a window of a prompt's chunk read, within a pass, for layers that share it
    choice: Choice | None = None  # the pages that a step's last layer chose, within a pass, likewise
    experts: UInt[Array, "B T L A"] | None = None  # chosen in the current pass, by layer with experts; None unless asked for

    @property
    def rings(self) -> Int[Array, "L B K MP"]:
        """The pages of the windows of all rows."""
        assert self.windows is not None
        return self.windows.tables(self.pool.page_table.shape[1])

    @property
    def tails(self) -> Int[Array, "L B K MP"]:
        """The pages of the tails of all rows."""
        assert self.tail is not None
        return self.tail.tables(self.pool.page_table.shape[1])

    def after_pass(self, pool: Pool) -> "Cache":
        """The cache with this pool, and without what belongs to a pass alone."""
        return Cache(pool, self.query_ring, windows=self.windows, states=self.states, tail=self.tail)

    @property
    def beside(self) -> tuple[Any, ...]:
        """What rows have outside of the pool."""
        return self.windows, self.states, self.tail


class DecodeAttention(NamedTuple):
    """Attention of each row's next tokens to the row's pages: one, or one at each of T places, of which some may be void.

    A row that evicts in its steps, chooses pages or moves its sinks does so for the first place, and has no token at others.
    """

    address: Int[Array, "L B K T"]
    length: Int[Array, "L B K"] | Int[Array, "L B K T"]  # filled slots, the new ones included; of several places, up to each
    position: Int[Array, " B"]  # of the first place
    cos: Float[Array, "BT half"]  # of the new tokens' rotations, place after place of each row
    sin: Float[Array, "BT half"]
    rules: StepRules | None  # None if no policy needs the accumulated mass or evicts inside steps
    reads: ReadRules | None  # None if every policy reads all pages
    sinks: SinkRules | None  # None if no policy moves its sinks
    goes_on: Bool[Array, " B"]  # whether a row has a next step
    unrotated: tuple[int, ...] = ()  # layers without RoPE
    axis: MeshAxis = None  # of the mesh that splits the weights; None on one device

    def __call__(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Cache,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "B T N H"], Cache]:
        """`jkv.model.decoder.Attend`, which rotates queries and keys."""
        batch, places, num_heads, head_size = query.shape
        pool, ring = cache.pool, cache.query_ring
        if is_stored:
            query = decoder.rotate(query, *(x.reshape(batch, places, -1) for x in self.turn(layer)))
        else:
            pool, query, ring = self.append(layer, query, key, value, cache)
        num_layers, num_kv_heads = len(self.length), key.shape[2]
        rows = batch * num_kv_heads
        first_RGH = query[:, 0].reshape(rows, -1, head_size)
        query = first_RGH if places == 1 else query
        page_table = pool.page_table.reshape(num_layers, rows, -1)
        length = self.length.reshape(num_layers, rows, *self.length.shape[3:])
        log_weight = pool.slot_data.get(pages.LOG_WEIGHT)
        log_weight = None if log_weight is None else log_weight.reshape(num_layers, rows, -1)
        of_layer: int | None = layer  # the kernel reads the tables of all layers in place
        if self.reads is not None or self.sinks is not None:
            page_table, length, of_layer = page_table[layer], length[layer], None
            log_weight = None if log_weight is None else log_weight[layer]
        is_read, choice = cache.is_read, cache.choice
        if self.reads is not None:
            assert is_read is not None
            of_row = length if places == 1 else length[:, -1]
            choice = choice if is_stored else self.choose(layer, first_RGH, pool, page_table, of_row)
            assert choice is not None
            page_table = choice.page_table
            length = choice.length if places == 1 else length - (of_row - choice.length)[:, None]
            is_read = is_read.at[layer].set(choice.is_read.reshape(is_read.shape[1:]))
            if log_weight is not None:
                by_page = log_weight.reshape(rows, -1, pool.page_size)
                log_weight = jnp.take_along_axis(by_page, choice.entry[..., None], axis=1).reshape(rows, -1)
        if self.sinks is not None:
            is_sink = jnp.arange(pool.max_slots, dtype=jnp.int32) < jnp.repeat(self.sinks.num_sinks, key.shape[2])[:, None]
            log_weight = jnp.where(is_sink, -jnp.inf, 0.0 if log_weight is None else log_weight)
        out, log_total, logits = kernels.paged_attention(
            query, pool.kv, page_table, length, log_weight, of_layer, with_logits=self.rules is not None and not is_stored
        )

        log_total = log_total_by_place(log_total, batch, places)
        if self.sinks is not None:
            turned = query
            if layer not in self.unrotated:
                by_place = query.reshape(batch, places, num_heads, head_size)
                turned = decoder.rotate(by_place, self.sinks.cos, self.sinks.sin).reshape(query.shape)
            first_pages = page_table[:, : pages.num_pages_of(MOST_SINKS, pool.page_size)]
            num_sinks = jnp.repeat(self.sinks.num_sinks, key.shape[2])
            num_sinks = jnp.minimum(length, num_sinks if places == 1 else num_sinks[:, None])
            sinks_out, sinks_total, _ = kernels.paged_attention(turned, pool.kv, first_pages, num_sinks)
            sinks_total = log_total_by_place(sinks_total, batch, places)
            out = merge((out, sinks_out), (log_total, sinks_total))
            log_total = log_total if sink is None else jnp.logaddexp(log_total, sinks_total)
        if sink is not None:  # from here on the probabilities are those with the sink, the accumulated mass of H2O and TOVA too
            of_rows = sink_of_rows(sink, batch, num_kv_heads)
            of_rows = of_rows if places == 1 else jnp.broadcast_to(sink.astype(jnp.float32), log_total.shape)
            out, log_total = add_sink(out, log_total, of_rows)
        victim = cache.victim
        if self.rules is not None and not is_stored:  # the slots are of the layer that stored them, and so is their mass
            assert logits is not None
            assert victim is not None
            shape = pool.page_table.shape[1:3]
            of_first = log_total if places == 1 else log_total[:, 0]
            mass = add_mass(
                pool.slot_data["mass"][layer],
                self.address[layer, ..., 0] != pages.NULL_PAGE,  # rows that are finished draw nothing
                logits[:, : num_heads // num_kv_heads].reshape(*shape, -1, logits.shape[2]),
                of_first.reshape(*shape, -1),
                self.rules.last_only,
            )
            filled = self.length if places == 1 else self.length[..., 0]
            position = pages.positions(pool.replace(length=filled), layer, jnp.arange(batch, dtype=jnp.int32))
            axis = None if self.axis is None else HEADS
            slot = choose_victim(self.rules, layer, mass, position, self.position, self.goes_on, axis)
            pool = pool.replace(slot_data=pool.slot_data | {"mass": pool.slot_data["mass"].at[layer].set(mass)})
            victim = victim.at[layer].set(slot)
        cache = cache._replace(pool=pool, query_ring=ring, victim=victim, is_read=is_read, choice=choice)
        return out.reshape(batch, places, num_heads, head_size), cache

    def turn(self, layer: int) -> tuple[Float[Array, "BT half"], Float[Array, "BT half"]]:
        """The rotation of new queries and keys in a layer."""
        return turn_in(layer, self.cos, self.sin, self.unrotated)

    def append(
        self,
        layer: int,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        cache: Cache,
    ) -> tuple[Pool, Float[Array, "B T N H"], Float[Array, "L B W N H"] | None]:
        """The pool with each row's new tokens, the rotated queries, and the ring with them."""
        pool, ring, (batch, places, num_heads, head_size) = cache.pool, cache.query_ring, query.shape
        ring_at = flat_ring = None
        if ring is not None:
            num_rows, window = ring.shape[1:3]
            position = self.position[:, None] + jnp.arange(places, dtype=jnp.int32)
            first = (layer * num_rows + jnp.arange(num_rows, dtype=jnp.int32)) * window
            ring_at = (first[:, None] + position % window).reshape(-1)
            flat_ring = ring.reshape(-1, *ring.shape[3:])
        # XLA computes the three in one product; concatenated without their heads, they are its result, which is not copied.
        flat = jnp.concatenate([x.reshape(batch * places, -1) for x in (query, key, value)], axis=1)
        projected, turn = flat.reshape(batch * places, -1, head_size), self.turn(layer)
        address = jnp.swapaxes(self.address, 2, 3).reshape(len(self.address), batch * places, -1)
        kv, rotated, flat_ring = kernels.rotate_append(
            pool.kv, projected, *turn, address, flat_ring, ring_at, layer, places=places
        )
        pool = pool.replace(kv=kv)
        if pool.bounds is not None:
            pool = pages.widen_bounds(pool, address[layer], decoder.rotate(key.reshape(-1, *key.shape[2:]), *turn))
        ring = None if ring is None or flat_ring is None else flat_ring.reshape(ring.shape)
        return pool, rotated.reshape(batch, places, num_heads, head_size), ring

    def choose(
        self, layer: int, query: Float[Array, "R G H"], pool: Pool, page_table: Int[Array, "R MP"], length: Int[Array, " R"]
    ) -> Choice:
        """The pages that each row and KV head reads in this layer."""
        assert self.reads is not None
        return choose_in(layer, self.reads, query, pool, page_table, length)


def log_total_by_place(
    log_total: Float[Array, "R _G"], batch: int, places: int
) -> Float[Array, "R _G"] | Float[Array, "B T N"]:
    """A kernel's log-totals in the order of its outputs: by row, or of several places by place."""
    if places == 1:
        return log_total
    return jnp.swapaxes(log_total.reshape(batch, len(log_total) // batch, places, -1), 1, 2).reshape(batch, places, -1)


def reads_in_place(pool: Pool, query: Any) -> bool:
    """Whether chunks of prompts, with queries of this shape, read pages where they are; else their pages are gathered first.

    C++ for a CPU reads nothing but the slots before each query. What else the pool keeps of its slots is of gathered ones.
    """
    if possible_platforms() != ("cpu",) or pool.vacant_slot is not None or pool.slot_data.keys() & {"mass", pages.LOG_WEIGHT}:
        return False
    _, num_queries, num_heads, head_size = query.shape
    places, num_kv_heads = math.gcd(num_queries, PLACES), pool.page_table.shape[2]
    rows = num_queries // places * num_kv_heads
    of_rows = jax.ShapeDtypeStruct((rows, places * num_heads // num_kv_heads, head_size), query.dtype)
    table, length = (jax.ShapeDtypeStruct((rows, size), jnp.int32) for size in (pool.page_table.shape[3], places))
    return runs_native("paged_attention", kernels.KERNELS["paged_attention"].implementations, of_rows, pool.kv, table, length)


class PrefillAttention(NamedTuple):
    """Causal attention of a chunk of one row's prompt to the row's slots and to itself."""

    address: Int[Array, "L 1 K T"]
    row: Int[Array, " 1"]
    position: Int[Array, "1 T"]
    num_new: Int[Array, " 1"]
    num_pages: int | None = None  # of the row that are gathered, the new ones included; None are all that it can have

    def __call__(
        self,
        layer: int,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 T K H"],
        value: Float[Array, "1 T K H"],
        cache: Cache,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "1 T N H"], Cache]:
        """`jkv.model.decoder.Attend`."""
        pool = cache.pool if is_stored else pages.append(cache.pool, self.address[layer], key, value)
        if reads_in_place(pool, query):
            out = self.read_in_place(layer, query, pool, sink)
        else:
            out, pool = self.read_gathered(layer, query, pool, sink, adds_mass=not is_stored)
        ring = cache.query_ring
        if ring is not None and not is_stored:
            window = ring.shape[2]
            offset = jnp.arange(query.shape[1], dtype=jnp.int32)
            is_last = (offset < self.num_new) & (offset >= self.num_new - window)
            where = jnp.where(is_last, self.position[0] % window, window)
            ring = ring.at[layer, self.row, where].set(query[0], mode="drop", unique_indices=True)
        return out, cache._replace(pool=pool, query_ring=ring)

    def read_in_place(
        self, layer: int, query: Float[Array, "1 T N H"], pool: Pool, sink: Float[Array, " N"] | None
    ) -> Float[Array, "1 T N H"]:
        """The attention of the chunk's tokens, as of rows with some places each, which read the pages of the one row."""
        (_, num_queries, num_heads, head_size), row = query.shape, self.row[0]
        places = math.gcd(num_queries, PLACES)
        table, filled = pool.page_table[layer, row], pool.length[layer, row]
        until = jnp.minimum(jnp.arange(1, num_queries + 1, dtype=jnp.int32), self.num_new[0]).reshape(-1, 1, places)
        length = filled[:, None] + until  # [T / places, K, places]
        by_place = query.reshape(len(length), places, num_heads, head_size)
        args = by_place, pool.kv, jnp.tile(table, (len(length), 1)), length.reshape(-1, places)
        out, log_total, _ = kernels.paged_attention(*args)
        if sink is not None:
            of_places = log_total_by_place(log_total, len(length), places)
            out, _ = add_sink(out, of_places, jnp.broadcast_to(sink.astype(jnp.float32), of_places.shape))
        return out.reshape(query.shape)

    def read_gathered(
        self, layer: int, query: Float[Array, "1 T N H"], pool: Pool, sink: Float[Array, " N"] | None, adds_mass: bool
    ) -> tuple[Float[Array, "1 T N H"], Pool]:
        """The attention of the chunk's tokens to the row's slots, gathered; and the pool, with their mass if it keeps that."""
        length = pool.length.at[layer, self.row].add(self.num_new[:, None])
        key_1KSH, value_1KSH, begin_1KS = pages.gather(pool.replace(length=length), layer, self.row, self.num_pages)
        out = kernels.replay_attention(
            query,
            jnp.moveaxis(key_1KSH, 1, 2),
            jnp.moveaxis(value_1KSH, 1, 2),
            self.position,
            begin_1KS,
            jnp.where(begin_1KS == EMPTY, EMPTY, OPEN_END),
            sink=sink,
        )
        if "mass" in pool.slot_data and adds_mass:
            added, mass = self.mass(query, key_1KSH, begin_1KS, sink), pool.slot_data["mass"]
            mass = mass.at[layer, self.row, :, : added.shape[-1]].add(added)
            pool = pool.replace(slot_data=pool.slot_data | {"mass": mass})
        return out, pool

    def mass(
        self,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 K S H"],
        position: Int[Array, "1 K S"],
        sink: Float[Array, " N"] | None,
    ) -> Float[Array, "1 K S"]:
        """The attention mass of each slot, summed over the chunk's queries and over the query heads of each KV head.

        The layer's sink, if it has one, is in the denominator.
        """
        num_heads, head_size = key.shape[1], key.shape[3]
        num_queries = query.shape[1]
        last = jnp.arange(num_queries, dtype=jnp.int32) >= num_queries - self.num_new  # the real queries, rolled to the end
        query_KGTH = jnp.moveaxis(jnp.roll(query[0], num_queries - self.num_new[0], axis=0), 0, 1)
        mean = kernels.attention_mass(
            query_KGTH.reshape(num_heads, -1, num_queries, head_size),
            key[0],
            position[0] != EMPTY,
            jnp.broadcast_to(last, (num_heads, num_queries)),
            self.position[0, 0] + self.num_new - 1 - position[0],
            sink=None if sink is None else sink_of_rows(sink, 1, num_heads),
            over_group="mean",
        )
        return sum_over_copies(mean[None] * self.num_new.astype(jnp.float32) * (query.shape[2] // num_heads))
