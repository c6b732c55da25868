"""The pool against plain lists: whatever the order of operations, every row reads back as if it had a cache of its own.

The machine below keeps, for each row, layer and head, a list of tokens. It knows nothing of pages, and after every operation
the pool must hold the same tokens, with its allocator consistent.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import pallas_kernels as kernels
from jkv.cache import compaction, pool
from jkv.cache import pool as pages
from jkv.cache.pool import EMPTY, NULL_PAGE
from pallas_kernels.quantised import FORMATS, Quantised, dequantise, quantise
from pallas_kernels.sealed import Records

L, B, K, H = 2, 3, 2, 2
CHUNK = 5  # tokens of a chunk; some of them are padding
NONE = B  # the row that stands for none
CELLS = list(np.ndindex(L, K))
ANY_ROW = st.integers(0, B - 1)
TWO_ROWS = st.tuples(st.integers(0, NONE), st.integers(0, NONE)).filter(lambda rows: rows[0] != rows[1] or rows[0] == NONE)
STEPS = settings(
    max_examples=50,
    stateful_step_count=35,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@functools.partial(jax.jit, donate_argnames="pool")
def append_tokens(pool, row, num_new, key, value):
    """What the engine does in a step: reserve, append in every layer, advance."""
    pool, address = pages.reserve(pool, row, num_new, key.shape[2])
    for layer in range(key.shape[0]):
        pool = pages.append(pool, address[layer], key[layer], value[layer])
    return pages.advance(pool, row, num_new)


fork = jax.jit(pages.fork, donate_argnames="pool")
detach = jax.jit(pages.detach, donate_argnames="pool")
attach = jax.jit(pages.attach, donate_argnames="pool")
free = jax.jit(pages.free, donate_argnames="pool")
block_table_of = jax.jit(pages.block_table_of)
read_pages = jax.jit(pool.read_pages)
write_pages = jax.jit(pool.write_pages, donate_argnames="pool")
take_slots = jax.jit(compaction.take_slots, donate_argnames="pool")
take_pages = jax.jit(pages.take_pages, donate_argnames="pool")
fill_page = jax.jit(pages.fill_page, donate_argnames="pool")
release = jax.jit(pages.release, donate_argnames="pool")


@functools.partial(jax.jit, donate_argnames="pool")
def alias(pool, row, index, source):
    """Entry `index` of each row's table becomes the full page at entry `source`, which is then read twice."""
    old, new = pool.page_table[:, row, :, index], pool.page_table[:, row, :, source]  # [R, L, K]
    refcount = pool.refcount.at[new].add(1)
    table = pool.page_table.at[:, row, :, index].set(new)
    return pages.drop_references(pool.replace(refcount=refcount, page_table=table), old, jnp.ones(old.shape, bool))


@jax.jit
def read(pool):
    """Every row's keys, values and positions: [L, B, K, S, ...]."""
    row = jnp.arange(pool.num_rows, dtype=jnp.int32)
    return [jnp.stack(x) for x in zip(*[pages.gather(pool, layer, row) for layer in range(L)], strict=True)]


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@functools.partial(jax.jit, static_argnames="kv_format")
def round_trip(x, kv_format):
    """Vectors quantised and dequantised."""
    return dequantise(quantise(x, kv_format))


def as_stored(x, kv_format):
    """What a pool of a format gives back for vectors: by NumPy's own arithmetic, but for int4, which has tests of its own."""
    if kv_format is None:
        return x
    if kv_format.group is not None:
        return np.asarray(round_trip(x, kv_format))
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / kv_format.most)
    codes = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if kv_format.name == "fp8" else np.rint(x / scale)
    return codes * scale


def head_size_of(kv_format):
    """Small, or the smallest that the format takes."""
    return H if kv_format is None or kv_format.group is None else kv_format.group


def new_pool(page_size, max_pages, num_pages=None, kv_format=None):
    """A poisoned pool with log-weights, and by default just enough pages for every table to be full."""
    return pages.create(
        num_layers=L,
        num_rows=B,
        num_kv_heads=K,
        head_size=head_size_of(kv_format),
        num_pages=L * B * K * max_pages if num_pages is None else num_pages,
        max_pages=max_pages,
        page_size=page_size,
        slot_data=("log_weight",),
        poison=True,
        kv_format=kv_format,
    )


