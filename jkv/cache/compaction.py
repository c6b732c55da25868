"""Compaction of rows of the pool: slots that stay are moved together, and the pages that this leaves are freed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

import pallas_kernels as kernels
from jkv.cache.pool import (
    EMPTY,
    LOG_WEIGHT,
    NULL_PAGE,
    Pool,
    allocate,
    drop_references,
    is_entry_used,
    num_pages_of,
)
from pallas_kernels.quantised import put
from pallas_kernels.sealed import poisoned


def take_slots(pool: Pool, row: Int[Array, " R"], slots: Int[Array, "L R K M"]) -> Pool:
    """Compaction: every `row` keeps `slots`, in that order, and frees the rest; EMPTY entries, all at the end, are ignored.

    Leading pages that are kept whole are not moved and stay shared. Other pages are rewritten: in place if the row is their
    only owner, else in new pages (copy on write). Each layer and KV head may keep a different number of slots. New pages are
    allocated before the old ones are freed.
    """
    page_size, max_pages = pool.page_size, pool.page_table.shape[3]
    slots = jnp.pad(slots, [(0, 0)] * 3 + [(0, pool.max_slots - slots.shape[-1])], constant_values=EMPTY)
    # What the row has is read once, before anything changes: read again later, XLA would copy the tables of all rows.
    table, length = jax.lax.optimization_barrier((pool.page_table[:, row], pool.length[:, row]))
    count = jnp.sum(slots != EMPTY, axis=-1, dtype=jnp.int32)
    index = jnp.arange(max_pages, dtype=jnp.int32)
    is_used = is_entry_used(pool, length)
    is_kept = index < num_pages_of(count, page_size)[..., None]

    # A page whose slots do not move is not rewritten. In: page_size 2, slots [0 1 3 4 6 -] -> Out: [same, rewritten, rewritten]
    slot = jnp.arange(pool.max_slots, dtype=jnp.int32)
    is_same = ((slots == slot) | (slots == EMPTY)).reshape(*table.shape, page_size).all(axis=-1)
    is_full = (index + 1) * page_size <= count[..., None]
    is_shared = pool.refcount[table] > 1
    is_written = is_kept & ~(is_same & (is_full | ~is_shared))
    is_copied = is_written & is_shared
    is_dropped = is_used & (is_copied | ~is_kept)
    is_freed = is_dropped & ~is_shared
    has_twins = len(row) > 1 or LOG_WEIGHT in pool.slot_data  # several entries may hold one page
    pool, fresh = allocate(pool, is_copied) if has_twins else exchange(pool, is_copied, table, is_dropped, is_freed)
    new_table = jnp.where(is_copied, fresh, jnp.where(is_kept, table, NULL_PAGE))

    def address(pages: Int[Array, "L R K MP"], at: Int[Array, "L R K S"]) -> Int[Array, "L R K S"]:
        return jnp.take_along_axis(pages, at // page_size, axis=-1) * page_size + at % page_size

    source = jnp.where(slots == EMPTY, NULL_PAGE, address(table, jnp.maximum(slots, 0)))
    is_moved = (slots != EMPTY) & jnp.repeat(is_written, page_size, axis=-1)
    target = jnp.where(is_moved, address(new_table, jnp.broadcast_to(slot, slots.shape)), NULL_PAGE)

    rows = (x.reshape(-1, x.shape[-1]) for x in (slots, table, jnp.where(is_written, new_table, NULL_PAGE)))
    kv = kernels.take_slots(pool.kv, *rows)  # all layers and KV heads at once, because no page belongs to two of them
    moved = pool.position[source // page_size, source % page_size]
    position = put(pool.position, (target // page_size, target % page_size), moved)

    def take(data: Float[Array, "L B K S"]) -> Float[Array, "L B K S"]:
        taken = jnp.take_along_axis(data[:, row], jnp.maximum(slots, 0), axis=-1)
        return put_rows(data, row, jnp.where(slots == EMPTY, 0.0, taken))

    pool = pool.replace(
        kv=kv,
        position=position,
        page_table=put_rows(pool.page_table, row, new_table),
        length=put_rows(pool.length, row, count),
        vacant_slot=None if pool.vacant_slot is None else put_rows(pool.vacant_slot, row, jnp.full_like(count, EMPTY)),
        slot_data={name: take(data) for name, data in pool.slot_data.items()},
    )
    if has_twins:
        return drop_references(pool, table, is_dropped)
    return pool.replace(kv=poisoned(pool.kv, jnp.where(is_freed, table, pool.refcount.shape[0]))) if pool.poison else pool


def take_whole_pages(pool: Pool, row: Int[Array, " R"], slots: Int[Array, "L R K M"]) -> Pool:
    """`take_slots` of `slots` that fill whole pages, but for the last: tables change, and nothing is moved.

    Rows have no slot data.
    """
    table, length = jax.lax.optimization_barrier((pool.page_table[:, row], pool.length[:, row]))
    slots = jnp.pad(slots, [(0, 0)] * 3 + [(0, pool.max_slots - slots.shape[-1])], constant_values=EMPTY)
    first = slots[..., :: pool.page_size]
    is_kept, entry = first != EMPTY, jnp.maximum(first, 0) // pool.page_size
    layer, at, head, _ = jnp.indices(table.shape, dtype=jnp.int32, sparse=True)
    where = jnp.where(is_kept, entry, table.shape[-1])
    is_left = jnp.zeros(table.shape, bool).at[layer, at, head, where].set(True, mode="drop")
    new_table = jnp.where(is_kept, jnp.take_along_axis(table, entry, axis=-1), NULL_PAGE)
    pool = pool.replace(
        page_table=put_rows(pool.page_table, row, new_table),
        length=put_rows(pool.length, row, jnp.sum(slots != EMPTY, axis=-1, dtype=jnp.int32)),
    )
    return drop_references(pool, table, is_entry_used(pool, length) & ~is_left)


def exchange(
    pool: Pool,
    is_needed: Bool[Array, "..."],
    page: Int[Array, "..."],
    is_dropped: Bool[Array, "..."],
    is_freed: Bool[Array, "..."],
) -> tuple[Pool, Int[Array, "..."]]:
    """`allocate`, then `drop_references`, in fewer passes: no page is in two entries, and `is_freed` marks the last references.

    The caller poisons freed pages, after it has read them.
    """
    total = pool.refcount.shape[0]
    needed, freed = (jnp.cumsum(x.reshape(-1), dtype=jnp.int32).reshape(x.shape) for x in (is_needed, is_freed))  # 1: the first
    is_given = is_needed & (needed <= pool.free_top)
    fresh = jnp.where(is_given, pool.free_stack[jnp.maximum(pool.free_top - needed, 0)], NULL_PAGE)
    left = pool.free_top - needed.reshape(-1)[-1]
    where = jnp.where(is_freed, left + freed - 1, total)
    free_top = left + freed.reshape(-1)[-1]
    # All is read before anything changes: read again later, XLA would copy the whole stack.
    fresh, where, free_stack, free_top = jax.lax.optimization_barrier((fresh, where, pool.free_stack, free_top))
    changed = jnp.stack([jnp.where(fresh == NULL_PAGE, total, fresh), jnp.where(is_dropped, page, total)])
    by = jnp.asarray([1, -1], jnp.int32).reshape(2, *[1] * page.ndim)
    return pool.replace(
        refcount=pool.refcount.at[changed].add(jnp.broadcast_to(by, changed.shape), mode="drop"),
        free_stack=free_stack.at[where].set(page, mode="drop"),
        free_top=free_top,
    ), fresh


def put_rows(data: Shaped[Array, "L B *N"], row: Int[Array, " R"], value: Shaped[Array, "L R *N"]) -> Shaped[Array, "L B *N"]:
    """Rows replaced one by one: XLA scatters into rows that may not exist, for which it keeps what was there."""
    for index in range(len(row)):
        data = jax.lax.dynamic_update_slice_in_dim(data, value[:, index : index + 1], row[index], axis=1)
    return data


def positions_left(position: Int[Array, "L R K S"], slots: Int[Array, "L R K S"], num_positions: int) -> Bool[Array, "R T"]:
    """Which positions `slots` holds in any layer and head."""
    row = jnp.arange(position.shape[1], dtype=jnp.int32)[:, None, None]
    held = jnp.where(slots == EMPTY, num_positions, jnp.take_along_axis(position, jnp.maximum(slots, 0), axis=-1))
    return jnp.zeros((position.shape[1], num_positions), bool).at[row, held].set(True, mode="drop")


def dropped_positions(position: Int[Array, "L R K S"], slots: Int[Array, "L R K S"]) -> Int[Array, "L R K S"]:
    """The positions of the filled slots that are not in `slots`, EMPTY elsewhere."""
    layer, row, head, _ = jnp.indices(slots.shape, dtype=jnp.int32, sparse=True)
    place = jnp.where(slots == EMPTY, slots.shape[-1], slots)
    is_kept = jnp.zeros(slots.shape, bool).at[layer, row, head, place].set(True, mode="drop")
    return jnp.where(is_kept, EMPTY, position)
