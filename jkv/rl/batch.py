"""What one update trains on: rollouts as arrays of a few shapes, and their log-probabilities under any weights."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.engine.results import Result
from jkv.model.params import Model, Params
from jkv.model.sampling import SamplingRows, rows_of
from jkv.replay.on_mesh import AnyMesh, mesh_of
from jkv.replay.score import Columns, Trace, dense_columns, join, round_up, sequence_log_probs, trace_columns
from jkv.rl.ratios import check_pair


class Batch(flax.struct.PyTreeNode):
    """Sequences, prompt and completion in one row, right-padded; everything `[N, T]` belongs to the token at its place.

    A pytree of arrays: `jax.tree.map(lambda x: x[:8], batch)` is a smaller batch. Only `truncates` is static.
    """

    token: Any  # [N, T] int32
    mask: Any  # [N, T] bool: tokens that the model drew
    sampled: Any  # [N, T] float32: the log-probabilities they were drawn with
    advantage: Any  # [N, T] float32
    settings: SamplingRows  # each [N]
    columns: Columns | None = None  # of the compressed cache, whose replay is trained; None trains the dense policy
    start: Any = None  # [N] int32: where completions begin
    truncates: bool = flax.struct.field(pytree_node=False, default=False)  # whether any row cuts its distribution

    @property
    def is_replayed(self) -> bool:
        """Whether log-probabilities are the compressed cache's."""
        return self.columns is not None

    def dense(self) -> "Batch":
        """The same tokens with the full cache."""
        return self.replace(columns=None)


def make_batch(
    out: Result, advantages: Any, *, replay: bool = False, rows: int | None = None, length: int | None = None
) -> Batch:
    """Rollouts as device arrays, padded to one of a few shapes so that few programs compile.

    Rows grow to a size of at most an eighth more (to `rows`, if given), tokens to `jkv.replay.score.round_up` (to `length`);
    padding is outside the mask. With rollouts of one size and limit, every batch has one shape.

    Args:
      out: what `jkv.Rollout` or `jkv.generate` returned.
      advantages: one number a completion, or one a token, `[N, T]` as `out.tokens`.
      replay: whether to train what was sampled from, under the same evictions, by `out.trace`; else the dense policy.
      rows: of the batch, at least as many as there are completions.
      length: tokens of a row, prompt included, at least as many as the longest has.

    Raises:
      ValueError: a replay without a trace or of completions that several weights drew, shapes that do not belong together, or
        what is no log-probability or advantage.
    """
    trace = need_trace(out, "make_batch(..., replay=True)") if replay else None
    width, lengths = out.tokens.shape[1], np.asarray(out.lengths)
    is_token = np.arange(width) < lengths[:, None]
    mask = np.asarray(getattr(out, "mask", is_token))
    if mask.shape != is_token.shape or mask.dtype != bool or (mask & ~is_token).any():
        raise ValueError(
            "Completions must be padded on the right: mask[i, t] is False for t >= lengths[i]; got another mask, "
            f"{mask.dtype}{list(mask.shape)} for tokens {list(is_token.shape)}."
        )
    if replay:
        check_versions(getattr(out, "policy_version", None), mask)
    check_pair(out.logprobs, out.logprobs, mask)
    advantage = spread_advantages(advantages, mask)
    sequence, starts = join(out.tokens, out.prompts, lengths.tolist())
    num_rows = fit("rows", rows, len(sequence), row_count(len(sequence)))
    total = fit("length", length, int((starts + lengths).max(initial=1)), sequence.shape[1])
    sequence = sequence[:, :total]

    def place(values: np.ndarray) -> Array:
        """Values of completion tokens, put where the tokens stand."""
        placed = np.zeros((num_rows, total), values.dtype)
        for i, (start, count) in enumerate(zip(starts, lengths, strict=True)):
            placed[i, start : start + count] = values[i, :count]
        return jnp.asarray(placed)

    def more(value: Array) -> Array:
        """What belongs to a row; rows that hold no token have the last one's."""
        return jnp.pad(value, [(0, num_rows - len(value))] + [(0, 0)] * (value.ndim - 1), mode="edge")

    token = np.zeros((num_rows, total), np.int32)
    token[: len(sequence), : sequence.shape[1]] = sequence
    columns: Any = None
    if trace is not None:
        columns = jax.tree.map(more, pad_columns(trace_columns(trace, total)))
    return Batch(
        token=jnp.asarray(token),
        mask=place(mask),
        sampled=place(np.asarray(out.logprobs, np.float32)),
        advantage=place(advantage),
        settings=jax.tree.map(more, jax.tree.map(jnp.asarray, rows_of(out.sampling))),
        columns=columns,
        start=more(jnp.asarray(starts)),
        truncates=any(one.draws == "truncated" for one in out.sampling),
    )


