"""`attention_mass` against plain loops in float64."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.attention_mass import gpu, reference, tpu
from tests.pallas_kernels import tpu_interpreter

RUNS = {
    "reference": jax.jit(reference.attention_mass, static_argnames="over_group"),
    "tpu": functools.partial(tpu.attention_mass, interpret=True),
    "gpu": functools.partial(gpu.attention_mass, interpret=True),
}


@pytest.fixture(params=RUNS)
def attention_mass(request):
    def run(query, key, is_candidate, is_query, age=None, log_weight=None, sink=None, over_group="max"):
        return RUNS[request.param](query, key, is_candidate, is_query, age, log_weight, sink, over_group=over_group)

    return run


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


def with_age_and_weight(args, seed=1):
    """Slots in any order of age, some newer than the oldest queries; keys of vacant slots, and other slots' weights, NaN."""
    rng = np.random.default_rng(seed)
    query, key, is_candidate, is_query = args
    age = np.stack([rng.permutation(key.shape[1]) for _ in range(key.shape[0])])
    log_weight = np.log(rng.integers(1, 6, size=age.shape))
    log_weight[:, ::5] = -np.inf
    key = jnp.where((log_weight == -np.inf)[..., None], jnp.nan, key).astype(key.dtype)
    log_weight = np.where(is_candidate, log_weight, np.nan)
    return query, key, is_candidate, is_query, jnp.asarray(age, jnp.int32), jnp.asarray(log_weight, jnp.float32)


def by_hand(query, key, is_candidate, is_query, age, log_weight, over_group, sink=None):
    """One row and one remembered query at a time."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    rows, group, window, head_size = query.shape
    weight_of = np.zeros(key.shape[:2]) if log_weight is None else np.asarray(log_weight, np.float64)
    mass = np.zeros(key.shape[:2])
    for row in range(rows):
        when = np.flatnonzero(is_query[row])
        for w in when:
            is_seen = np.asarray(is_candidate[row]) & (weight_of[row] > -np.inf)
            slots = np.flatnonzero(is_seen if age is None else is_seen & (np.asarray(age[row]) >= window - 1 - w))
            if not len(slots):
                continue
            logits = np.array([[query[row, g, w] @ key[row, s] for s in slots] for g in range(group)]) / math.sqrt(head_size)
            logits += weight_of[row, slots]
            of_sink = np.full((group, 1), -np.inf) if sink is None else np.asarray(sink, np.float64)[row][:, None]
            if over_group == "max":
                logits, of_sink = logits.max(axis=0, keepdims=True), of_sink.max(axis=0, keepdims=True)
            weight = np.exp(logits)
            mass[row, slots] += (weight / (weight.sum(axis=-1, keepdims=True) + np.exp(of_sink))).mean(axis=0) / len(when)
    return mass


def assert_agrees(run, args, over_group):
    args = (*args, None, None) if len(args) == 4 else args
    mass = run(*args, over_group=over_group)
    assert mass.dtype == jnp.float32
    # Whatever the inputs' type, the logits are float32: the oracle on the rounded inputs is met as closely.
    np.testing.assert_allclose(mass, by_hand(*args, over_group), atol=2e-6, rtol=2e-5)


@pytest.mark.everyday(where=lambda over_group, dtype: (over_group == "max") == (dtype == jnp.bfloat16))
@DTYPES
@OVER_GROUP
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_averages_the_softmax_over_the_queries_that_exist(case, over_group, dtype):
    assert_agrees(RUNS["reference"], random_case(*case, dtype), over_group)


@pytest.mark.parametrize(
    ("case", "dtype", "over_group", "has_age_and_weight"),
    [
        ((3, 1, 5, 21, 64), jnp.bfloat16, "max", True),
        ((2, 2, 8, 33, 64), jnp.float32, "max", True),
        pytest.param((2, 4, 1, 1, 128), jnp.bfloat16, "mean", False, marks=pytest.mark.slow),
        ((2, 5, 8, 33, 128), jnp.float32, "mean", True),
        pytest.param((2, 6, 8, 33, 128), jnp.bfloat16, "max", False, marks=pytest.mark.slow),
        ((5, 7, 4, 40, 128), jnp.bfloat16, "mean", False),
        ((2, 8, 8, 130, 64), jnp.bfloat16, "max", True),
        ((2, 2, 8, 130, 256), jnp.bfloat16, "max", True),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_age_hides_what_came_later_and_log_weights_are_added_and_minus_infinity_is_a_vacant_slot(
    attention_mass, case, dtype, over_group, has_age_and_weight
):
    args = random_case(*case, dtype)
    assert_agrees(attention_mass, with_age_and_weight(args) if has_age_and_weight else args, over_group)


def sinks_of(query, seed=2):
    """A sink of each query head: from far below the logits to far above them."""
    return jnp.asarray(np.random.default_rng(seed).uniform(-4, 6, query.shape[:2]), jnp.float32)


@OVER_GROUP
@pytest.mark.parametrize("has_age_and_weight", [False, True], ids=["plain", "aged"])
def test_a_sink_is_one_more_candidate_that_gets_no_mass(attention_mass, has_age_and_weight, over_group):
    args = random_case(3, 3, 5, 21, 64, jnp.float32)
    args = with_age_and_weight(args) if has_age_and_weight else (*args, None, None)
    sink = sinks_of(args[0])
    mass = attention_mass(*args, sink, over_group=over_group)
    np.testing.assert_allclose(mass, by_hand(*args, over_group, sink), atol=2e-6, rtol=2e-5)
    assert (mass.sum(axis=1) < 0.999).all()


@OVER_GROUP
@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_rows_and_windows_of_several_blocks(monkeypatch, name, over_group):
    """The last row's candidates end in the first block, so that whole blocks are skipped."""
    module, changed = {"tpu": (tpu, {"LOGITS": 16 * 128, "QUERIES": 16}), "gpu": (gpu, {"SPANS": 2, "MOST_QUERIES": 16})}[name]
    for constant, value in changed.items():
        monkeypatch.setattr(module, constant, value)
    query, key, is_candidate, is_query = random_case(3, 2, 19, 421, 64, jnp.bfloat16)
    is_candidate, key = is_candidate.at[2, 50:].set(False), key.at[2, 50:].set(jnp.nan)
    run = jax.jit(functools.partial(module.attention_mass.__wrapped__, interpret=True), static_argnames="over_group")
    args = with_age_and_weight((query, key, is_candidate, is_query))
    assert_agrees(run, args, over_group)
    sink = sinks_of(query)
    mass = run(*args, sink, over_group=over_group)
    np.testing.assert_allclose(mass, by_hand(*args, over_group, sink), atol=2e-6, rtol=2e-5)


