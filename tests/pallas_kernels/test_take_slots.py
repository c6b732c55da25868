"""`take_slots` against plain loops: it moves bits, so everything is equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels as kernels
from pallas_kernels.take_slots import gpu, tpu
from tests.pallas_kernels import tpu_interpreter

EMPTY = -1
RUNS = {
    "reference": jax.jit(functools.partial(kernels.take_slots, implementation="reference")),
    "tpu": functools.partial(tpu.take_slots, interpret=True),
    "gpu": functools.partial(gpu.take_slots, interpret=True),
}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
#        rows, pages of a row, page, head size
SIZES = {
    "pages_of_1": (2, 5, 1, 6),
    "pages_of_3": (3, 3, 3, 4),
    "pages_of_4": (5, 2, 4, 64),
    "pages_of_16": (19, 5, 16, 128),
    "pages_of_64": (3, 6, 64, 128),
    "pages_of_128": (2, 3, 128, 128),
    "one_row_and_page": (1, 1, 16, 128),
    "heads_of_256": (2, 3, 16, 256),
}


# On a TPU the program takes long to compile: sizes whose code path is that of another one are slow.
ON_A_TPU = {("pages_of_16", "float32"), ("pages_of_128", "bfloat16")}
MOVES = [
    pytest.param(run, size, getattr(jnp, dtype), id=f"{run}-{name}-{dtype}", marks=[pytest.mark.slow] * is_slow)
    for run in RUNS
    for name, size in SIZES.items()
    for dtype in ("float32", "bfloat16")
    for is_slow in [run == "tpu" and (name, dtype) not in ON_A_TPU]
]


@pytest.fixture(params=RUNS)
def take_slots(request):
    """The kernel as each implementation; skips arguments that it refuses."""

    def run(kv, slots, source, target):
        args = jnp.asarray(kv), *(jnp.asarray(x, jnp.int32) for x in (slots, source, target))
        if request.param == "tpu" and (reason := tpu.why_not(*args)):
            pytest.skip(reason)
        return RUNS[request.param](*args)

    return run


def by_hand(kv, slots, source, target):
    """One slot at a time, from a copy of the pool as it was; NaN wherever anything may be."""
    old, new = np.asarray(kv, np.float64), np.array(kv, np.float64)
    page_size = old.shape[2]
    new[0] = np.nan
    for row, s in np.ndindex(slots.shape):
        end, taken = target[row, s // page_size], slots[row, s]
        if end != 0:
            begin = source[row, taken // page_size]
            new[end, :, s % page_size] = np.nan if taken < 0 else old[begin, :, taken % page_size]
    return new


def assert_agrees(take_slots, kv, slots, source, target):
    """Looks at all that is not NaN in `by_hand`."""
    slots, source, target = (np.asarray(x) for x in (slots, source, target))
    out, expected = take_slots(kv, slots, source, target), by_hand(kv, slots, source, target)
    assert out.dtype == kv.dtype
    got = np.where(np.isnan(expected), np.nan, np.asarray(out, np.float64))
    np.testing.assert_array_equal(got, expected)


def random_case(rows, max_pages, page_size, head_size, dtype, *, in_order=True, seed=0):
    """Rows of different lengths that keep some slots, as the pool calls for them; NaN in whatever none of them holds.

    Some leading pages stay, some rows share pages (which they copy), the first one keeps nothing, the last one all of it.
    """
    rng = np.random.default_rng(seed)
    num_slots, total = max_pages * page_size, 3 * rows * max_pages + 1
    free = list(rng.permutation(np.arange(1, total)))
    kv = np.full((total, 2, page_size, head_size), np.nan)
    slots = np.full((rows, num_slots), EMPTY, np.int32)
    source, target = np.zeros((2, rows, max_pages), np.int32)
    for row in range(rows):
        length = int(rng.integers(1, num_slots + 1)) if row else num_slots
        is_shared = row > 1 and rng.random(max_pages) < 0.3
        for s in range(length):
            page, offset = s // page_size, s % page_size
            if offset == 0:
                shares = row > 1 and is_shared[page] and source[0, page] and length >= s + page_size
                source[row, page] = source[0, page] if shares else free.pop()
            if source[row, page] not in source[:row]:
                kv[source[row, page], :, offset] = rng.standard_normal((2, head_size))
        kept = np.flatnonzero(rng.random(length) < 0.7)
        if row == 0:
            kept = kept[:0]
        elif row == rows - 1:
            kept = np.arange(length)
        elif row % 2:  # leading pages stay
            kept = np.union1d(kept, np.arange(length // 2))
        kept = kept if in_order else rng.permutation(kept)
        slots[row, : len(kept)] = kept
        for page in range(-(-len(kept) // page_size)):
            own = slots[row, page * page_size : (page + 1) * page_size]
            if (own != np.arange(len(own)) + page * page_size).any():
                is_held_by_others = (np.delete(source, row, axis=0) == source[row, page]).any()
                target[row, page] = free.pop() if is_held_by_others else source[row, page]
    return jnp.asarray(kv, dtype), slots, source, target


@pytest.mark.everyday(where=lambda in_order, dtype: in_order == (dtype == jnp.bfloat16))
@pytest.mark.parametrize("in_order", [True, False], ids=["in_order", "in_any_order"])
@pytest.mark.parametrize(("take_slots", "size", "dtype"), MOVES, indirect=["take_slots"])
def test_moves_keys_and_values_and_leaves_every_other_slot_alone(take_slots, size, in_order, dtype):
    assert_agrees(take_slots, *random_case(*size, dtype, in_order=in_order))


@DTYPES
def test_all_reads_of_a_row_happen_before_any_write(take_slots, dtype):
    """Every slot of a row changes places with another one: a page's slots go to all the others."""
    kv = jnp.asarray(np.random.default_rng(0).standard_normal((41, 2, 16, 128)), dtype)
    source = np.arange(1, 41).reshape(2, 20)
    slots = np.stack([np.arange(320)[::-1], np.arange(320).reshape(20, 16).T.ravel()])
    assert_agrees(take_slots, kv, slots, source, source)