def snapshot(pool):
    """A copy on the host, which later donations leave alone."""
    return jax.tree.map(np.array, pool)


def assert_allocator_is_consistent(pool, block_tables=()):
    """Tables, those of block tables without a row too, reference counts and the free stack agree; what is free is NaN."""
    table = np.concatenate(
        [pool.page_table, *(np.asarray(block_table.page_table)[:, None] for block_table in block_tables)], axis=1
    )
    length = np.concatenate([pool.length, *(np.asarray(block_table.length)[:, None] for block_table in block_tables)], axis=1)
    is_used = np.arange(table.shape[-1]) < -(-length // pool.page_size)[..., None]
    assert (table[is_used] != NULL_PAGE).all()
    assert (table[~is_used] == NULL_PAGE).all()
    num_holders = np.bincount(table[is_used], minlength=len(pool.refcount))
    np.testing.assert_array_equal(pool.refcount, num_holders)
    free = pool.free_stack[: pool.free_top]
    assert sorted(free) == [page for page in range(1, len(num_holders)) if num_holders[page] == 0]
    if isinstance(pool.kv, Records):
        numbers = pool.kv.scales[free].view(np.float16)
    else:
        numbers = pool.kv.scale[free] if isinstance(pool.kv, Quantised) else pool.kv[free]
    assert np.isnan(numbers.view(np.float16) if numbers.dtype == np.uint16 else numbers).all()
    for page in np.flatnonzero(num_holders > 1):
        layer, row, head, index = np.nonzero((table == page) & is_used)
        assert len(set(zip(layer, head, strict=True))) == 1
        assert (length[layer, row, head] >= (index + 1) * pool.page_size).all()


def assert_shared_pages_are_untouched(before, after):
    """Nothing was written to a page that several table entries held, unless it was freed since."""
    kept = (before.refcount > 1) & (after.refcount > 0)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[kept], old[kept]), after.kv, before.kv)
    np.testing.assert_array_equal(after.position[kept], before.position[kept])


class Token(NamedTuple):
    """One slot of one layer, row and head."""

    key: np.ndarray
    value: np.ndarray
    position: int
    log_weight: float = 0.0

    @property
    def is_hole(self) -> bool:
        """Whether it is no token but the rest of a page."""
        return self.log_weight == -np.inf


HOLE = Token(np.zeros(H), np.zeros(H), EMPTY, -np.inf)


