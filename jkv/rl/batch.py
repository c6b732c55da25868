"""What one update trains on: rollouts as arrays of a few shapes, and their log-probabilities under any weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.checks import check_known, counted, shown
from jkv.engine.results import FAILED, Result, reason_of
from jkv.errors import refused
from jkv.model.params import Model, Params
from jkv.model.sampling import SamplingRows, rows_of
from jkv.pytrees import PyTree, static
from jkv.replay.columns import Columns, dense_columns, fit_tokens, trace_columns
from jkv.replay.on_mesh import AnyMesh, mesh_of
from jkv.replay.score import Scores, TokenScores, Trace, join, scores_where, token_scores
from jkv.rl.packed import Packing, columns_for, pack_batch, pad_columns, row_count
from jkv.rl.ratios import check_pair
from jkv.rl.teacher import check_teacher

ON_FAILED = ("refuse", "mask", "train")


class Batch(PyTree):
    """Sequences, prompt and completion in one row, right-padded; everything `[N, T]` belongs to the token at its place.

    A pytree of arrays: `jax.tree.map(lambda x: x[:8], batch)` is a smaller batch, unless it is packed: then each microbatch is
    made by itself. Only `is_mixed` is static: another sampling, too, compiles nothing.
    """

    token: Any  # [N, T] int32
    mask: Any  # [N, T] bool: tokens that the model drew
    sampled: Any  # [N, T] float32: the log-probabilities they were drawn with
    advantage: Any  # [N, T] float32
    settings: SamplingRows  # each [N]
    columns: Columns | None = None  # of the compressed cache, whose replay is trained; None trains the dense policy
    start: Any = None  # [N] int32: where completions begin
    experts: Any = None  # [N, T, L, A]: those that tokens went through; None leaves the choice to the router
    teacher: TokenScores | None = None  # of the same tokens; log-probability, and the most likely tokens if these are known
    packing: Packing | None = None  # in which the forward pass computes the sequences; None computes the rows as they are
    is_mixed: bool = static(default=False)  # whether several weights may have drawn a row

    @property
    def is_replayed(self) -> bool:
        """Whether log-probabilities are the compressed cache's."""
        return self.columns is not None or (self.packing is not None and self.packing.is_replayed)

    def dense(self) -> "Batch":
        """The same tokens with the full cache."""
        if self.packing is not None and self.packing.is_replayed:
            rule = "A packed batch has no other columns than those that it replays. Make a dense batch."
            raise refused(rule, pack="conflict")
        return self.replace(columns=None)


