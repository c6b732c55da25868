"""The columns of a trace on the device, as small as the trace stores them; each layer writes out its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jkv.cache.attention import OPEN_END
from jkv.model.params import ModelConfig
from jkv.replay.trace import SteerTrace, Trace
from pallas_kernels.quantised import Format

MOMENTS = 256  # of a trace, the fewest that a program is compiled for
SORTED_TOKENS, SORTED_SHARE = 2048, 1 / 3  # the fewest tokens, and the most visible pairs, that are worth a sort


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Walk:
    """How kernels walk over the columns of a trace; part of a program, and no array.

    Attributes:
      sorts: whether they sort columns first (`pallas_kernels.replay_attention`).
    """

    sorts: bool


class Columns(NamedTuple):
    """`Trace` on the device, as small as it is stored: each layer writes out its own columns.

    The last of the moments is position 0, the end of columns that no query reads.
    """

    moment: Int[Array, "n M"]
    ended: UInt[Array, "n L K C"]
    tokens: UInt[Array, "n _ _ C"] | None = None  # of each layer and KV head, or of all; None: column c is token c
    starts: UInt[Array, "n _ _ C"] | None = None  # likewise; None: column c is read from position c on
    sinks: Int[Array, " n"] | None = None
    sink_shift: Int[Array, "n T"] | None = None
    steer: SteerTrace | None = None
    kv_format: Format | None = None  # keys and values are read as a pool of this format gives them back
    experts: UInt[Array, "n T L A"] | None = None  # that tokens go through; None leaves the choice to the router
    walk: Walk = Walk(sorts=False)
    first: Int[Array, "n T"] | None = None  # the place of the first token of each token's sequence; None: one in each row

    def of_layer(self, layer: int) -> tuple[Int[Array, "n K C"], Int[Array, "n K C"], Int[Array, "n K C"] | None]:
        """Begin, end and source of a layer's columns; the source None where column c is token c."""
        ended = self.ended[:, layer]
        index = ended.reshape(len(ended), -1).astype(jnp.int32)
        end = jnp.take_along_axis(self.moment, index, axis=1, mode="promise_in_bounds").reshape(ended.shape)

        def written(values: UInt[Array, "n _ _ C"]) -> Int[Array, "n K C"]:
            return jnp.broadcast_to(values[:, min(layer, values.shape[1] - 1)].astype(jnp.int32), ended.shape)

        own = jnp.broadcast_to(jnp.arange(ended.shape[-1], dtype=jnp.int32), ended.shape)
        begin = own if self.starts is None else written(self.starts)
        return begin, end, None if self.tokens is None else written(self.tokens)


def dense_columns(config: ModelConfig, num_samples: int, total: int) -> Columns:
    """Every token's own column, which never ends."""
    ended = jnp.zeros((num_samples, config.num_paged_layers, config.num_kv_heads, total), jnp.uint8)
    return Columns(jnp.asarray(padded_moments(np.full((num_samples, 1), OPEN_END, np.int32))), ended)


def trace_columns(trace: Trace, total: int) -> Columns:
    """The columns of a trace, padded to sequences of `total` tokens."""
    moment = padded_moments(trace.moment)
    never = moment.shape[1] - 1
    ended = trace.ended.astype(np.min_scalar_type(never))
    tokens, starts = trace.tokens, trace.starts
    if tokens is None and starts is None:
        # The trace is as wide as its longest sample; these rows may be shorter, and read only their own tokens.
        ended = np.pad(ended[..., :total], [(0, 0)] * 3 + [(0, max(0, total - ended.shape[-1]))])
    else:
        kind = np.min_scalar_type(total)
        ended = np.where(trace.source < total, ended, ended.dtype.type(never))
        tokens, starts = (written if x is None else x for x, written in ((tokens, trace.source), (starts, trace.begin)))
        tokens, starts = (jnp.asarray(np.minimum(x, most).astype(kind)) for x, most in ((tokens, total - 1), (starts, total)))
    rest = *sinks_and_steering(trace, total), trace.kv_format
    walk = Walk(sorts=total >= SORTED_TOKENS and share_visible(trace, total) <= SORTED_SHARE)
    return Columns(jnp.asarray(moment), jnp.asarray(ended), tokens, starts, *rest, walk=walk)


def share_visible(trace: Trace, total: int) -> float:
    """Pairs of a query and a column that it reads, as a share of the pairs of causal attention, in the layer in the middle."""
    pairs, (num_samples, num_layers, num_heads, _) = 0, trace.ended.shape
    for sample in range(num_samples):
        _, begin, end = trace.columns(sample, num_layers // 2)
        pairs += int(np.maximum(np.minimum(end, total) - begin, 0).sum(dtype=np.int64))
    return 2 * pairs / (num_samples * num_heads * total * total)


def padded_moments(moment: np.ndarray) -> np.ndarray:
    """Moments padded with position 0 to one of a few widths, so that few programs compile; at least one is padding."""
    num, width = moment.shape[1], MOMENTS
    while width <= num:
        width *= 4
    return np.pad(moment, [(0, 0), (0, width - num)])


def sinks_and_steering(trace: Trace, total: int) -> tuple[Any, Any, Any]:
    """A trace's sinks, sink shifts and steering, padded or cut to sequences of `total` tokens."""
    steer = None
    if trace.steer is not None:
        steer = SteerTrace(
            fit_tokens(trace.steer.amount, total), jnp.asarray(trace.steer.layer), jnp.asarray(trace.steer.vector)
        )
    if trace.sinks is None or trace.sink_shift is None:
        return None, None, steer
    return jnp.asarray(trace.sinks), fit_tokens(trace.sink_shift, total), steer


def fit_tokens(x: np.ndarray | None, total: int) -> Array | None:
    """What belongs to tokens, [n, T, ...], padded with zeros or cut to sequences of `total` tokens."""
    if x is None:
        return None
    return jnp.asarray(np.pad(x[:, :total], [(0, 0), (0, max(0, total - x.shape[1])), *[(0, 0)] * (x.ndim - 2)]))
