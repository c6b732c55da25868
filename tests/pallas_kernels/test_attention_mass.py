"""`attention_mass` against plain loops in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels

attention_mass = jax.jit(functools.partial(kernels.attention_mass, implementation="reference"), static_argnames="over_group")
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
OVER_GROUP = pytest.mark.parametrize("over_group", ["max", "mean"])
#        rows, group, window, slots, head size
CASES = {"grouped": (4, 3, 5, 21, 8), "one_query_head": (3, 1, 4, 10, 16), "one_slot_and_one_query": (2, 2, 1, 1, 4)}


def random_case(rows, group, window, slots, head_size, dtype, seed=0):
    """Some slots are no candidates and some queries do not exist: both are NaN."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((rows, group, window, head_size)), rng.standard_normal((rows, slots, head_size))
    is_candidate, is_query = rng.random((rows, slots)) < 0.7, rng.random((rows, window)) < 0.7
    is_candidate[:, -1] = is_query[:, -1] = True
    key[~is_candidate] = np.nan
    query[np.broadcast_to(~is_query[:, None], query.shape[:3])] = np.nan
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(is_candidate), jnp.asarray(is_query)


def by_hand(query, key, is_candidate, is_query, over_group):
    """One row and one remembered query at a time."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    rows, group, _, head_size = query.shape
    mass = np.zeros(key.shape[:2])
    for row in range(rows):
        slots = np.flatnonzero(is_candidate[row])
        when = np.flatnonzero(is_query[row])
        for w in when if len(slots) else []:
            logits = np.array([[query[row, g, w] @ key[row, s] for s in slots] for g in range(group)]) / math.sqrt(head_size)
            if over_group == "max":
                logits = logits.max(axis=0, keepdims=True)
            weight = np.exp(logits)
            mass[row, slots] += (weight / weight.sum(axis=-1, keepdims=True)).mean(axis=0) / len(when)
    return mass


def assert_agrees(args, over_group):
    mass = attention_mass(*args, over_group=over_group)
    assert mass.dtype == jnp.float32
    # Whatever the inputs' type, the logits are float32: the oracle on the rounded inputs is met as closely.
    np.testing.assert_allclose(mass, by_hand(*args, over_group), atol=2e-6, rtol=2e-5)


@DTYPES
@OVER_GROUP
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_averages_the_softmax_over_the_queries_that_exist(case, over_group, dtype):
    assert_agrees(random_case(*case, dtype), over_group)


@OVER_GROUP
def test_a_row_without_queries_or_without_candidates_gives_zeros(over_group):
    query, key, is_candidate, is_query = random_case(3, 2, 4, 9, 8, jnp.float32)
    is_query, is_candidate = is_query.at[1].set(False), is_candidate.at[2].set(False)
    query, key = query.at[1].set(jnp.nan), key.at[2].set(jnp.nan)
    assert_agrees((query, key, is_candidate, is_query), over_group)
    mass = attention_mass(query, key, is_candidate, is_query, over_group=over_group)
    assert mass.sum(axis=-1) == pytest.approx([1, 0, 0], abs=1e-6)


def test_the_largest_logit_of_the_group_is_the_default():
    args = random_case(*CASES["grouped"], jnp.float32)
    np.testing.assert_array_equal(attention_mass(*args), attention_mass(*args, over_group="max"))


def test_large_logits_do_not_overflow():
    query, key, *masks = random_case(*CASES["grouped"], jnp.float32)
    args = (query * 60, key, *masks)
    np.testing.assert_allclose(attention_mass(*args), by_hand(*args, "max"), atol=1e-4, rtol=0)  # 60 times the rounding
