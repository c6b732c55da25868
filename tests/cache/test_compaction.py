"""Compaction of a row whose pages are distinct, against the path for rows that hold a page twice.

The latter is held against plain lists by the machine of `test_pool`, whose pools have log-weights and may alias pages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache import compaction
from jkv.cache import pool as pages
from jkv.cache.pool import EMPTY, LOG_WEIGHT, NULL_PAGE

L, B, K, H, PAGE, MP = 2, 3, 2, 2, 2, 6
take_slots = jax.jit(compaction.take_slots)


def forked_pool(num_tokens, num_pages, slot_data, vacant=False):
    """Row 0 holds random tokens, and row 1 shares its full pages."""
    pool = pages.create(
        num_layers=L,
        num_rows=B,
        num_kv_heads=K,
        head_size=H,
        num_pages=num_pages,
        max_pages=MP,
        page_size=PAGE,
        slot_data=slot_data,
        has_vacant_slots=vacant,
        poison=True,
    )
    row, num_new = jnp.zeros(1, jnp.int32), jnp.full(1, num_tokens, jnp.int32)
    pool, address = pages.reserve(pool, row, num_new, num_tokens)
    key, value = jnp.asarray(np.random.default_rng(0).standard_normal((2, L, 1, num_tokens, K, H)), jnp.float32)
    for layer in range(L):
        pool = pages.append(pool, address[layer], key[layer], value[layer])
    pool = pages.advance(pool, row, num_new)
    return pages.fork(pool, pages.block_table_of(pool, jnp.int32(0)), jnp.asarray([1, B], jnp.int32))


def random_slots(num_tokens, seed):
    """Each layer and head keeps slots of its own, and whole pages at the start."""
    rng = np.random.default_rng(seed)
    slots = np.full((L, 1, K, MP * PAGE), EMPTY, np.int32)
    for layer, head in np.ndindex(L, K):
        is_kept = (rng.random(num_tokens) < rng.random()) | (np.arange(num_tokens) < rng.integers(0, num_tokens))
        kept = np.flatnonzero(is_kept)
        slots[layer, 0, head, : len(kept)] = kept
    return jnp.asarray(slots)


@pytest.mark.parametrize("num_pages", [L * B * K * MP, 28], ids=["enough pages", "pages run out"])
@pytest.mark.parametrize("seed", range(20))
def test_pages_are_taken_and_freed_in_the_same_order(seed, num_pages):
    """Shared pages are copied, the others freed. Where no page is left for a copy, both take the null page."""
    num_tokens, row = 11, jnp.asarray([seed % 2], jnp.int32)
    slots = random_slots(num_tokens, seed)
    plain, weighted = (
        take_slots(forked_pool(num_tokens, num_pages, slot_data), row, slots) for slot_data in ((), (LOG_WEIGHT,))
    )
    for name in ("page_table", "length", "refcount", "free_top", "position", "kv"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(weighted, name), err_msg=name)
    top = max(0, int(plain.free_top))
    np.testing.assert_array_equal(plain.free_stack[:top], weighted.free_stack[:top])
    is_used = np.arange(MP) < -(-np.asarray(plain.length) // PAGE)[..., None]
    assert (np.asarray(plain.page_table)[is_used] == NULL_PAGE).any() == (num_pages == 28)


def test_all_pages_of_a_row_are_freed():
    pool = forked_pool(11, L * B * K * MP, ())
    held = int(pages.held_pages(pool))
    for row, left in ((1, held - L * K), (0, 0)):
        pool = take_slots(pool, jnp.asarray([row], jnp.int32), jnp.full((L, 1, K, 1), EMPTY, jnp.int32))
        assert pages.held_pages(pool) == left
    assert (pool.length == 0).all()


def test_only_the_row_changes():
    pool = forked_pool(11, L * B * K * MP, (), vacant=True)
    done = take_slots(pool, jnp.asarray([1], jnp.int32), random_slots(11, 3))
    for name in ("page_table", "length", "vacant_slot"):
        np.testing.assert_array_equal(getattr(done, name)[:, [0, 2]], getattr(pool, name)[:, [0, 2]])


def test_what_is_computed_for_pages_does_not_grow_with_the_pool():
    """Only what is in place returns an array of all pages."""
    pool = forked_pool(11, 996, ()).replace(poison=False)
    program = jax.make_jaxpr(compaction.take_slots)(pool, jnp.zeros(1, jnp.int32), random_slots(11, 0))
    made = {str(step.primitive) for step in program.eqns for x in step.outvars if 997 in x.aval.shape}
    assert made <= {"scatter", "scatter-add", "optimization_barrier", "platform_index", "cond", "pjit", "jit"}