@OVER_GROUP
def test_a_row_without_queries_or_without_candidates_gives_zeros(attention_mass, over_group):
    query, key, is_candidate, is_query = random_case(4, 3, 5, 21, 8, jnp.float32)
    is_query, is_candidate = is_query.at[1].set(False), is_candidate.at[2].set(False)
    query, key = query.at[1].set(jnp.nan), key.at[2].set(jnp.nan)
    assert_agrees(attention_mass, (query, key, is_candidate, is_query), over_group)
    mass = attention_mass(query, key, is_candidate, is_query, over_group=over_group)
    assert mass.sum(axis=-1) == pytest.approx([1, 0, 0, 1], abs=1e-6)


def test_a_row_of_vacant_slots_gives_zeros(attention_mass):
    query, key, *masks = random_case(3, 2, 4, 9, 8, jnp.float32)
    assert_agrees(attention_mass, (query, key.at[1].set(jnp.nan), *masks, None, jnp.zeros((3, 9)).at[1].set(-jnp.inf)), "max")


def test_a_query_that_sees_nothing_counts_as_one_that_gave_nothing(attention_mass):
    query, key, is_candidate, is_query = random_case(3, 2, 4, 9, 8, jnp.float32)
    age = jnp.broadcast_to(jnp.asarray([1, 0] * 4 + [1], jnp.int32), (3, 9))  # the two oldest queries see nothing
    assert_agrees(attention_mass, (query, key, is_candidate, is_query, age, None), "max")


def test_the_largest_logit_of_the_group_is_the_default():
    args = random_case(*CASES["grouped"], jnp.float32)
    np.testing.assert_array_equal(kernels.attention_mass(*args), kernels.attention_mass(*args, over_group="max"))


def test_large_logits_do_not_overflow(attention_mass):
    query, key, *masks = random_case(*CASES["grouped"], jnp.float32)
    args = (query * 60, key, *masks, None, None)
    np.testing.assert_allclose(attention_mass(*args), by_hand(*args, "max"), atol=1e-4, rtol=0)  # 60 times the rounding


def test_a_row_s_bits_depend_on_nothing_but_the_row(attention_mass):
    query, key, is_candidate, is_query = random_case(4, 3, 5, 21, 8, jnp.float32)
    together = attention_mass(query, key, is_candidate, is_query)
    others = query.at[1:].mul(3.0), key.at[1:].mul(-2.0), is_candidate.at[1:, 5:].set(False), is_query
    np.testing.assert_array_equal(together[0], attention_mass(*others)[0])


@pytest.mark.parametrize("over_group", ["max", pytest.param("mean", marks=pytest.mark.slow)])
def test_for_tpu_nothing_races_or_is_read_before_it_is_written(monkeypatch, over_group):
    monkeypatch.setattr(tpu, "LOGITS", 16 * 128)
    args = with_age_and_weight(random_case(2, 2, 8, 256, 64, jnp.float32))
    with tpu_interpreter.watched() as interpret:
        run = functools.partial(tpu.attention_mass.__wrapped__, interpret=interpret)
        assert_agrees(jax.jit(run, static_argnames="over_group"), args, over_group)


def shapes_of(group=2, head_size=64, slots=32, dtype=jnp.float32, key_dtype=None, rows=2):
    query, key = (rows, group, 8, head_size), (rows, slots, head_size)
    args = jax.ShapeDtypeStruct(query, dtype), jax.ShapeDtypeStruct(key, key_dtype or dtype)
    return (*args, jax.ShapeDtypeStruct(key[:2], jnp.bool_), jax.ShapeDtypeStruct((rows, 8), jnp.bool_), None, None)


@pytest.mark.parametrize(
    ("module", "changed", "reason"),
    [
        (tpu, {"dtype": jnp.float16}, "float32 or bfloat16; got float16"),
        (gpu, {"key_dtype": jnp.bfloat16}, "got float32 and bfloat16"),
        (tpu, {"head_size": 96}, "a multiple of 64; got 96"),
        (tpu, {"head_size": 1024}, "at most 512; got 1024"),
        (tpu, {"group": 65}, "at most 64 heads; got 65"),
        (tpu, {"slots": 1 << 19}, "slots; got 524288"),
        (tpu, {"rows": 1 << 17}, "rows; got 131072"),
        (gpu, {"head_size": 96}, "a power of two from 16 to 256; got 96"),
        (gpu, {"head_size": 256}, "at most 128 in float32; got 256"),
        (gpu, {"slots": 1 << 24}, "fewer than 2\\*\\*31 numbers; got 2147483648"),
    ],
)
def test_what_a_kernel_cannot_take_it_says(module, changed, reason):
    assert module.why_not(*shapes_of()) is None
    assert re.search(reason, module.why_not(*shapes_of(**changed)))
