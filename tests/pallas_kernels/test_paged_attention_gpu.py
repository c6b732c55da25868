"""What only the GPU's decode attention has: pieces, shared by programs, and their combination. In Pallas's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choice
from pallas_kernels.paged_attention import gpu, reference
from pallas_kernels.paged_attention.pieces import PIECE
from tests.pallas_kernels.test_paged_attention import DTYPES, TOLERANCE, by_hand, random_case

LENGTHS = [0, 700, 1, PIECE, 0, 513, PIECE + 1, 64]  # of rows with none to three pieces
EVERYDAY = {(1, 96), (3, 96), (2, 64), (7, 128), (8, 256)}
SIZES = [
    pytest.param(group, head_size, marks=[] if (group, head_size) in EVERYDAY else [pytest.mark.slow])
    for head_size in (64, 96, 128, 256)
    for group in range(1, 9)
]


@functools.partial(jax.jit, static_argnames=("with_logits", "programs"))
def attend(*args, with_logits=False, programs=5):
    weight = args[4] if len(args) > 4 else None
    return gpu.paged_attention(*args[:4], weight, with_logits=with_logits, programs=programs, interpret=True)


def weights_of(lengths, num_slots):
    """Multiplicities 1 to 4 and vacant slots, among them the whole second piece of row 1; anything beyond the length."""
    weight = np.log(np.random.default_rng(2).integers(1, 5, size=(len(lengths), num_slots)))
    weight[:, 3::7] = -np.inf
    weight[1, PIECE : 2 * PIECE] = -np.inf
    weight[np.arange(num_slots) >= np.asarray(lengths)[:, None]] = np.nan
    return jnp.asarray(weight, jnp.float32)


@pytest.mark.everyday(where=lambda group, head_size, dtype: (group + head_size) % 2 == (dtype == jnp.float32))
@pytest.mark.parametrize(("group", "head_size"), SIZES)
@DTYPES
def test_every_group_and_head_size_agrees_with_plain_xla(group, head_size, dtype):
    """Free pages, the rest of last pages and what is beside a head hold NaN or another head's numbers."""
    args = random_case(LENGTHS, group, head_size, 16, 48, dtype)
    for weight in (None, weights_of(LENGTHS, 768)):
        out, log_total, logits = attend(*args, weight, with_logits=True)
        exact = args[0].astype(jnp.float32), args[1].astype(jnp.float32), *args[2:]
        expected_out, expected_total, expected_logits = reference.paged_attention(*exact, weight, with_logits=True)
        np.testing.assert_allclose(logits, expected_logits, atol=2e-5, rtol=0)
        np.testing.assert_allclose(log_total, expected_total, atol=2e-5, rtol=0)
        np.testing.assert_allclose(out.astype(jnp.float32), expected_out, atol=TOLERANCE[dtype], rtol=2.0**-8)
        assert out.dtype == dtype


def test_many_pieces_are_combined_in_several_turns(monkeypatch):
    monkeypatch.setattr(gpu, "COMBINED", 4)
    lengths = [(gpu.COMBINED + 1) * PIECE + 5, gpu.COMBINED * PIECE, 2 * gpu.COMBINED * PIECE]
    query, kv, page_table, length = random_case(lengths, 2, 16, 64, 2 * gpu.COMBINED * PIECE // 64, jnp.float32)
    query = query * 4  # peaks differ between the turns
    expected_out, expected_total, _ = reference.paged_attention(query, kv, page_table, length, None, with_logits=False)
    out, log_total, _ = attend(query, kv, page_table, length)
    np.testing.assert_allclose(out, expected_out, atol=2e-5, rtol=0)
    np.testing.assert_allclose(log_total, expected_total, atol=2e-5, rtol=0)


@pytest.mark.everyday(where=lambda dtype: dtype == jnp.bfloat16)
@DTYPES
def test_a_row_s_bits_depend_on_nothing_but_the_row(dtype):
    """Neither on the programs that share the work, nor on other rows, nor on the width of the table."""
    query, kv, page_table, length = random_case(LENGTHS, 4, 16, 16, 64, dtype)
    expected = attend(query, kv, page_table, length)[:2]
    for programs in (1, 3, 8, None):
        for x, y in zip(expected, attend(query, kv, page_table, length, programs=programs)[:2], strict=True):
            np.testing.assert_array_equal(x, y)
    others = jnp.asarray([1024, 700, 300, PIECE, 1000, 513, 0, 64], jnp.int32)
    kv = jnp.nan_to_num(kv)
    order = jnp.asarray([7, 3, 5, 1])
    for got, rows in (
        (attend(query, kv, page_table, others), (1, 3, 5, 7)),
        (attend(query, kv, page_table[:, :44], length), range(8)),
        (attend(query[order], kv, page_table[order], length[order]), None),
    ):
        for x, y in zip(expected, got[:2], strict=True):
            np.testing.assert_array_equal(
                x[order] if rows is None else x[np.asarray(rows)], y if rows is None else y[np.asarray(rows)]
            )


def test_a_table_of_one_piece_has_no_second_kernel_and_the_same_bits():
    lengths = [PIECE, 0, 17, 200]
    query, kv, page_table, length = random_case(lengths, 3, 32, 16, 17, jnp.float32)
    wide, narrow = (attend(query, kv, table, length, with_logits=True) for table in (page_table, page_table[:, :16]))
    for x, y in zip(wide[:2], narrow[:2], strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(wide[2][..., :PIECE], narrow[2])
    text = str(jax.make_jaxpr(attend)(query, kv, page_table[:, :16], length))
    assert text.count("pallas_call[") == 1
    assert str(jax.make_jaxpr(attend)(query, kv, page_table, length)).count("pallas_call[") == 2


@pytest.mark.parametrize("programs", [1, 6, 40])
def test_logits_beyond_the_length_are_cleared_whoever_has_the_row(programs):
    lengths = [0, 1025, 3, 1500]
    args = random_case(lengths, 2, 16, 16, 130, jnp.float32)
    logits = np.asarray(attend(*args, with_logits=True, programs=programs)[2])
    np.testing.assert_array_equal(
        np.isfinite(logits), np.broadcast_to(np.arange(2080) < np.asarray(lengths)[:, None, None], logits.shape)
    )


def test_lengths_out_of_range_read_no_slot_or_all():
    query, kv, page_table, _ = random_case([320, 320, 320], 2, 16, 16, 20, jnp.float32)
    got = attend(query, kv, page_table, jnp.asarray([-5, 10**6, 320], jnp.int32))
    expected, _, _ = by_hand(query, kv, page_table, np.asarray([0, 320, 320]))
    np.testing.assert_allclose(got[0], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("capability", "shared", "expected"),
    [
        ((9, 0), 71_936, 3),
        ((8, 0), 71_936, 2),
        ((8, 6), 71_936, 1),
        ((8, 9), 83_008, 1),
        ((9, 0), 83_008, 2),
        ((10, 3), 1000, 3),
    ],
    ids=str,
)
def test_as_many_programs_are_launched_as_a_gpu_holds(capability, shared, expected):
    with choice.tracing_for(capability):
        assert choice.num_resident(shared, 3) == expected * 132