def test_a_slot_may_be_taken_more_than_once(take_slots):
    kv = random_case(1, 3, 16, 128, jnp.bfloat16)[0]
    slots = np.full((1, 48), 17)
    slots[0, :3] = 40
    assert_agrees(take_slots, jnp.where(jnp.isnan(kv), 2.0, kv), slots, [[1, 2, 3]], [[3, 0, 5]])


@pytest.mark.parametrize("bits", [0x0001, 0x8000, 0x7F80, 0xFFC0], ids=["denormal", "minus_zero", "infinity", "nan"])
def test_every_bit_moves_and_stays_with_its_slot(take_slots, bits):
    """What a slot holds reaches no other one."""
    kv = np.asarray(random_case(1, 3, 16, 128, jnp.bfloat16)[0]).copy()
    kv[np.isnan(kv)] = 1
    kv[2, :, 3] = np.uint16(bits).view(jnp.bfloat16)
    slots = np.full((1, 48), EMPTY)
    slots[0, :5] = [0, 2, 18, 19, 20]
    out = np.asarray(take_slots(kv, slots, [[1, 2, 3]], [[1, 0, 0]])).view(np.uint16)
    np.testing.assert_array_equal(out[1, :, :5], kv.view(np.uint16)[[1, 1, 2, 2, 2], :, [0, 2, 2, 3, 4]].swapaxes(0, 1))


def test_nothing_is_read_or_written_where_nothing_moves(take_slots):
    kv = random_case(4, 3, 16, 128, jnp.float32)[0]
    nothing = np.zeros((4, 3), np.int32)
    out = take_slots(kv, np.tile(np.arange(48), (4, 1)), np.arange(1, 13).reshape(4, 3), nothing)
    np.testing.assert_array_equal(out[1:], kv[1:])


