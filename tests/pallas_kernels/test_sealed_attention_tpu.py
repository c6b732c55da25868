"""The TPU's kernel of sealed pages against plain XLA, in Pallas's interpreter; what it cannot take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import sealed
from pallas_kernels.sealed import SEALED
from pallas_kernels.sealed_attention import reference, tpu
from tests.pallas_kernels import tpu_interpreter
from tests.pallas_kernels.test_sealed_attention import case_of

COUNTS = [3, 0, 1, 9, 17, 8, 16, 2, 5]  # two grid steps; a block has ten pages


def assert_like_the_reference(run, args):
    near = {"rtol": 1e-5, "atol": 1e-5} if args[0].dtype == jnp.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for own, expected in zip(run(*args), reference.sealed_attention(*args), strict=True):
        np.testing.assert_allclose(own.astype(jnp.float32), expected.astype(jnp.float32), **near)


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 7])
def test_it_computes_what_plain_xla_does(name, dtype, group):
    """Rows of no page, of a part of a block, of blocks; entries that nobody reads are of pages with NaN."""
    args = case_of(COUNTS, group, 128, 128, 17, name, dtype)
    assert tpu.why_not(*args) is None
    assert_like_the_reference(functools.partial(tpu.sealed_attention, interpret=True), args)


def test_no_copy_races_with_another_and_nothing_is_read_before_it_comes():
    """Memory is NaN before it is written, and a read out of bounds is an error."""
    args = case_of([3, 0, 12, 9, 11, 8, 10, 2, 12], 2, 128, 128, 12)
    with tpu_interpreter.watched() as interpreter:
        assert_like_the_reference(functools.partial(tpu.sealed_attention.__wrapped__, interpret=interpreter), args)


def test_a_planted_race_is_found(monkeypatch):
    monkeypatch.setattr(pltpu, "make_async_copy", tpu_interpreter.NeverWaits)
    args = case_of([3, 2], 2, 128, 128, 3)
    run = functools.partial(tpu.sealed_attention.__wrapped__, *args, interpret=tpu_interpreter.strict("eager"))
    assert tpu_interpreter.has_race(run)


def test_a_row_s_bits_depend_on_nothing_but_the_row():
    query, records, table, count = case_of([3, 9, 5], 3, 128, 128, 12)
    run = jax.jit(functools.partial(tpu.sealed_attention.__wrapped__, interpret=True))
    others = jnp.asarray([3, 2, 5], jnp.int32)
    for together, beside, narrow in zip(
        run(query, records, table, count),
        run(query, records, table, others),
        run(query, records, table[:, :9], others),
        strict=True,
    ):
        np.testing.assert_array_equal(together[::2], beside[::2])
        np.testing.assert_array_equal(together[::2], narrow[::2])


def test_float16s_become_the_same_float32s():
    """All 65,536 of them, those below float32's least normal number included."""
    bits = np.arange(65536, dtype=np.uint16)
    got = np.asarray(jax.jit(tpu.float_of)(jnp.asarray(bits, jnp.int32)))
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("page", "size", "group", "name", "dtype", "why"),
    [
        (128, 64, 2, "kvarn", jnp.bfloat16, "pages must have 128 slots and heads 128 channels; got 128 and 64"),
        (64, 128, 2, "kvarn", jnp.bfloat16, "pages must have 128 slots and heads 128 channels; got 64 and 128"),
        (128, 128, 65, "kvarn", jnp.bfloat16, "at most 64 query heads; got 65"),
        (128, 128, 2, "kvarn", jnp.float16, "must both be of float32 or bfloat16; got float16 and float16"),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(page, size, group, name, dtype, why):
    assert why in tpu.why_not(*case_of([2], group, size, page, 2, name, dtype))


def test_a_table_that_scalar_memory_cannot_hold_is_refused():
    query, records, table, count = case_of([2], 2, 128, 128, 2)
    wide = jnp.broadcast_to(table[:, :1], (1, 8000))
    assert "must take at most 983040 bytes; got 1024032" in tpu.why_not(query, records, wide, count)
    assert sealed.SEALED["kvarn"].page == tpu.LANES