def make_batch(
    out: Result,
    advantages: Any = None,
    *,
    replay: bool = False,
    rows: int | None = None,
    length: int | None = None,
    routed_experts: bool = False,
    pack: int | tuple[int, int] | None = None,
    mixed: bool = False,
    failed: str = "refuse",
    teacher: Scores | None = None,
) -> Batch:
    """Rollouts as device arrays, padded to one of a few shapes so that few programs compile.

    Rows grow to a size of at most an eighth more (to `rows`, if given), tokens to `jkv.replay.score.round_up` (to `length`);
    padding is outside the mask. With rollouts of one size and limit, every batch has one shape.

    Args:
      out: what `jkv.Rollout` or `jkv.generate` returned.
      advantages: one number a completion, or one a token, `[N, T]` as `out.tokens`; may be left out where there is a teacher.
      replay: whether to train what was sampled from, under the same evictions, by `out.trace`; else the dense policy.
      rows: of the batch, at least as many as there are completions.
      length: tokens of a row, prompt included, at least as many as the longest has.
      routed_experts: whether tokens go through the experts that they went through in the engine, by `out.routed_experts`
        (rollout routing replay, arXiv 2510.11370); the router still gives their weights, and has the gradient of these.
      pack: the forward pass computes several sequences in a row of this many tokens, at least as many as the longest has, in
        place of one in a row of `length`; or, as on a mesh, in so many rows of so many tokens. Log-probabilities, loss and
        gradients are the same but for rounding.
      mixed: whether a replay takes completions that several weights drew: samples that were pending when the weights changed.
        Their keys are computed anew by the weights that are trained, so what was sampled is not replayed exactly, and
        `policy_loss` corrects the difference.
      failed: what becomes of completions that ended by a failure (finish reason "error" or "nan"): "refuse" raises, "mask"
        leaves their rows outside of the mask, and "train" takes them as any other. Their rewards are the caller's matter.
      teacher: what `jkv.score(teacher, out, top=k)` returned for these completions, for `jkv.rl.distillation`.

    Raises:
      ValueError: completions that failed, a replay without a trace, experts that were not recorded, a replay of completions
        that several weights drew, what cannot be packed, shapes that do not belong together, what is no log-probability or
        advantage, or a teacher of other completions or of another vocabulary.
    """
    if not isinstance(out, Result):
        rule = f"make_batch takes rollouts first, then their advantages; got {shown(out)} as rollouts. Pass what they returned."
        raise refused(rule, out="wrong_type")
    if mixed and not replay:
        rule = "mixed=True is of a replay; a dense batch takes completions of several weights as they are. Leave it out."
        raise refused(rule, mixed="conflict")
    trace = need_trace(out, "make_batch(..., replay=True)") if replay else None
    width, lengths = out.tokens.shape[1], np.asarray(out.lengths)
    is_token = np.arange(width) < lengths[:, None]
    mask = np.asarray(getattr(out, "mask", is_token))
    if mask.shape != is_token.shape or mask.dtype != bool or (mask & ~is_token).any():
        raise refused(
            "Completions must be padded on the right: mask[i, t] is False for t >= lengths[i]; got another mask, "
            f"{mask.dtype}{list(mask.shape)} for tokens {list(is_token.shape)}.",
            out="invalid",
        )
    mask = mask & ~failed_rows(out, failed)[:, None]
    if replay and not mixed:
        check_versions(getattr(out, "policy_version", None), mask)
    check_pair(out.logprobs, out.logprobs, mask)
    if teacher is not None:
        check_teacher(teacher, out, mask)
    elif advantages is None:
        raise refused("A batch is trained by advantages or by a teacher; got neither. Pass one.", advantages="missing")
    advantage = spread_advantages(np.zeros(len(mask)) if advantages is None else advantages, mask)
    sequence, starts = join(out.tokens, out.prompts, lengths.tolist())
    num_rows = fit("rows", rows, len(sequence), row_count(len(sequence)))
    total = fit("length", length, int((starts + lengths).max(initial=1)), sequence.shape[1])
    sequence = sequence[:, :total]

    def place(values: np.ndarray) -> Array:
        """Values of completion tokens, put where the tokens stand."""
        placed = np.zeros((num_rows, total, *values.shape[2:]), values.dtype)
        for i, (start, count) in enumerate(zip(starts, lengths, strict=True)):
            placed[i, start : start + count] = values[i, :count]
        return jnp.asarray(placed)

    def more(value: Array) -> Array:
        """What belongs to a row; rows that hold no token have the last one's."""
        return jnp.pad(value, [(0, num_rows - len(value))] + [(0, 0)] * (value.ndim - 1), mode="edge")

    token = np.zeros((num_rows, total), np.int32)
    token[: len(sequence), : sequence.shape[1]] = sequence
    experts = fit_tokens(need_experts(out), total) if routed_experts else None
    columns: Any = None
    packing = None
    is_drawn = place(mask)
    known = None
    if teacher is not None:
        known = TokenScores(teacher.logprobs, top=teacher.top)
        known = scores_where(is_drawn, jax.tree.map(lambda x: place(np.asarray(x)), known))
    if pack is not None:
        ends = (starts + lengths).tolist()
        packing = pack_batch(sequence, ends, out.sampling, trace, experts, pack, (num_rows, total))
    elif trace is not None:
        columns = jax.tree.map(more, pad_columns(trace_columns(trace, total)))
    return Batch(
        token=jnp.asarray(token),
        mask=is_drawn,
        sampled=place(np.where(mask, np.asarray(out.logprobs, np.float32), np.float32(0))),
        advantage=place(np.where(mask, advantage, np.float32(0))),
        settings=jax.tree.map(more, jax.tree.map(jnp.asarray, rows_of(out.sampling))),
        columns=columns,
        start=more(jnp.asarray(starts)),
        experts=None if experts is None or packing is not None else more(jnp.asarray(experts)),
        teacher=known,
        packing=packing,
        is_mixed=replay and mixed,
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
      ValueError: columns or experts of another model, or a mesh that does not divide the model or the rows.
    """
    return scores_of(params, batch, mesh=mesh, remat=remat).log_prob


def scores_of(
    params: Model | Params,
    batch: Batch,
    *,
    mesh: AnyMesh | None = None,
    remat: bool = True,
    with_entropy: bool = False,
    asked: Int[Array, "N T k"] | None = None,
) -> TokenScores:
    """`log_probs`, and what else is asked for: the entropies of the distributions, log-probabilities of other tokens."""
    weights = params.params if isinstance(params, Model) else params
    config, token, columns, rows, start = weights.config, batch.token, batch.columns, batch.settings, batch.start
    experts = batch.experts
    if batch.packing is not None:
        columns = columns_for(config, batch.packing, len(token))
        token, experts, rows, start = batch.packing.token, columns.experts, batch.packing.settings, None
        asked = None if asked is None else batch.packing.packed(asked, batch.mask)
    elif columns is None:
        columns = dense_columns(config, *token.shape)
    wanted: tuple[int, ...] = (len(token), config.num_paged_layers, config.num_kv_heads)
    if columns.ended.shape[:3] != wanted:
        raise refused(
            f"A batch's columns are of each row, layer with full attention and KV head, here {wanted}; "
            f"got {columns.ended.shape[:3]}. Make the batch of what this model sampled.",
            batch="does_not_fit",
        )
    wanted = (*token.shape, len(config.expert_layers), config.num_active_experts)
    if experts is not None and experts.shape != wanted:
        raise refused(
            f"A batch's experts are of each row, token, layer with experts and choice, here {wanted}; got "
            f"{experts.shape}. Make the batch of what this model sampled.",
            batch="does_not_fit",
        )
    settings = {"start": start, "mesh": mesh_of(weights, mesh), "remat": remat, "with_entropy": with_entropy, "asked": asked}
    scores = token_scores(weights, token, columns._replace(experts=experts), rows, **settings)
    if batch.packing is not None:
        scores = jax.tree.map(batch.packing.unpacked, scores)
    return scores_where(batch.mask, scores)


def failed_rows(out: Result, failed: str = "refuse") -> np.ndarray:
    """[N] bool: the completions that a batch leaves out, because they ended by a failure.

    Raises:
      ValueError: there are some, and nobody has said what becomes of them.
    """
    check_known(ON_FAILED, failed=failed)
    rows = np.array([reason in FAILED for reason in out.finish_reason], bool)
    if failed == "refuse" and rows.any():
        first = int(np.argmax(rows))
        raise refused(
            f"A batch takes completions that ended by themselves or their limit; {counted(int(rows.sum()), 'completion')} of "
            f"{len(rows)} failed, the first of them {first}, {reason_of(out, first)}. Pass failed='mask' to train the "
            "others alone.",
            out="invalid",
        )
    return rows if failed == "mask" else np.zeros_like(rows)


def need_trace(out: Result, who: str) -> Trace:
    """The trace that a replay reads."""
    if out.trace is None:
        raise refused(
            f"{who} replays the compressed cache by the trace of its evictions; this result has none. Sample with "
            "return_trace=True.",
            out="missing",
        )
    return out.trace


def need_experts(out: Result) -> np.ndarray:
    """The experts that tokens went through."""
    if out.routed_experts is None:
        raise refused(
            "make_batch(..., routed_experts=True) takes the experts that the engine chose; this result has none. Sample with "
            "routed_experts=True.",
            out="missing",
        )
    return out.routed_experts


def check_versions(version: Any, mask: np.ndarray) -> None:
    """Refuses completions of several weights: no single ones replay what their keys were made of."""
    if version is None or not mask.any():
        return
    least, most = (pick(np.where(mask, version, version[:, :1]), axis=1) for pick in (np.min, np.max))
    if (least != most).any():
        row = int(np.argmax(least != most))
        raise refused(
            "An exact replay needs completions that one version of the weights drew from beginning to end; sample "
            f"{row} has versions {least[row]} to {most[row]}. Leave such samples out, replay them corrected (mixed=True), or "
            "train them dense, corrected.",
            out="conflict",
        )


def spread_advantages(advantages: Any, mask: np.ndarray) -> np.ndarray:
    """One advantage a token, float32."""
    values = np.asarray(advantages, np.float32)
    if values.shape not in (mask.shape[:1], mask.shape):
        rule = f"advantages must be one a completion, {mask.shape[:1]}, or a token, {mask.shape}; got {values.shape}."
        raise refused(rule, advantages="wrong_type")
    values = np.broadcast_to(values[:, None] if values.ndim == 1 else values, mask.shape)
    if not np.isfinite(values[mask]).all():
        rule = "advantages must be finite; got NaN or infinity. See rewards and group_advantages."
        raise refused(rule, advantages="out_of_range")
    return values


def fit(name: str, asked: int | None, least: int, usual: int) -> int:
    """A size of the batch."""
    if asked is not None and asked < least:
        rule = f"{name} must hold what was sampled, at least {least}; got {asked}. Raise it or leave it out."
        raise refused(rule, **{name: "does_not_fit"})
    return usual if asked is None else asked