def test_the_null_page_as_a_target_writes_nothing_even_when_it_is_nan(take_slots):
    kv, slots, source, target = random_case(4, 3, 16, 128, jnp.float32)
    assert_agrees(take_slots, kv.at[0].set(jnp.nan), slots, source, np.where(np.arange(3) == 1, 0, target))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((10, 2, 16, 128), id="two_cores_of_rows", marks=pytest.mark.slow),
        pytest.param((4, 3, 16, 128), id="more_than_is_staged"),
    ],
)
def test_on_a_tpu_no_copy_races_with_another(monkeypatch, size):
    monkeypatch.setattr(tpu, "BLOCK", 16)
    monkeypatch.setattr(tpu, "STAGED", 32)
    case = random_case(*size, jnp.bfloat16, in_order=False)
    assert size[0] > tpu.ROWS or np.count_nonzero(case[3]) > tpu.STAGED // size[2]
    run = jax.jit(functools.partial(tpu.take_slots.__wrapped__, interpret=tpu_interpreter.strict()))
    assert not tpu_interpreter.has_race(lambda: assert_agrees(run, *case))


def test_a_planted_race_is_found(monkeypatch):
    monkeypatch.setattr(pltpu, "make_async_copy", tpu_interpreter.NeverWaits)
    case = [jnp.asarray(x) for x in random_case(2, 1, 16, 128, jnp.bfloat16, in_order=False)]
    assert tpu_interpreter.has_race(lambda: tpu.take_slots.__wrapped__(*case, interpret=tpu_interpreter.strict("eager")))


@pytest.mark.parametrize(
    ("pool", "max_pages", "reason"),
    [
        ((9, 2, 16, 128, jnp.float16), 2, "must be float32 or bfloat16; got float16"),
        ((9, 2, 16, 64, jnp.bfloat16), 2, "multiple of 128, at most 1024; got 64"),
        ((9, 2, 16, 1152, jnp.bfloat16), 2, "multiple of 128, at most 1024; got 1152"),
        ((9, 2, 1024, 512, jnp.bfloat16), 2, "a page must have at most 1048576 bytes; got 2097152"),
        ((9, 2, 24, 128, jnp.bfloat16), 2, "multiple of 16 slots; got 24"),
        ((9, 2, 2048, 128, jnp.bfloat16), 2, "at most 1024 slots; got 2048"),
        ((9, 2, 16, 128, jnp.float32), 513, "at most 8388608 bytes; got 8404992"),
        ((9, 2, 16, 128, jnp.bfloat16), 1025, "at most 8388608 bytes; got 8396800"),
    ],
    ids=["dtype", "head_size", "large_head_size", "heavy_page", "odd_page", "large_page", "float32_row", "bfloat16_row"],
)
def test_a_tpu_refuses_what_it_cannot_take_and_says_why(pool, max_pages, reason):
    kv = jax.ShapeDtypeStruct(pool[:4], pool[4])
    pages = jax.ShapeDtypeStruct((3, max_pages), jnp.int32)
    slots = jax.ShapeDtypeStruct((3, max_pages * kv.shape[2]), jnp.int32)
    assert reason in tpu.why_not(kv, slots, pages, pages)


def test_a_gpu_refuses_rows_that_do_not_fit_in_a_program():
    kv, pages = jax.ShapeDtypeStruct((9, 2, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((3, 513), jnp.int32)
    assert "at most 8192 slots; got 8208" in gpu.why_not(kv, jax.ShapeDtypeStruct((3, 8208), jnp.int32), pages, pages)
    assert gpu.why_not(kv, jax.ShapeDtypeStruct((3, 8192), jnp.int32), pages, pages) is None
    half = jax.ShapeDtypeStruct(kv.shape, jnp.float16)
    assert "float16" in gpu.why_not(half, jax.ShapeDtypeStruct((3, 16), jnp.int32), pages, pages)


def test_on_a_gpu_the_threads_of_a_program_meet_between_reads_and_writes():
    """What no interpreter can show, since threads follow each other there."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_case(2, 5, 64, 128, jnp.bfloat16)]
    (outer,) = jax.make_jaxpr(gpu.take_slots)(*shapes).eqns
    (body,) = [eqn.params["jaxpr"] for eqn in outer.params["jaxpr"].eqns if eqn.primitive.name == "pallas_call"]
    wanted = {"masked_load": "L", "masked_swap": "S", "debug_barrier_p": "|", "debug_barrier": "|"}  # the latter in jax 0.12
    done = "".join(wanted.get(eqn.primitive.name, "") for eqn in body.eqns)
    assert done == "LLLL|LSLS"  # each of two tiles: its addresses, then its slots