def log_probs(params: Model | Params, batch: Batch, *, mesh: AnyMesh | None = None, remat: bool = True) -> Float[Array, "N T"]:
    """The log-probability in nats of every token of the batch's mask, dense or replayed; 0 elsewhere.

    Under the settings that it was drawn with. Differentiable with respect to the weights, usable under jit: columns are data.

    Args:
      params: the weights.
      batch: of `make_batch`.
      mesh: its axis "tensor" splits the heads (and weights that `jkv.shard` placed), all others the rows. None is the mesh of
        the weights. Under `jit` they do not show it: then it is that of `jax.set_mesh`, or none.
      remat: whether a gradient computes each layer once more, a third more arithmetic in all, and keeps two arrays as wide as
        the residual stream of it, in place of all that the layer computed.

    Raises:
      ValueError: columns of another model, or a mesh that does not divide the model or the rows.
    """
    weights = params.params if isinstance(params, Model) else params
    config, num_rows = weights.config, batch.token.shape[0]
    columns = batch.columns
    if columns is None:
        columns = dense_columns(config, *batch.token.shape)
    elif columns.end.shape[:3] != (wanted := (num_rows, config.num_paged_layers, config.num_kv_heads)):
        raise ValueError(
            f"A batch's columns are of each row, layer with full attention and KV head, here {wanted}; "
            f"got {columns.end.shape[:3]}. Make the batch of what this model sampled."
        )
    settings = {"truncates": batch.truncates, "start": batch.start, "mesh": mesh_of(weights, mesh), "remat": remat}
    log_prob = sequence_log_probs(weights, batch.token, columns, batch.settings, **settings)
    return jnp.where(batch.mask, log_prob, 0.0)


def need_trace(out: Result, who: str) -> Trace:
    """The trace that a replay reads."""
    if out.trace is None:
        raise ValueError(
            f"{who} replays the compressed cache by the trace of its evictions; this result has none. Sample with "
            "return_trace=True."
        )
    return out.trace


def check_versions(version: Any, mask: np.ndarray) -> None:
    """Refuses completions of several weights: no single ones replay what their keys were made of."""
    if version is None or not mask.any():
        return
    least, most = (pick(np.where(mask, version, version[:, :1]), axis=1) for pick in (np.min, np.max))
    if (least != most).any():
        row = int(np.argmax(least != most))
        raise ValueError(
            "A replay needs completions that one version of the weights drew from beginning to end; sample "
            f"{row} has versions {least[row]} to {most[row]}. Leave such samples out, or train them dense, corrected."
        )


def spread_advantages(advantages: Any, mask: np.ndarray) -> np.ndarray:
    """One advantage a token, float32."""
    values = np.asarray(advantages, np.float32)
    if values.shape not in (mask.shape[:1], mask.shape):
        raise ValueError(
            f"advantages must be one a completion, {mask.shape[:1]}, or a token, {mask.shape}; got {values.shape}."
        )
    values = np.broadcast_to(values[:, None] if values.ndim == 1 else values, mask.shape)
    if not np.isfinite(values[mask]).all():
        raise ValueError("advantages must be finite; got NaN or infinity. See rewards and group_advantages.")
    return values


def fit(name: str, asked: int | None, least: int, usual: int) -> int:
    """A size of the batch."""
    if asked is not None and asked < least:
        raise ValueError(f"{name} must hold what was sampled, at least {least}; got {asked}. Raise it or leave it out.")
    return usual if asked is None else asked


def row_count(count: int) -> int:
    """The next of a few numbers of rows.

    >>> [row_count(n) for n in (1, 7, 9, 33)]
    [1, 7, 10, 40]
    """
    step = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def pad_columns(columns: Columns) -> Columns:
    """Columns in one of a few numbers; no query reads those added. Without sources, they are the tokens."""
    if columns.source is None:
        return columns
    count = columns.end.shape[-1]
    spare = [(0, 0)] * 3 + [(0, round_up(count) - count)]
    source, begin, end = (jnp.pad(x, spare) for x in (columns.source, columns.begin, columns.end))
    return columns._replace(source=source, begin=begin, end=end)
