"""Which slots stay, and in which order, against a stable sort in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.pool import EMPTY
from jkv.eviction.evict import Evict, largest

SPECIAL = np.array([-np.inf, -3.0, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1.0 + 2**-15, 3e38, np.inf], np.float32)


def scores(rng, *shape):
    """Scores with many ties, of every sign and size."""
    return rng.choice(SPECIAL, shape)


def best(score, count):
    """The slots of the `count` highest scores, the lower slot first among equals; never one of -inf."""
    order = np.argsort(-score, kind="stable")[:count]
    return [int(slot) for slot in order if score[slot] > -np.inf]


@pytest.mark.parametrize("run", [largest, jax.jit(largest)], ids=["eager", "jit"])
def test_largest_is_what_a_stable_sort_puts_first(run):
    rng = np.random.default_rng(0)
    score = np.where(rng.random((40, 3, 23)) < 0.5, scores(rng, 40, 3, 23), rng.standard_normal((40, 3, 23)).astype(np.float32))
    count = rng.integers(0, 26, (40, 3)).astype(np.int32)
    is_largest = np.asarray(run(jnp.asarray(score), jnp.asarray(count)))
    for at in np.ndindex(count.shape):
        assert np.flatnonzero(is_largest[at]).tolist() == sorted(best(score[at], count[at]))


def test_a_score_that_is_no_number_is_never_kept():
    score = jnp.asarray([[jnp.nan, 1.0, -jnp.nan, 2.0, -jnp.inf]])
    np.testing.assert_array_equal(largest(score, jnp.asarray([3])), [[False, True, False, True, False]])


@pytest.mark.parametrize("order", ["position", "score"])
def test_kept_slots_are_stored_by_slot_or_best_first_with_the_protected_last(order):
    rng = np.random.default_rng(1)
    score, budget = scores(rng, 2, 3, 2, 17), rng.integers(1, 18, (2, 3, 1)).astype(np.int32)
    evict = Evict(jkv.eviction.scores.Recency(), order=order)
    slots = np.asarray(evict.choose(jnp.asarray(score), jnp.asarray(budget)))
    for at in np.ndindex(2, 3, 2):
        kept = best(score[at], budget[at[0], at[1], 0])
        if order == "position":
            expected = sorted(kept)
        else:
            protected = [slot for slot in kept if score[at][slot] == np.inf]
            expected = [slot for slot in kept if slot not in protected] + protected
        np.testing.assert_array_equal(slots[at], expected + [EMPTY] * (17 - len(expected)))


def test_competing_heads_keep_their_floor_and_then_the_best_of_all():
    rng = np.random.default_rng(2)
    score, budget = scores(rng, 1, 5, 4, 16), np.full((1, 5, 1), 6, np.int32)
    score[score == np.inf] = 2.0  # what is protected fits by the rules of policies, not here
    evict = Evict(jkv.eviction.scores.Recency(), scope="compete", floor=0.5, safeguard="floor")
    slots = np.asarray(evict.choose(jnp.asarray(score), jnp.asarray(budget)))
    for row in range(5):
        sure = {(head, slot) for head in range(4) for slot in best(score[0, row, head], 3)}
        flat = np.where([[(head, slot) in sure for slot in range(16)] for head in range(4)], np.inf, score[0, row])
        kept = {divmod(slot, 16) for slot in best(flat.reshape(-1), 24)}
        got = {(head, int(slot)) for head in range(4) for slot in slots[0, row, head] if slot != EMPTY}
        assert got == kept
        assert sure <= kept
