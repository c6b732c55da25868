"""How the programs of a GPU share the slots of all rows: rows are cut at fixed places, and programs take equal shares.

A block is what a program reads at once. A piece is `PIECE` slots of one row, or what is left at its end: the blocks whose
softmax one program computes. Pieces begin at multiples of `PIECE` in every row, and a row's pieces are combined in their order,
so the bits of its result depend on the row alone. The lengths of all rows decide only which program computes a piece.

All rows' blocks in a line are cut into one share per program, of equal sizes to within a block. A program takes the pieces that
begin in its share, so it computes at most `ceil(blocks / programs) + blocks_of_piece - 1` blocks. The functions here need the
lengths alone: the kernel calls them on the device, without a list in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PIECE = 256  # slots. Writing and reading a part costs G / 2 slots of bfloat16: at 8 query heads, 2 % of a piece
TILE = 1024  # most rows whose lengths a program reads at once

BlocksOf = Callable[[Any], Any]  # indices of rows, some beyond the last -> their numbers of blocks, 0 beyond the last


class Span(NamedTuple):
    """The blocks of one row among the blocks of all rows in a line."""

    row: Any
    begin: Any
    end: Any


def tile_of(num_rows: int) -> int:
    """Rows to look at together: a power of two."""
    return min(TILE, max(16, 1 << (num_rows - 1).bit_length()))


def total_blocks(blocks_of: BlocksOf, num_rows: int) -> jax.Array:
    """The number of blocks of all rows."""
    tile = tile_of(num_rows)

    def add(index: Any, total: Any) -> Any:
        return total + jnp.sum(blocks_of(index * tile + jnp.arange(tile, dtype=jnp.int32)), dtype=jnp.int32)

    return lax.fori_loop(0, -(-num_rows // tile), add, jnp.int32(0))


def share(total: Any, program: Any, programs: int) -> tuple[Any, Any]:
    """The first block of a program's share and the first beyond it. The first `total % programs` shares have a block more."""
    least, rest = lax.div(total, jnp.int32(programs)), lax.rem(total, jnp.int32(programs))
    begin = program * least + lax.min(program, rest)
    return begin, begin + least + (program < rest).astype(jnp.int32)


def row_at(blocks_of: BlocksOf, num_rows: int, span: Span, block: Any) -> Span:
    """The row that holds a block; `span` is that row or an earlier one. Beyond all blocks, a row that does not exist.

    It looks at a tile of rows at a time: in a batch of few requests, most rows are empty.
    """
    tile = tile_of(num_rows)
    index_R = jnp.arange(tile, dtype=jnp.int32)

    def is_before(span: Span) -> Any:
        return (span.end <= block) & (span.row < num_rows)

    def skip(span: Span) -> Span:
        row_R = span.row + 1 + index_R
        blocks_R = blocks_of(row_R)
        is_passed_R = (span.end + jnp.cumsum(blocks_R) <= block) & (row_R < num_rows)
        passed = jnp.sum(is_passed_R, dtype=jnp.int32)
        begin = span.end + jnp.sum(jnp.where(is_passed_R, blocks_R, 0), dtype=jnp.int32)
        own = jnp.sum(jnp.where(index_R == passed, blocks_R, 0), dtype=jnp.int32)  # 0 where the whole tile was passed
        return Span(span.row + lax.min(passed + 1, jnp.int32(tile)), begin, begin + own)

    return lax.while_loop(is_before, skip, span)


def walk(
    blocks_of: BlocksOf,
    num_rows: int,
    blocks_of_piece: int,
    program: Any,
    programs: int,
    visit: Callable[[Any, Any, Any], Any],
    carry: Any = None,
) -> Any:
    """Calls `visit(row, piece, carry) -> carry` for each piece of a program, in order; the last carry."""
    block, end = share(total_blocks(blocks_of, num_rows), program, programs)
    span = row_at(blocks_of, num_rows, Span(jnp.int32(-1), jnp.int32(0), jnp.int32(0)), block)
    begun = lax.div(block - span.begin + blocks_of_piece - 1, blocks_of_piece) * blocks_of_piece
    block = lax.min(span.begin + begun, span.end)  # a piece that began in the share before is another program's

    def is_own(state: Any) -> Any:
        return state[1] < end

    def take(state: Any) -> Any:
        span, block, carry = state
        carry = visit(span.row, lax.div(block - span.begin, blocks_of_piece), carry)
        block = lax.min(block + blocks_of_piece, span.end)
        return row_at(blocks_of, num_rows, span, block), block, carry

    return lax.while_loop(is_own, take, (row_at(blocks_of, num_rows, span, block), block, carry))[2]
