"""The cache: one flat pool of pages on the device, its page tables, and the pure functions that change them.

A page holds `page_size` tokens of one layer, row and KV head. Each head may therefore keep different tokens, and a different
number of them, and the pages of evicted tokens are free at once. The engine calls these functions; they do not depend on a
policy.

Invariants, which the property tests check:
- page 0 is the null page: it has no owner and is never free. What is masked out has its address there, and nobody reads it;
- `refcount[p]` is the number of table entries with page p; the free stack holds each page without a reference once;
- a page with more than one reference is never written (copy on write), and only full pages have more than one;
- slots at or beyond `length` are empty: their position, key and value are undefined, and their slot data are zero;
- below `length`, a layer and KV head may have one vacant slot with position EMPTY, which the row's next token fills;
- below `length`, slots that were skipped to start a new page have log-weight `-inf` and are never filled or read.

No function copies the pool if the caller donates it: `kv` is only an operand of gather and of scatter with full advanced
indices.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.pytrees import PyTree, static
from pallas_kernels import sealed
from pallas_kernels.quantised import Format, Numbers, Quantised, dequantise, like, put, take
from pallas_kernels.sealed import Records, poisoned, zeros


def write(kv: Numbers, address: Int[Array, "R K T"], new: Numbers) -> Numbers:
    """The pool with new vectors `[R, K, T, 2, H]` in its form at addresses of consecutive slots, but for those in page 0."""
    if isinstance(kv, Quantised) and isinstance(new, Quantised) and kv.format.group is not None and address.shape[-1] > 1:
        return write_chunk(kv, address, new)
    page, offset = address // kv.shape[2], address % kv.shape[2]
    return put(kv, (page[..., None], jnp.arange(2, dtype=jnp.int32), offset[..., None]), new)


def write_chunk(kv: Quantised, address: Int[Array, "R K T"], new: Quantised) -> Quantised:
    """The pool with new vectors `[R, K, T, 2, H]` at addresses of consecutive slots; address 0, at the end, is not written.

    In: page 4, slots 6 to 8 -> Out: a page written from slot 2 on, and the next one in slot 0.
    """
    page_size, num_tokens = kv.shape[2], address.shape[-1]
    first = address[..., :1] % page_size
    most = (num_tokens + 2 * page_size - 2) // page_size  # pages that a chunk may touch
    start = jnp.maximum(jnp.arange(most, dtype=jnp.int32) * page_size - first, 0)  # first token of each page
    page = jnp.take_along_axis(address, jnp.minimum(start, num_tokens - 1), axis=-1) // page_size
    page = jnp.where(start < num_tokens, page, 0)
    token = jnp.arange(most * page_size, dtype=jnp.int32) - first
    at = jnp.clip(token, 0, num_tokens - 1)
    is_new = (token >= 0) & (token < num_tokens) & (jnp.take_along_axis(address, at, axis=-1) >= page_size)

    def write(x: Array, part: Array) -> Array:
        return put(x, (page,), merged(x.at[page].get(mode="promise_in_bounds"), part, at, is_new))

    return jax.tree.map(write, kv, new)


def merged(old: Array, new: Array, at: Int[Array, "R K S"], is_new: Bool[Array, "R K S"]) -> Array:
    """Pages `[R, K, I, 2, page, C]` whose slots are the vectors `at` `[R, K, T, 2, C]` where they are new."""
    by_page = *old.shape[:3], old.shape[4]
    taken = jnp.take_along_axis(new, at[..., None, None], axis=2)
    taken = jnp.swapaxes(taken.reshape(*by_page, 2, old.shape[-1]), 3, 4)
    return jnp.where(is_new.reshape(by_page)[:, :, :, None, :, None], taken, old)


EMPTY = -1  # the position of an empty slot, and an entry that `take_slots` ignores
NULL_PAGE = 0  # where what is masked out has its address
LOG_WEIGHT = "log_weight"  # slot data that attention adds to the logits: `ln m` for multiplicity m, `-inf` for a skipped slot


class Pool(PyTree):
    """Keys, values and the allocator, on the device and of fixed shape.

    The axes of the fields are not checked as types, because JAX also builds pytrees whose leaves are not arrays. A mesh splits
    the arrays by these axes (`jkv.model.sharding`).
    """

    kv: Annotated[Any, "P 2 page H"]  # keys (rotated at their true position) and values; floats, a `Quantised` or `Records`
    position: Annotated[Any, "P page"]  # position of each slot's token in its sequence
    page_table: Annotated[Any, "L B K MP"]  # pages of each layer, row and KV head; NULL_PAGE beyond the last
    length: Annotated[Any, "L B K"]  # filled slots
    logical_length: Annotated[Any, "B"]  # tokens seen: the position of the next one
    refcount: Annotated[Any, "P"]  # table entries with each page, also of detached block tables and `prefix_pages`
    free_stack: Annotated[Any, "P"]  # the first `free_top` entries are the free pages
    free_top: Annotated[Any, ""]  # negative after an allocation beyond the free pages; callers check before they allocate
    slot_data: dict[str, Annotated[Any, "L B K MP*page"]]  # by name; per slot of a row, so pages can be shared (LOG_WEIGHT)
    vacant_slot: Annotated[Any, "L B K"] = None  # index of the vacant slot, EMPTY for none; None if rows never have one
    bounds: Annotated[Any, "P 2 H"] = None  # elementwise minimum and maximum of each page's keys; None if no policy needs them
    poison: bool = static(default=False)  # tests: freed pages become NaN

    @property
    def page_size(self) -> int:
        """Slots per page."""
        return self.kv.shape[2]

    @property
    def num_rows(self) -> int:
        """Batch rows (B)."""
        return self.page_table.shape[1]

    @property
    def max_slots(self) -> int:
        """The most slots of a row per layer and KV head (S = MP * page)."""
        return self.page_table.shape[3] * self.page_size


class BlockTable(NamedTuple):
    """The pages of one sequence, detached from a row of the pool."""

    page_table: Int[Array, "L K MP"]
    length: Int[Array, "L K"]
    logical_length: Int[Array, ""]
    slot_data: dict[str, Float[Array, "L K S"]]
    vacant_slot: Int[Array, "L K"] | None = None


def create(
    *,
    num_layers: int,
    num_rows: int,
    num_kv_heads: int,
    head_size: int,
    num_pages: int,
    max_pages: int,
    page_size: int,
    dtype: Any = jnp.float32,
    slot_data: tuple[str, ...] = (),
    has_vacant_slots: bool = False,
    has_bounds: bool = False,
    poison: bool = False,
    kv_format: Format | None = None,
) -> Pool:
    """An empty pool of `num_pages` pages, not counting the null page, and of rows with up to `max_pages` pages each.

    With `kv_format`, keys and values are quantised when they are written; `dtype` is that of attention's products.
    """
    table = (num_layers, num_rows, num_kv_heads, max_pages)
    total = num_pages + 1
    kv = zeros((total, 2, page_size, head_size), dtype, kv_format)
    if poison:
        kv = poisoned(kv, jnp.arange(1, total))
    return Pool(
        kv=kv,
        position=jnp.full((total, page_size), EMPTY, jnp.int32),
        page_table=jnp.full(table, NULL_PAGE, jnp.int32),
        length=jnp.zeros(table[:3], jnp.int32),
        logical_length=jnp.zeros(num_rows, jnp.int32),
        refcount=jnp.zeros(total, jnp.int32),
        free_stack=jnp.arange(total, dtype=jnp.int32)[::-1],
        free_top=jnp.asarray(num_pages, jnp.int32),
        slot_data={name: jnp.zeros((*table[:3], max_pages * page_size), jnp.float32) for name in slot_data},
        vacant_slot=jnp.full(table[:3], EMPTY, jnp.int32) if has_vacant_slots else None,
        bounds=jnp.zeros((total, 2, head_size), dtype) if has_bounds else None,
        poison=poison,
    )


def held_pages(pool: Pool) -> Int[Array, ""]:
    """The number of pages in use."""
    return pool.refcount.shape[0] - 1 - pool.free_top


def reserve(pool: Pool, row: Int[Array, " R"], num_new: Int[Array, " R"], max_new: int) -> tuple[Pool, Int[Array, "L R K T"]]:
    """Allocates pages for the next `num_new` (at most T = `max_new`) tokens of each `row`. Returns the address of each token.

    Addresses (`page * page_size + offset`) are arguments of `append`; tokens at or beyond `num_new` have addresses in
    the null page. Positions are written here, once for all layers. A row with a vacant slot takes one token at a time.
    """
    page_size, max_pages = pool.page_size, pool.page_table.shape[3]
    length = pool.length[:, row]
    first, last = num_pages_of(length, page_size), num_pages_of(length + num_growing(pool, row, num_new), page_size)
    index = first[..., None] + jnp.arange(num_pages_of(max_new, page_size), dtype=jnp.int32)
    is_needed = index < last[..., None]
    pool, page = allocate(pool, is_needed)
    layer, _, head = jnp.indices(length.shape, dtype=jnp.int32, sparse=True)
    where = (layer[..., None], row[None, :, None, None], head[..., None], jnp.where(is_needed, index, max_pages))
    table = pool.page_table.at[where].set(page, mode="drop")
    bounds = pool.bounds
    if bounds is not None:
        nothing = jnp.asarray([[jnp.inf], [-jnp.inf]], bounds.dtype)
        bounds = put(bounds, (page,), jnp.broadcast_to(nothing, (*page.shape, *bounds.shape[1:])))

    offset = jnp.arange(max_new, dtype=jnp.int32)
    slot = length[..., None] + offset
    if pool.vacant_slot is not None:
        vacant_slot = pool.vacant_slot[:, row, :, None]
        slot = jnp.where(vacant_slot == EMPTY, slot, vacant_slot)
    is_real = offset < num_new[None, :, None, None]
    page = jnp.take_along_axis(table[:, row], jnp.minimum(slot // page_size, max_pages - 1), axis=-1)
    address = jnp.where(is_real, page * page_size + slot % page_size, NULL_PAGE)
    when = pool.logical_length[row][None, :, None, None] + offset
    position = put(pool.position, (address // page_size, address % page_size), jnp.broadcast_to(when, address.shape))
    return pool.replace(page_table=table, position=position, bounds=bounds), address


def give_back(pool: Pool, row: Int[Array, " R"], num_unused: Int[Array, " R"], max_unused: int) -> Pool:
    """Frees the pages of reserved tokens that never came: the last `num_unused`, at most `max_unused`, of each `row`.

    The lengths are advanced by the others already, and the rows have no vacant slot.
    """
    length, max_pages = pool.length[:, row], pool.page_table.shape[3]
    first, last = num_pages_of(length, pool.page_size), num_pages_of(length + num_unused[None, :, None], pool.page_size)
    index = first[..., None] + jnp.arange(num_pages_of(max_unused, pool.page_size), dtype=jnp.int32)
    layer, _, head = jnp.indices(length.shape, dtype=jnp.int32, sparse=True)
    where = (layer[..., None], row[None, :, None, None], head[..., None], jnp.where(index < last[..., None], index, max_pages))
    page = pool.page_table.at[where].get(mode="fill", fill_value=NULL_PAGE)
    pool = drop_references(pool, page, page != NULL_PAGE)
    return pool.replace(page_table=pool.page_table.at[where].set(NULL_PAGE, mode="drop"))


def num_growing(pool: Pool, row: Int[Array, " R"], num_new: Int[Array, " R"]) -> Int[Array, "L R K"]:
    """The slots that `num_new` tokens add to each layer and KV head. A token that fills a vacant slot adds none."""
    growing = jnp.broadcast_to(num_new[None, :, None], (pool.length.shape[0], *row.shape, pool.length.shape[2]))
    return growing if pool.vacant_slot is None else jnp.where(pool.vacant_slot[:, row] == EMPTY, growing, 0)


def append(pool: Pool, address: Int[Array, "R K T"], key: Float[Array, "R T K H"], value: Float[Array, "R T K H"]) -> Pool:
    """Writes one layer's new keys and values at the addresses that `reserve` returned for that layer."""
    kv_RKT2H = like(pool.kv, jnp.stack([jnp.moveaxis(key, 1, 2), jnp.moveaxis(value, 1, 2)], axis=3))
    pool = pool.replace(kv=write(pool.kv, address, kv_RKT2H))
    return pool if pool.bounds is None else widen_bounds(pool, address, jnp.moveaxis(key, 1, 2))


