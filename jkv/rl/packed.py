"""The packed rows of a batch: what the forward pass of training computes in place of one padded row for each sequence."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jkv.errors import refused
from jkv.model.params import ModelConfig
from jkv.model.sampling import Sampling, rows_of
from jkv.pytrees import PyTree, static
from jkv.replay.columns import Columns, trace_columns
from jkv.replay.packing import first_places, offsets_of, packed_trace, place_sequences
from jkv.replay.score import round_up
from jkv.replay.trace import Trace
from pallas_kernels.sealed import SealedFormat


class Packing(PyTree):
    """How the N sequences of a batch lie in B packed rows of P tokens."""

    token: Any  # [B, P] int32
    columns: Columns  # of the packed rows; full caches have the same columns everywhere, so layers and heads have length 1
    settings: Any  # `jkv.model.sampling.SamplingRows`, each [B]
    place: Any  # [N, T] int32: where each token of a sequence lies, counted through all packed rows
    is_replayed: bool = static()  # whether the columns are a compressed cache's
    num_sequences: int = static()  # N, of the whole batch

    def packed(self, values: Array, mask: Array) -> Array:
        """What belongs to tokens, `[N, T, ...]`, at their places in packed rows, `[B, P, ...]`; zeros where none lies."""
        empty = jnp.zeros((self.token.size, *values.shape[2:]), values.dtype)
        place = jnp.where(mask, self.place, self.token.size)
        return empty.at[place].set(values, mode="drop").reshape(*self.token.shape, *values.shape[2:])

    def unpacked(self, values: Array) -> Array:
        """What belongs to the tokens of packed rows, `[B, P, ...]`, by sequence, `[N, T, ...]`; padding has any token's."""
        return values.reshape(-1, *values.shape[2:])[self.place]


def pack_batch(
    sequence: np.ndarray,
    lengths: Sequence[int],
    settings: Sequence[Sampling],
    trace: Trace | None,
    experts: Any,
    pack: int | tuple[int, int],
    shape: tuple[int, int],
) -> Packing:
    """Sequences `[n, T]` of these lengths in packed rows of `pack` tokens, or in so many rows of so many tokens.

    They are for a batch of `shape`. The sequences of a row have one sampling setting. Where the number of rows is not given,
    it is one of a few (`row_count`).

    Raises:
      ValueError: rows that are too short or too few, or what belongs to a whole row.
    """
    asked, size = (None, pack) if isinstance(pack, int) else pack
    check_packable(trace, settings, max(lengths, default=0), size)
    kinds = [(one.temperature, one.top_p, one.top_k, one.min_p) for one in settings]
    rows = place_sequences(lengths, kinds, size)
    if asked is not None and asked < len(rows):
        rule = f"These sequences take {len(rows)} rows of {size} tokens; got pack={pack}. Raise the number of rows."
        raise refused(rule, pack="does_not_fit")
    count = asked or row_count(len(rows))
    own = [settings[row[0]] for row in rows]
    rows, own = rows + [[]] * (count - len(rows)), own + own[-1:] * (count - len(rows))
    token, place = np.zeros((count, size), np.int32), np.zeros(shape, np.int32)
    routed: Any = None if experts is None else np.zeros((count, size, *experts.shape[2:]), experts.dtype)
    for b, row in enumerate(rows):
        for i, begin in zip(row, offsets_of(row, lengths), strict=False):
            here = slice(begin, begin + lengths[i])
            token[b, here] = sequence[i, : lengths[i]]
            place[i, : lengths[i]] = b * size + np.arange(begin, begin + lengths[i])
            if routed is not None:
                routed[b, here] = experts[i, : lengths[i]]
    columns = pad_columns(trace_columns(packed_trace(trace, rows, lengths, size), size))
    first, routed = jax.tree.map(jnp.asarray, (first_places(rows, lengths, size), routed))
    arrays = jax.tree.map(jnp.asarray, (token, columns._replace(first=first, experts=routed), rows_of(own), place))
    return Packing(*arrays, is_replayed=trace is not None, num_sequences=shape[0])


def check_packable(trace: Trace | None, settings: Sequence[Sampling], longest: int, size: int) -> None:
    """Refuses what a packed row has no place for."""
    if size < longest:
        rule = f"A packed row must have room for the longest sequence, {longest} tokens; got pack={size}. Raise it."
        raise refused(rule, pack="does_not_fit")
    reasons = {
        "penalties, which count the tokens of a row": any(one.penalises for one in settings),
        "moved sinks, the first tokens of a row": trace is not None and trace.sinks is not None,
        "steering vectors, one for each row": trace is not None and trace.steer is not None,
        "sealed pages, which begin at fixed places": trace is not None and isinstance(trace.kv_format, SealedFormat),
    }
    found = [reason for reason, is_there in reasons.items() if is_there]
    if found:
        rule = f"Sequences can be packed only without {'; '.join(found)}. Make the batch without pack."
        raise refused(rule, pack="unsupported")


def columns_for(config: ModelConfig, packing: Packing, num_rows: int) -> Columns:
    """The columns of packed rows, for each layer and head.

    Raises:
      ValueError: a packing of another batch than one of `num_rows`, and models that it cannot serve.
    """
    if num_rows != packing.num_sequences:
        raise refused(
            f"A packed batch is trained as a whole, {packing.num_sequences} rows; got {num_rows}. Make one batch of each "
            "microbatch.",
            rows="does_not_fit",
        )
    if config.state_layers:
        raise refused(
            "Sequences can be packed only without layers that have a recurrent state, which would go on from one sequence to "
            "the next. Make the batch without pack.",
            pack="unsupported",
        )
    columns = packing.columns
    if packing.is_replayed:
        return columns
    every = len(packing.token), config.num_paged_layers, config.num_kv_heads, columns.ended.shape[-1]
    return columns._replace(ended=jnp.broadcast_to(columns.ended, every))


def pad_columns(columns: Columns) -> Columns:
    """Columns in one of a few numbers; no query reads those added. Without sources, they are the tokens."""
    if columns.tokens is None:
        return columns
    count = columns.ended.shape[-1]
    spare = [(0, 0)] * 3 + [(0, round_up(count) - count)]
    tokens, starts = jax.tree.map(lambda x: jnp.pad(x, spare), (columns.tokens, columns.starts))
    ended = jnp.pad(columns.ended, spare, constant_values=columns.moment.shape[1] - 1)
    return columns._replace(tokens=tokens, starts=starts, ended=ended)


def row_count(count: int) -> int:
    """The next of a few numbers of rows.

    >>> [row_count(n) for n in (1, 7, 9, 33)]
    [1, 7, 10, 40]
    """
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step
