"""How programs share the blocks of all rows: each is computed once, and no program has much more than the others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import pieces

ROWS, MOST = 24, 40  # rows, of at most so many blocks


@functools.partial(jax.jit, static_argnames=("programs", "blocks_of_piece", "tile", "most"))
def visits(num_blocks_R, programs, blocks_of_piece, tile, most=MOST):
    """How often each program visits each piece of each row; `tile` is part of the key of what is compiled."""
    num_rows = num_blocks_R.shape[0]

    def blocks_of(row_R):
        return jnp.where(row_R < num_rows, num_blocks_R.at[row_R].get(mode="clip"), 0)

    def visits_of(program):
        start = jnp.zeros((num_rows, -(-most // blocks_of_piece)), jnp.int32)
        visit = lambda row, piece, seen: seen.at[row, piece].add(1, mode="drop")  # noqa: E731
        return pieces.walk(blocks_of, num_rows, blocks_of_piece, program, programs, visit, start)

    return jax.lax.map(visits_of, jnp.arange(programs, dtype=jnp.int32))


def loads_of(num_blocks, programs, blocks_of_piece, most=MOST):
    """The blocks of each program, after a check that every piece is visited once and nothing else is."""
    num_blocks = np.asarray(num_blocks, np.int32)
    seen = np.asarray(visits(num_blocks, programs, blocks_of_piece, pieces.TILE, most))
    first = np.arange(seen.shape[2]) * blocks_of_piece
    size = np.clip(num_blocks[:, None] - first, 0, blocks_of_piece)
    np.testing.assert_array_equal(seen.sum(axis=0), size > 0)
    return (seen * size).sum(axis=(1, 2))


@pytest.fixture(params=[4, 1024], ids=["tiles_of_4_rows", "one_tile"], scope="module")
def tile(request):
    """Rows that are looked at together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "TILE", request.param)
        yield request.param


LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, MOST)), min_size=ROWS, max_size=ROWS)
SHARING = st.sampled_from([(1, 4), (5, 4), (5, 1), (37, 4), (400, 3)])


@settings(max_examples=60, deadline=None)
@given(num_blocks=LENGTHS, sharing=SHARING)
def test_every_piece_is_visited_once_and_loads_differ_by_less_than_a_piece(tile, num_blocks, sharing):
    programs, blocks_of_piece = sharing
    loads = loads_of(num_blocks, programs, blocks_of_piece)
    assert loads.max() <= math.ceil(sum(num_blocks) / programs) + blocks_of_piece - 1


@pytest.mark.parametrize("position", [0, 11, 31], ids=["first", "middle", "last"])
def test_a_long_row_among_short_ones_does_not_keep_one_program_busy(position):
    """One row of 16,384 slots among 31 of 1,024, each of 8 KV heads, on the 396 programs of an H200: blocks of 64 slots."""
    num_blocks = np.full((32, 8), 1024 // 64)
    num_blocks[position] = 16_384 // 64
    loads = loads_of(num_blocks.ravel(), 396, 4, most=256)
    assert loads.max() == 16
    assert loads.max() / loads.mean() < 1.06  # 15.2 on average


def test_rows_beyond_a_tile_and_empty_ones_are_passed_over():
    num_blocks = np.zeros(2500, np.int64)
    num_blocks[[3, 1023, 1024, 2047, 2499]] = [5, 1, 9, 4, 2]
    assert loads_of(num_blocks, 8, 4, most=12).max() <= 3 + 3
    assert loads_of(np.zeros(2500, np.int64), 8, 4, most=12).max() == 0


def test_shares_are_all_blocks_in_a_line():
    for total, programs in ((0, 3), (2, 3), (7, 3), (2**31 - 1, 396)):
        ends = [tuple(map(int, pieces.share(jnp.int32(total), jnp.int32(p), programs))) for p in range(programs)]
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == total
        assert max(end - begin for begin, end in ends) == math.ceil(total / programs)