def widen_bounds(pool: Pool, address: Int[Array, "*A"], key: Float[Array, "*A H"]) -> Pool:
    """The pool whose pages' bounds hold new keys at these addresses too."""
    page = address // pool.page_size
    page = jnp.where(page == NULL_PAGE, pool.bounds.shape[0], page)
    if not isinstance(pool.kv, Records):
        key = dequantise(like(pool.kv, key), pool.bounds.dtype)
    return pool.replace(bounds=pool.bounds.at[page, 0].min(key, mode="drop").at[page, 1].max(key, mode="drop"))


def advance(pool: Pool, row: Int[Array, " R"], num_new: Int[Array, " R"]) -> Pool:
    """Advances the lengths after the reserved tokens are appended in every layer."""
    length = pool.length.at[:, row].add(num_growing(pool, row, num_new), mode="drop")
    vacant_slot = pool.vacant_slot
    if vacant_slot is not None:
        vacant_slot = vacant_slot.at[:, row].set(jnp.where(num_new[None, :, None] > 0, EMPTY, vacant_slot[:, row]), mode="drop")
    return pool.replace(
        length=length, vacant_slot=vacant_slot, logical_length=pool.logical_length.at[row].add(num_new, mode="drop")
    )


def vacate(pool: Pool, slot: Int[Array, "L B K"]) -> tuple[Pool, Int[Array, "L B K"]]:
    """Empties one slot of each layer, row and KV head (EMPTY: none), which becomes the vacant slot. Also returns its position.

    The rows must have no vacant slot, and the pages one reference.
    """
    is_real = slot != EMPTY
    layer, row, head = jnp.indices(slot.shape, dtype=jnp.int32, sparse=True)
    at = jnp.maximum(slot, 0)
    page = jnp.where(is_real, pool.page_table[layer, row, head, at // pool.page_size], NULL_PAGE)
    position = jnp.where(is_real, pool.position[page, at % pool.page_size], EMPTY)
    beyond = jnp.where(is_real, at, pool.max_slots)
    data = {name: data.at[layer, row, head, beyond].set(0.0, mode="drop") for name, data in pool.slot_data.items()}
    emptied = pool.position.at[page, at % pool.page_size].set(EMPTY)
    return pool.replace(position=emptied, slot_data=data, vacant_slot=jnp.where(is_real, slot, pool.vacant_slot)), position


def block_table_of(pool: Pool, row: Int[Array, ""]) -> BlockTable:
    """The block table of a row; takes no reference."""
    data = {name: data[:, row] for name, data in pool.slot_data.items()}
    vacant_slot = None if pool.vacant_slot is None else pool.vacant_slot[:, row]
    return BlockTable(pool.page_table[:, row], pool.length[:, row], pool.logical_length[row], data, vacant_slot)


def detach(pool: Pool, row: Int[Array, ""]) -> tuple[Pool, BlockTable]:
    """Empties row `row` and returns its block table, which owns the references until `free`."""
    return clear_rows(pool, row[None]), block_table_of(pool, row)


def attach(pool: Pool, block_table: BlockTable, target: Int[Array, " R"], is_own: Bool[Array, "L K MP"]) -> Pool:
    """Attaches a block table to the empty rows `target`: entries in `is_own` become new pages, the others are shared.

    Shared pages must be full. The caller writes the new pages. A target equal to the number of rows is ignored.
    """
    is_real = (target < pool.num_rows)[None, :, None, None]
    is_used = is_entry_used(pool, block_table.length)
    is_shared = (is_used & ~is_own)[:, None] & is_real
    table = jnp.broadcast_to(block_table.page_table[:, None], is_shared.shape)
    refcount = pool.refcount.at[jnp.where(is_shared, table, pool.refcount.shape[0])].add(1, mode="drop")
    pool, fresh = allocate(pool.replace(refcount=refcount), (is_used & is_own)[:, None] & is_real)
    data, vacant_slot = pool.slot_data, pool.vacant_slot
    if vacant_slot is not None:
        assert block_table.vacant_slot is not None
        vacant_slot = vacant_slot.at[:, target].set(block_table.vacant_slot[:, None], mode="drop")
    return pool.replace(
        page_table=pool.page_table.at[:, target].set(jnp.where(is_shared, table, fresh), mode="drop"),
        length=pool.length.at[:, target].set(block_table.length[:, None], mode="drop"),
        logical_length=pool.logical_length.at[target].set(block_table.logical_length, mode="drop"),
        slot_data={name: data[name].at[:, target].set(block_table.slot_data[name][:, None], mode="drop") for name in data},
        vacant_slot=vacant_slot,
    )


def fork(pool: Pool, block_table: BlockTable, target: Int[Array, " R"], owns_all: bool = False) -> Pool:
    """Forks a block table into the empty rows `target`: they share its full pages and copy its partial last page.

    With `owns_all` (for rows that write into existing pages) all pages are copied. A target equal to the number of rows is
    ignored.
    """
    page_size, present = pool.page_size, jnp.minimum(target, pool.num_rows - 1)
    index = jnp.arange(block_table.page_table.shape[-1], dtype=jnp.int32)
    is_own = (index == (block_table.length // page_size)[..., None]) & (block_table.length % page_size > 0)[..., None]
    if owns_all:
        is_own = is_entry_used(pool, block_table.length)
    pool = attach(pool, block_table, target, is_own)
    is_copied = is_own[:, None] & (target < pool.num_rows)[None, :, None, None]
    old = jnp.where(is_copied, block_table.page_table[:, None], NULL_PAGE)  # NULL_PAGE onto NULL_PAGE where nothing is copied
    new = jnp.where(is_copied, pool.page_table[:, present], NULL_PAGE)
    if not owns_all:  # at most one page per row
        old, new = old.sum(axis=-1), new.sum(axis=-1)

    def copy(of_pages: Any, layer: tuple[Array, Array]) -> tuple[Any, None]:
        source, copied = layer
        return put(of_pages, (copied,), jax.tree.map(lambda x: x[source], of_pages)), None

    of_pages = pool.kv, pool.position, pool.bounds
    (kv, position, bounds), _ = jax.lax.scan(copy, of_pages, (old, new))  # one layer's worth of temporary memory
    return pool.replace(kv=kv, position=position, bounds=bounds)


def free(pool: Pool, block_table: BlockTable) -> Pool:
    """Drops the references of a detached block table."""
    return drop_references(pool, block_table.page_table, is_entry_used(pool, block_table.length))


def take_pages(pool: Pool, row: Int[Array, " R"], entries: Int[Array, "R MP"], log_weight: Float[Array, "R MP"]) -> Pool:
    """Every `row` keeps the `entries` of its table, in that order, in every layer and KV head, and frees the other pages.

    EMPTY entries, all at the end, are ignored. No key is moved: only tables and slot data change. The slots of a page get its
    `log_weight`; skipped slots keep theirs. Only the last page of a row may be partial, and it must stay the last. A row equal
    to the number of rows is ignored.
    """
    is_real, present = row < pool.num_rows, jnp.minimum(row, pool.num_rows - 1)
    is_kept, at = (entries != EMPTY) & is_real[:, None], jnp.maximum(entries, 0)
    table, length = pool.page_table[:, present], pool.length[:, present]
    is_used = is_entry_used(pool, length) & is_real[:, None, None]
    where = jnp.where(is_kept, at, table.shape[-1])
    is_left = jnp.zeros(entries.shape, bool).at[jnp.arange(len(row))[:, None], where].set(True, mode="drop")[:, None]
    num_dropped = (is_used & ~is_left).sum(axis=-1, dtype=jnp.int32)
    new_table = jnp.where(is_kept[:, None], jnp.take_along_axis(table, at[None, :, None], axis=-1), NULL_PAGE)
    new_length = length - num_dropped * pool.page_size
    is_filled = jnp.arange(pool.max_slots, dtype=jnp.int32) < new_length[..., None]

    def take(name: str, data: Float[Array, "L B K S"]) -> Float[Array, "L B K S"]:
        by_page = data[:, present].reshape(*table.shape, pool.page_size)
        taken = jnp.take_along_axis(by_page, at[None, :, None, :, None], axis=-2)
        if name == LOG_WEIGHT:
            taken = jnp.where(taken == -jnp.inf, taken, log_weight[:, None, :, None])
        taken = jnp.where(is_filled, taken.reshape(is_filled.shape), 0.0)
        return data.at[:, row].set(taken, mode="drop")

    pool = pool.replace(
        page_table=pool.page_table.at[:, row].set(new_table, mode="drop"),
        length=pool.length.at[:, row].set(new_length, mode="drop"),
        slot_data={name: take(name, data) for name, data in pool.slot_data.items()},
    )
    return drop_references(pool, table, is_used & ~is_left)


def fill_page(pool: Pool, is_filled: Bool[Array, " B"]) -> Pool:
    """Closes the last page of some rows: its empty slots are skipped, with log-weight `-inf`."""
    length = pool.length
    end = jnp.where(is_filled[None, :, None], num_pages_of(length, pool.page_size) * pool.page_size, length)
    layer, row, head = jnp.indices(length.shape, dtype=jnp.int32, sparse=True)
    slot = length[..., None] + jnp.arange(pool.page_size - 1, dtype=jnp.int32)
    slot = jnp.where(slot < end[..., None], slot, pool.max_slots)
    weight = pool.slot_data[LOG_WEIGHT]
    weight = weight.at[layer[..., None], row[..., None], head[..., None], slot].set(-jnp.inf, mode="drop")
    return pool.replace(length=end, slot_data=pool.slot_data | {LOG_WEIGHT: weight})


def release(pool: Pool, row: Int[Array, " R"]) -> Pool:
    """Empties each `row` and frees its pages, except those that others share. A row equal to the number of rows is ignored."""
    is_real, present = (row < pool.num_rows)[None, :, None, None], jnp.minimum(row, pool.num_rows - 1)
    table = pool.page_table[:, present]
    is_used = is_entry_used(pool, pool.length[:, present]) & is_real
    return drop_references(clear_rows(pool, row), table, is_used)


def clear_rows(pool: Pool, row: Int[Array, " R"]) -> Pool:
    """Empties each `row` without dropping its references; the caller keeps them."""
    return pool.replace(
        page_table=pool.page_table.at[:, row].set(NULL_PAGE, mode="drop"),
        length=pool.length.at[:, row].set(0, mode="drop"),
        logical_length=pool.logical_length.at[row].set(0, mode="drop"),
        vacant_slot=None if pool.vacant_slot is None else pool.vacant_slot.at[:, row].set(EMPTY, mode="drop"),
        slot_data={name: data.at[:, row].set(0.0, mode="drop") for name, data in pool.slot_data.items()},
    )


def gather(
    pool: Pool, layer: int | Int[Array, ""] | Int[Array, " R"], row: Int[Array, " R"], num_pages: int | None = None
) -> tuple[Float[Array, "R K S H"], Float[Array, "R K S H"], Int[Array, "R K S"]]:
    """Keys, values and positions (EMPTY in empty slots) of rows, slot by slot; in one layer, or a layer for each row.

    Of their first `num_pages` pages, which must hold all filled slots; None are all pages that a row can have.
    """
    table = pool.page_table[layer, row, :, :num_pages]
    shape = (*table.shape[:2], table.shape[2] * pool.page_size)
    if isinstance(pool.kv, Records):
        vectors = sealed.unsealed(take(pool.kv, (table,)))
    else:
        vectors = dequantise(take(pool.kv, (table, 0))), dequantise(take(pool.kv, (table, 1)))
    key, value = (x.reshape(*shape, -1) for x in vectors)
    return key, value, positions(pool, layer, row, num_pages)


def positions(
    pool: Pool, layer: int | Int[Array, ""] | Int[Array, " R"], row: Int[Array, " R"], num_pages: int | None = None
) -> Int[Array, "R K S"]:
    """Positions of rows, slot by slot, EMPTY in empty slots; in one layer, or a layer for each row; of pages as in `gather`."""
    table = pool.page_table[layer, row, :, :num_pages]
    slot = jnp.arange(table.shape[2] * pool.page_size, dtype=jnp.int32)
    position = pool.position[table].reshape(*table.shape[:2], -1)
    is_filled = slot < pool.length[layer, row][..., None]
    if LOG_WEIGHT in pool.slot_data:
        is_filled &= pool.slot_data[LOG_WEIGHT][layer, row, :, : len(slot)] > -jnp.inf
    return jnp.where(is_filled, position, EMPTY)


def allocate(pool: Pool, is_needed: Bool[Array, "..."]) -> tuple[Pool, Int[Array, "..."]]:
    """A new page with one reference where `is_needed`, NULL_PAGE elsewhere."""
    rank = jnp.cumsum(is_needed.reshape(-1), dtype=jnp.int32).reshape(is_needed.shape)  # 1 for the first
    is_given = is_needed & (rank <= pool.free_top)
    page = jnp.where(is_given, pool.free_stack[jnp.maximum(pool.free_top - rank, 0)], NULL_PAGE)
    refcount = pool.refcount.at[jnp.where(is_given, page, pool.refcount.shape[0])].set(1, mode="drop")
    num_needed = rank.reshape(-1)[-1:].sum(dtype=jnp.int32)  # the last rank; 0 where there are no entries
    return pool.replace(refcount=refcount, free_top=pool.free_top - num_needed), page


def drop_references(pool: Pool, page: Int[Array, "..."], is_dropped: Bool[Array, "..."]) -> Pool:
    """Drops the references of marked table entries; pages without any return to the free stack. No pass over all pages."""
    total = pool.refcount.shape[0]
    page = jnp.where(is_dropped, page, total).reshape(-1)
    refcount = pool.refcount.at[page].add(-1, mode="drop")
    page = jnp.where(refcount.at[page].get(mode="fill", fill_value=1) == 0, page, total)  # of entries whose page is free now
    # Several entries may have dropped one page: they write their numbers to its refcount, and the least of them frees it.
    number = -1 - jnp.arange(page.size, dtype=jnp.int32)
    refcount = refcount.at[page].min(number, mode="drop")
    is_freed = refcount.at[page].get(mode="fill", fill_value=0) == number
    refcount = refcount.at[page].set(0, mode="drop")
    rank = jnp.cumsum(is_freed, dtype=jnp.int32)  # 1 for the first
    where = jnp.where(is_freed, pool.free_top + rank - 1, total)
    free_stack = pool.free_stack.at[where].set(page, mode="drop")
    pool = pool.replace(refcount=refcount, free_stack=free_stack, free_top=pool.free_top + rank[-1])
    return pool.replace(kv=poisoned(pool.kv, page)) if pool.poison else pool


def is_entry_used(pool: Pool, length: Int[Array, "..."]) -> Bool[Array, "... MP"]:
    """Which entries of page tables hold a page, for rows of `length` slots."""
    index = jnp.arange(pool.page_table.shape[-1], dtype=jnp.int32)
    return index < num_pages_of(length, pool.page_size)[..., None]


def num_pages_of(num_slots: Any, page_size: int) -> Any:
    """Pages that hold `num_slots` slots, rounded up (ints or arrays).

    >>> num_pages_of(17, 16)
    2
    """
    return (num_slots + page_size - 1) // page_size


def hold(pool: Pool, row: Int[Array, ""], entry: Int[Array, " I"]) -> tuple[Pool, Int[Array, "L K I"]]:
    """Takes one more reference on the full pages at some entries of a row's table; returns these pages."""
    page = pool.page_table[:, row][..., entry]
    return pool.replace(refcount=pool.refcount.at[page].add(1)), page


def adopt(pool: Pool, row: Int[Array, ""], page: Int[Array, "L K I"]) -> Pool:
    """Appends full pages to a row, which shares them and whose own pages are all full. Their slot data are zero."""
    num_new = page.shape[-1] * pool.page_size
    entry = pool.length[:, row, :, None] // pool.page_size + jnp.arange(page.shape[-1], dtype=jnp.int32)
    layer, head, _ = jnp.indices(page.shape, dtype=jnp.int32, sparse=True)
    return pool.replace(
        refcount=pool.refcount.at[page].add(1),
        page_table=pool.page_table.at[layer, row, head, entry].set(page),
        length=pool.length.at[:, row].add(num_new),
        logical_length=pool.logical_length.at[row].add(num_new),
    )


def drop(pool: Pool, page: Int[Array, "L K I"]) -> Pool:
    """Drops the references that `hold` took; pages that no row reads become free."""
    return drop_references(pool, page, jnp.ones(page.shape, bool))


class PageContent(NamedTuple):
    """The content of pages, by KV head."""

    kv: Annotated[Any, "K I 2 page H"]  # floats or a `Quantised`
    position: Int[Array, "K I page"]
    bounds: Float[Array, "K I 2 H"] | None


def read_pages(pool: Pool, page: Int[Array, "K I"]) -> PageContent:
    """The content of some pages of each KV head, to be swapped out."""
    kv = jax.tree.map(lambda x: x[page], pool.kv)
    return PageContent(kv, pool.position[page], None if pool.bounds is None else pool.bounds[page])


def write_pages(pool: Pool, page: Int[Array, "K I"], content: PageContent) -> Pool:
    """Writes the result of `read_pages` into other pages; content for NULL_PAGE is discarded."""
    whole = PageContent(pool.kv, pool.position, pool.bounds)
    return pool.replace(**put(whole, (page,), content)._asdict())