class PoolMachine(RuleBasedStateMachine):
    """Random operations on the pool and on lists of tokens."""

    def __init__(self, page_size, max_pages, kv_format=None):
        super().__init__()
        self.rng, self.kv_format, self.head_size = np.random.default_rng(0), kv_format, head_size_of(kv_format)
        self.pool = new_pool(page_size, max_pages, L * (B + 2) * K * max_pages, kv_format)  # every row and block table full
        self.page_size, self.max_slots = page_size, page_size * max_pages
        self.before = snapshot(self.pool)
        self.rows = [{cell: [] for cell in CELLS} for _ in range(B)]
        self.num_seen = [0] * B
        self.apart = []  # rows that left with their pages: (block table, lists, tokens seen)

    def room(self, row):
        return self.max_slots - max(len(tokens) for tokens in self.rows[row].values())

    def empty_rows(self):
        return [row for row in range(B) if not any(self.rows[row].values())]

    def rows_with_full_pages(self):
        """Row -> how many leading pages are full in every layer and head."""
        num_full = [min(len(tokens) for tokens in self.rows[row].values()) // self.page_size for row in range(B)]
        return {row: count for row, count in enumerate(num_full) if count >= 2}

    def append(self, rows, num_new, max_new):
        key, value = self.rng.standard_normal((2, L, len(rows), max_new, K, self.head_size)).astype(np.float32)
        self.pool = append_tokens(self.pool, ints(*rows), ints(*num_new), jnp.asarray(key), jnp.asarray(value))
        key, value = (as_stored(x, self.kv_format) for x in (key, value))
        for i, row in enumerate(rows):
            for (layer, head), tokens in self.rows[row].items():
                for t in range(num_new[i]):
                    tokens.append(Token(key[layer, i, t, head], value[layer, i, t, head], self.num_seen[row] + t))
            self.num_seen[row] += num_new[i]

    @rule(is_active=st.tuples(*[st.booleans()] * B))
    def append_a_token_to_some_rows(self, is_active):
        self.append(range(B), [int(is_active[row] and self.room(row) > 0) for row in range(B)], 1)

    @rule(row=ANY_ROW, num_new=st.integers(1, CHUNK))
    def append_a_chunk_to_a_row(self, row, num_new):
        self.append([row], [min(num_new, self.room(row))], CHUNK)

    @precondition(lambda self: self.empty_rows())
    @rule(source=ANY_ROW, data=st.data())
    def fork_a_row(self, source, data):
        choices = [row for row in self.empty_rows() if row != source] + [NONE]
        target = data.draw(
            st.tuples(*[st.sampled_from(choices)] * 2).filter(lambda rows: rows[0] != rows[1] or rows[0] == NONE)
        )
        self.pool = fork(self.pool, block_table_of(self.pool, jnp.int32(source)), ints(*target))
        for row in set(target) - {NONE}:
            self.rows[row] = {cell: list(tokens) for cell, tokens in self.rows[source].items()}
            self.num_seen[row] = self.num_seen[source]

    @precondition(lambda self: len(self.apart) < 2)
    @rule(row=ANY_ROW)
    def leave_with_the_pages(self, row):
        self.pool, block_table = detach(self.pool, jnp.int32(row))
        self.apart.append((block_table, self.rows[row], self.num_seen[row]))
        self.rows[row], self.num_seen[row] = {cell: [] for cell in CELLS}, 0

    @precondition(lambda self: self.apart and self.empty_rows())
    @rule(data=st.data(), is_dropped=st.booleans())
    def fork_from_a_seat(self, data, is_dropped):
        block_table, tokens, num_seen = self.apart[0]
        row = data.draw(st.sampled_from(self.empty_rows()))
        self.pool = fork(self.pool, block_table, ints(row, NONE))
        self.rows[row], self.num_seen[row] = {cell: list(old) for cell, old in tokens.items()}, num_seen
        if is_dropped:
            self.drop_a_seat()

    @precondition(lambda self: self.apart)
    @rule()
    def drop_a_seat(self):
        self.pool = free(self.pool, self.apart.pop(0)[0])

    @rule(row=ANY_ROW)
    def put_aside_and_bring_back(self, row):
        """Pages that a block table holds too stay where they are; the others go through host memory."""
        block_table = jax.device_get(block_table_of(self.pool, jnp.int32(row)))
        is_held = block_table.page_table != NULL_PAGE
        for other, _, _ in self.apart:
            is_held &= block_table.page_table != np.asarray(other.page_table)
        page = block_table.page_table[is_held]
        if len(page) > self.before.free_top + (self.before.refcount[page] == 1).sum():
            return  # pages that other rows hold come back as copies, and there might not be enough
        padded = np.full((K, L * self.max_slots // self.page_size), NULL_PAGE, np.int32)  # of any head: all are in one pool
        padded.flat[: len(page)] = page
        content = jax.device_get(read_pages(self.pool, padded))
        self.pool = release(self.pool, ints(row, NONE))
        self.the_allocator_is_consistent_and_shared_pages_are_never_written()  # a page freed here may come back written
        self.pool = attach(self.pool, block_table, ints(row), jnp.asarray(is_held))
        padded.flat[: len(page)] = np.asarray(self.pool.page_table)[:, row][is_held]
        self.pool = write_pages(self.pool, padded, content)

    @rule(row=ANY_ROW, is_in_order=st.booleans(), is_narrow=st.booleans(), data=st.data())
    def keep_some_slots(self, row, is_in_order, is_narrow, data):
        if (self.before.refcount[self.before.page_table[:, row]] > 1).sum() > self.before.free_top:
            return  # copies might need more pages than there are
        num_slots = self.page_size + 1 if is_narrow else self.max_slots
        slots = np.full((L, 1, K, num_slots), EMPTY, np.int32)
        for layer, head in CELLS:
            tokens = self.rows[row][layer, head]
            num_first = data.draw(st.integers(0, len(tokens)))
            chosen = data.draw(st.integers(0, 2 ** len(tokens) - 1)) | (2**num_first - 1)
            kept = [slot for slot in range(len(tokens)) if chosen >> slot & 1]
            kept = (kept if is_in_order else data.draw(st.permutations(kept)))[:num_slots]
            slots[layer, 0, head, : len(kept)] = kept
            self.rows[row][layer, head] = [tokens[slot] for slot in kept]
        self.pool = take_slots(self.pool, ints(row), jnp.asarray(slots))

    def even_rows(self):
        """Rows of the same length in every layer and head, with a full page."""
        lengths = {row: {len(tokens) for tokens in self.rows[row].values()} for row in range(B)}
        return [row for row, some in lengths.items() if len(some) == 1 and min(some) >= self.page_size]

    @precondition(lambda self: self.even_rows())
    @rule(data=st.data())
    def keep_some_pages(self, data):
        row = data.draw(st.sampled_from(self.even_rows()))
        count, size = len(self.rows[row][0, 0]), self.page_size
        full, tail = list(range(count // size)), [count // size] * bool(count % size)
        kept = data.draw(st.lists(st.sampled_from(full), unique=True)) + tail  # in any order, but for the partial last
        entries, weight = (
            np.full((2, self.max_slots // size), EMPTY, np.int32),
            np.zeros((2, self.max_slots // size), np.float32),
        )
        entries[0, : len(kept)], weight[0, : len(kept)] = kept, self.rng.standard_normal(len(kept))
        entries[1] = 0  # ignored
        self.pool = take_pages(self.pool, ints(row, NONE), jnp.asarray(entries), jnp.asarray(weight))
        for tokens in self.rows[row].values():
            old = list(tokens)
            tokens.clear()
            for page, new in zip(kept, weight[0], strict=False):
                taken = old[page * size : (page + 1) * size]
                tokens += [token if token.is_hole else token._replace(log_weight=new) for token in taken]

    @rule(is_filled=st.tuples(*[st.booleans()] * B))
    def fill_last_pages(self, is_filled):
        self.pool = fill_page(self.pool, jnp.asarray(is_filled))
        for row in np.flatnonzero(is_filled):
            for tokens in self.rows[row].values():
                tokens += [HOLE] * (-len(tokens) % self.page_size)

    @precondition(lambda self: self.rows_with_full_pages())
    @rule(num_aliases=st.integers(1, 2), data=st.data())
    def alias_pages(self, num_aliases, data):
        num_full = self.rows_with_full_pages()
        entry = st.sampled_from([(row, page) for row, count in num_full.items() for page in range(count)])
        targets = data.draw(st.lists(entry, min_size=num_aliases, max_size=num_aliases, unique=True))
        sources = [data.draw(st.integers(0, num_full[row] - 1).filter(lambda x, y=page: x != y)) for row, page in targets]
        rows, indices = zip(*targets, strict=True)
        if any(token.is_hole for row in rows for tokens in self.rows[row].values() for token in tokens):
            return  # what is a vacant slot belongs to the row, not to the page
        self.pool = alias(self.pool, ints(*rows), ints(*indices), ints(*sources))
        old = [{cell: list(tokens) for cell, tokens in row.items()} for row in self.rows]
        for (row, page), source in zip(targets, sources, strict=True):
            for cell, tokens in self.rows[row].items():
                for offset in range(self.page_size):
                    to = page * self.page_size + offset
                    taken = old[row][cell][source * self.page_size + offset]
                    tokens[to] = taken._replace(log_weight=tokens[to].log_weight)  # it belongs to the row's slot

    @rule(row=ANY_ROW)
    def weigh_slots(self, row):
        weight = np.array(self.pool.slot_data["log_weight"])
        for (layer, head), tokens in self.rows[row].items():
            new = self.rng.standard_normal(len(tokens)).astype(np.float32)
            new = np.where([token.is_hole for token in tokens], np.float32(-np.inf), new)
            weight[layer, row, head, : len(tokens)] = new
            tokens[:] = [token._replace(log_weight=x) for token, x in zip(tokens, new, strict=True)]
        self.pool = self.pool.replace(slot_data={"log_weight": jnp.asarray(weight)})

    @rule(rows=TWO_ROWS)
    def release_rows(self, rows):
        self.pool = release(self.pool, ints(*rows))
        for row in set(rows) - {NONE}:
            self.rows[row], self.num_seen[row] = {cell: [] for cell in CELLS}, 0

    @invariant()
    def the_pool_holds_what_the_lists_hold(self):
        key, value, position = (np.asarray(x) for x in read(self.pool))
        length, log_weight = np.asarray(self.pool.length), np.asarray(self.pool.slot_data["log_weight"])
        np.testing.assert_array_equal(self.pool.logical_length, self.num_seen)
        for row in range(B):
            for (layer, head), tokens in self.rows[row].items():
                where, count = (layer, row, head), len(tokens)
                assert length[where] == count
                assert position[where].tolist() == [t.position for t in tokens] + [EMPTY] * (self.max_slots - count)
                weights = [t.log_weight for t in tokens] + [0.0] * (self.max_slots - count)
                np.testing.assert_array_equal(log_weight[where], np.asarray(weights, np.float32))
                if tokens:
                    is_token = np.array([not t.is_hole for t in tokens])
                    for x, name in ((key, "key"), (value, "value")):
                        expected = np.array([getattr(t, name) for t in tokens if not t.is_hole]).reshape(-1, self.head_size)
                        np.testing.assert_array_equal(x[where][:count][is_token], expected)

    @invariant()
    def the_allocator_is_consistent_and_shared_pages_are_never_written(self):
        after = snapshot(self.pool)
        assert_allocator_is_consistent(after, [block_table for block_table, _, _ in self.apart])
        assert_shared_pages_are_untouched(self.before, after)
        self.before = after

    def teardown(self):
        """Releasing every row and block table gives back every page."""
        for block_table, _, _ in self.apart:
            self.pool = free(self.pool, block_table)
        pool = release(release(self.pool, ints(0, 1)), ints(2, NONE))
        assert pages.held_pages(pool) == 0
        assert_allocator_is_consistent(snapshot(pool))


@pytest.mark.parametrize(
    ("page_size", "max_pages", "kv_dtype"),
    [(2, 6, None), (3, 4, None), (2, 6, "int8"), (3, 4, "fp8"), (3, 4, "int4")],
    ids=["pages_of_2", "pages_of_3", "int8", "fp8", "int4"],
)
@pytest.mark.everyday(where=lambda page_size, kv_dtype: (page_size, kv_dtype) == (2, None))
@pytest.mark.everyday
def test_any_sequence_of_operations_reads_back_as_plain_lists_do(page_size, max_pages, kv_dtype):
    run_state_machine_as_test(lambda: PoolMachine(page_size, max_pages, FORMATS.get(kv_dtype)), settings=STEPS)


def filled_pool(num_tokens, page_size=2, max_pages=6, num_pages=None, dtype=jnp.float32):
    """A pool whose row 0 holds random tokens."""
    pool = new_pool(page_size, max_pages, num_pages)
    pool = pool.replace(kv=pool.kv.astype(dtype))
    rng = np.random.default_rng(0)
    for begin in range(0, num_tokens, CHUNK):
        key, value = jnp.asarray(rng.standard_normal((2, L, 1, CHUNK, K, H)), jnp.float32)
        pool = append_tokens(pool, ints(0), ints(min(CHUNK, num_tokens - begin)), key, value)
    return pool


def forked(pool, target):
    """The pool with copies of row 0."""
    return fork(pool, block_table_of(pool, jnp.int32(0)), target)


def filled(pool, row):
    """Keys, values and positions of a row whose layers and heads all have the same length."""
    count = int(pool.length[0, row, 0])
    assert (np.asarray(pool.length)[:, row] == count).all()
    return [np.asarray(x)[:, row, :, :count] for x in read(pool)]


def keep(pool, row, slots):
    """`row` keeps the same slots in every layer and head."""
    padded = np.full((L, 1, K, pool.max_slots), EMPTY, np.int32)
    padded[..., : len(slots)] = slots
    return take_slots(pool, ints(row), jnp.asarray(padded))


def test_copy_on_write_keeps_the_siblings_tokens():
    pool = forked(filled_pool(5), ints(1, NONE))
    sibling = filled(pool, 0)
    pool = keep(pool, 1, [1, 2, 4])
    for before, after, taken in zip(sibling, filled(pool, 0), filled(pool, 1), strict=True):
        np.testing.assert_array_equal(after, before)
        np.testing.assert_array_equal(taken, before[:, :, [1, 2, 4]])


def test_forked_rows_share_full_pages_and_append_to_pages_of_their_own():
    pool = forked(filled_pool(5), ints(1, 2))
    table = np.asarray(pool.page_table)
    assert (table[:, 1:, :, :2] == table[:, :1, :, :2]).all()
    assert len(set(table[:, :, :, 2].ravel())) == L * B * K
    assert pages.held_pages(pool) == L * K * (2 + 3)
    prompt = filled(pool, 0)
    rng = np.random.default_rng(1)
    key, value = jnp.asarray(rng.standard_normal((2, L, B, 1, K, H)), jnp.float32)
    pool = append_tokens(pool, ints(0, 1, 2), ints(1, 1, 1), key, value)
    for row in range(B):
        new = (key[:, row, 0], value[:, row, 0], np.full((L, K), 5))
        for x, old, last in zip(filled(pool, row), prompt, new, strict=True):
            np.testing.assert_array_equal(x[:, :, :5], old)
            np.testing.assert_array_equal(x[:, :, 5], last)


def test_leading_whole_pages_stay_shared_after_compaction():
    pool = forked(filled_pool(8), ints(1, NONE))
    pool = keep(pool, 1, [0, 1, 2, 3, 5, 6])
    table, refcount = np.asarray(pool.page_table), np.asarray(pool.refcount)
    assert (table[:, 1, :, :2] == table[:, 0, :, :2]).all()
    assert (refcount[table[:, 0, :, :2]] == 2).all()
    assert (refcount[table[:, 0, :, 2:4]] == 1).all()
    assert (table[:, 1, :, 2] != table[:, 0, :, 2]).all()
    assert (table[:, 1, :, 3:] == NULL_PAGE).all()


def test_compaction_of_an_unshared_row_takes_no_page_and_frees_the_tail_at_once():
    pool = filled_pool(10)
    before = np.asarray(pool.page_table)
    pool = keep(pool, 0, [0, 1, 4, 7, 9])
    np.testing.assert_array_equal(pool.page_table[:, 0, :, :3], before[:, 0, :, :3])
    assert pages.held_pages(pool) == L * K * 3


def test_heads_that_keep_fewer_slots_hold_fewer_pages():
    pool = filled_pool(8)
    slots = np.full((L, 1, K, pool.max_slots), EMPTY, np.int32)
    for (layer, head), count in zip(CELLS, [0, 1, 4, 7], strict=True):
        slots[layer, 0, head, :count] = np.arange(8 - count, 8)
    pool = take_slots(pool, ints(0), jnp.asarray(slots))
    assert pool.length[:, 0].tolist() == [[0, 1], [4, 7]]
    assert pages.held_pages(pool) == 0 + 1 + 2 + 4


def test_an_aliased_page_reads_as_a_log_weight_of_ln_2():
    pool = forked(filled_pool(7), ints(1, NONE))
    pool = alias(pool, ints(0), ints(1), ints(0))  # row 0: pages A A C D
    pool = keep(pool, 1, [0, 1, 4, 5, 6])  # row 1: pages A C D, where A stands for two
    log_weight = pool.slot_data["log_weight"].at[:, 1, :, :2].set(math.log(2))
    entries, weight = np.full((2, 6), EMPTY, np.int32), np.zeros((2, 6), np.float32)
    entries[0, :3], weight[0, 0] = [0, 2, 3], math.log(2)
    pool = take_pages(forked(pool, ints(2, NONE)), ints(2, NONE), jnp.asarray(entries), jnp.asarray(weight))
    np.testing.assert_array_equal(pool.slot_data["log_weight"][:, 2], log_weight[:, 1])
    query = jnp.asarray(np.random.default_rng(2).standard_normal((K, 3, H)), jnp.float32)
    for layer in range(L):
        args = [(pool.page_table[layer, row], pool.length[layer, row], log_weight[layer, row]) for row in (0, 1)]
        args += [(pool.page_table[layer, 2], pool.length[layer, 2], pool.slot_data["log_weight"][layer, 2])]
        aliased, *others = (kernels.paged_attention(query, pool.kv, *x, implementation="reference") for x in args)
        for weighted in others:
            for x, y in zip(aliased[:2], weighted[:2], strict=True):
                np.testing.assert_allclose(x, y, atol=1e-6, rtol=0)


def test_an_aliased_page_is_freed_with_its_last_holder():
    pool = alias(filled_pool(6), ints(0), ints(2), ints(0))
    assert pages.held_pages(pool) == L * K * 2
    pool = keep(pool, 0, [2, 3, 4, 5])  # drops the first holder of the shared page
    assert pages.held_pages(pool) == L * K * 2
    assert pages.held_pages(release(pool, ints(0, NONE))) == 0


def test_a_page_dropped_by_several_entries_at_once_is_freed_once():
    pool = pages.create(num_layers=L, num_rows=B, num_kv_heads=K, head_size=H, num_pages=8, max_pages=2, page_size=2)
    pool = pool.replace(
        refcount=jnp.array([0, 2, 3, 1, 1, 0, 0, 0, 0]), free_stack=jnp.array([8, 7, 6, 5, 0, 0, 0, 0, 0]), free_top=4
    )
    page, is_dropped = jnp.array([[1, 2, 4], [1, 2, 3]]), jnp.array([[True, True, False], [True, True, True]])
    pool = jax.jit(pages.drop_references)(pool, page, is_dropped)
    np.testing.assert_array_equal(pool.refcount, [0, 0, 1, 0, 1, 0, 0, 0, 0])
    assert pool.free_top == 6
    assert sorted(pool.free_stack[:6].tolist()) == [1, 3, 5, 6, 7, 8]


@pytest.mark.parametrize("change", ["allocate", "drop_references"])
def test_what_is_computed_for_pages_does_not_grow_with_the_pool(change):
    """Only scatters, which are in place, return an array of all pages."""
    pool = pages.create(num_layers=L, num_rows=B, num_kv_heads=K, head_size=H, num_pages=996, max_pages=2, page_size=2)
    operands = {"allocate": (), "drop_references": (pool.page_table,)}[change]
    program = jax.make_jaxpr(getattr(pages, change))(pool, *operands, pool.page_table > 0)
    made = {str(step.primitive) for step in program.eqns for x in step.outvars if 997 in x.aval.shape}
    assert made <= {"scatter", "scatter-add", "scatter-min"}


def test_an_exhausted_pool_turns_free_top_negative_and_gives_no_page_twice():
    pool = filled_pool(4, num_pages=L * K * 2 + 3)
    before = filled(pool, 0)
    assert pool.free_top == 3
    key, value = jnp.ones((2, L, B, 1, K, H))
    pool = append_tokens(pool, ints(0, 1, 2), ints(0, 1, 1), key, value)
    assert pool.free_top == 3 - L * 2 * K
    given = np.asarray(pool.page_table)[np.asarray(pool.page_table) != NULL_PAGE]
    assert len(set(given.tolist())) == len(given) == L * K * 2 + 3
    assert pool.refcount.tolist() == [0] + [1] * len(given)
    for x, y in zip(filled(pool, 0), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_pool_of_bfloat16_holds_what_it_is_given_rounded():
    exact, rounded = filled_pool(5), filled_pool(5, dtype=jnp.bfloat16)
    for x, y in zip(filled(rounded, 0)[:2], filled(exact, 0)[:2], strict=True):
        np.testing.assert_array_equal(x, y.astype(jnp.bfloat16))
