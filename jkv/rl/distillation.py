"""Distillation: a student learns a teacher's distributions, under the cache that its own rollouts were drawn with.

    out = rollout(prompts, n=4, return_trace=True)            # drawn by the student, in its budget
    teacher = jkv.score(teacher_model, out, top=16)           # with the full cache; by the same weights, if it teaches itself
    batch = jkv.rl.make_batch(out, teacher=teacher, replay=True)
    (loss, metrics), gradient = jax.value_and_grad(jkv.rl.distillation, has_aux=True)(params, batch)

With C the classes of a place (the teacher's k most likely tokens, and all other tokens as one, the rest), t the teacher's
probabilities of these classes, and s the student's:

    forward    sum over C of t (log t - log s)      covers all that the teacher may say (Hinton et al., 1503.02531)
    reverse    sum over C of s (log s - log t)      leaves what the teacher would not say (MiniLLM, 2306.08543)
    sampled    log s(x) - log t(x) of the drawn x   estimates the reverse one of all tokens; no top k (GKD, 2306.13649)

Merging tokens into one class can only lower both divergences, so they are bounds from below of the ones over the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.checks import check_known
from jkv.errors import refused
from jkv.model.params import Model, Params
from jkv.model.top_tokens import LEAST_REST, NO_TOKEN, join_rest, log1mexp
from jkv.replay.on_mesh import AnyMesh
from jkv.rl.batch import Batch, scores_of
from jkv.rl.ratios import LARGEST, bounded, check_mean, check_pair, check_values, log_ratio, mean_loss, share

KINDS = ("forward", "reverse", "sampled")


def distillation(
    params: Model | Params,
    batch: Batch,
    *,
    kind: str = "forward",
    mean: str = "tokens",
    denominator: Array | float | None = None,
    mesh: AnyMesh | None = None,
    remat: bool = True,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss to minimise, in nats a token, and its metrics; differentiable, under jit too (`has_aux=True`).

    "forward" and "reverse" are the mean of `kl_divergence` over the classes of the teacher's most likely tokens. "sampled" is
    the mean of r (log s - log t) over drawn tokens, with r = exp(log s - sampled) and the bracket without a gradient, so that
    its gradient is the one of REINFORCE with the advantage log t - log s, and its value the divergence. For a dense batch, r is
    1 and has only a gradient: draw anew before each update, or take `teacher_advantages` and `policy_loss`, which corrects.

    Tokens that one of both cannot draw, because top-k, top-p or min-p cuts them, have an infinite divergence and are dropped.

    Args:
      params: the student's weights, which are trained.
      batch: of `make_batch(..., teacher=...)`: with columns, the student is the compressed cache.
      kind: "forward", "reverse" or "sampled".
      mean: over all "tokens" alike, or over "sequences", each the mean of its tokens.
      denominator: see `policy_loss`.
      mesh, remat: see `log_probs`.

    The metrics, each a scalar:
      `kl`: the mean divergence of the kind, in nats a token.
      `cut`: the share of tokens that are dropped.
      `covered`: the teacher's probability of its k most likely tokens, on average; not for "sampled".

    Raises:
      ValueError: an unknown kind or mean, a batch without a teacher, or without its most likely tokens, a denominator that is
        not positive, or what `log_probs` refuses.
    """
    check_known(KINDS, kind=kind)
    check_mean(mean, denominator)
    teacher = batch.teacher
    if teacher is None or (kind != "sampled" and teacher.top is None):
        needs = "" if kind == "sampled" else ", top=16"
        raise refused(
            f"distillation(kind={kind!r}) reads a teacher of the batch{', and its most likely tokens' * bool(needs)}; there is "
            f"none. Make it with make_batch(out, teacher=jkv.score(teacher, out{needs})).",
            batch="missing",
        )
    metrics: dict[str, Float[Array, ""]] = {}
    if kind == "sampled":
        current = scores_of(params, batch, mesh=mesh, remat=remat).log_prob
        fixed = jax.lax.stop_gradient(current)
        is_there = batch.mask & jnp.isfinite(fixed) & jnp.isfinite(teacher.log_prob)
        anchor = batch.sampled if batch.is_replayed and not batch.is_mixed else fixed
        kl_NT = log_ratio(fixed, teacher.log_prob, is_there)
        loss_NT = bounded(log_ratio(current, anchor, is_there)) * kl_NT
    else:
        assert teacher.top is not None
        found = log_probs_at(params, batch, teacher.top.tokens, mesh=mesh, remat=remat)
        known = teacher.top.classes
        loss_NT = kl_divergence(known, found) if kind == "forward" else kl_divergence(found, known)
        is_there = batch.mask & jnp.isfinite(loss_NT)
        loss_NT = kl_NT = jnp.where(is_there, loss_NT, 0.0)
        metrics["covered"] = share(-jnp.expm1(teacher.top.rest), batch.mask)
    metrics |= {"kl": share(jax.lax.stop_gradient(kl_NT), batch.mask), "cut": share(~is_there, batch.mask)}
    return mean_loss(loss_NT, batch.mask, mean, denominator), metrics


def log_probs_at(
    params: Model | Params, batch: Batch, tokens: Any, *, mesh: AnyMesh | None = None, remat: bool = True
) -> Float[Array, "N T classes"]:
    """The log-probabilities in nats of given tokens at each place, and last of all others together: `[N, T, k + 1]`.

    As `log_probs`, dense or replayed, differentiable, and without an array of all logits. 0 outside of the mask.

    Args:
      params: the weights.
      batch: of `make_batch`.
      tokens: `[N, T, k]` int32, different ones at each place, as `batch.teacher.top.tokens`; -1 for none, which has `-inf`.
      mesh, remat: see `log_probs`.

    Raises:
      ValueError: tokens of another shape or that the model does not have, or what `log_probs` refuses.
    """
    config = (params.params if isinstance(params, Model) else params).config
    shape = np.shape(tokens)
    if shape[:2] != batch.token.shape or len(shape) != 3 or not shape[2]:
        rule = f"tokens must be some for each token of the batch, [{', '.join(map(str, batch.token.shape))}, k]; got {shape}."
        raise refused(rule, tokens="wrong_type")
    if not isinstance(tokens, jax.core.Tracer):
        check_tokens(np.asarray(tokens), np.asarray(batch.mask), config.vocab_size)
    classes = scores_of(params, batch, mesh=mesh, remat=remat, asked=jnp.asarray(tokens, jnp.int32)).classes
    assert classes is not None
    return classes


def check_tokens(tokens: np.ndarray, mask: np.ndarray, vocab_size: int) -> None:
    """Refuses what is no token of a model, or there twice."""
    here = np.sort(tokens[mask], axis=-1)
    if here.size and (here.min() < NO_TOKEN or here.max() >= vocab_size):
        bad = here[(here < NO_TOKEN) | (here >= vocab_size)][0]
        rule = f"tokens must lie in [0, {vocab_size}), the vocabulary, or be -1 for none; got {bad}."
        raise refused(rule, tokens="out_of_range")
    if ((here[:, 1:] == here[:, :-1]) & (here[:, 1:] != NO_TOKEN)).any():
        raise refused("tokens of a place must differ, since each is a class; got one twice.", tokens="conflict")


def kl_divergence(p: Float[Array, "..."], q: Float[Array, "..."]) -> Float[Array, "..."]:
    """KL(p || q) in nats of distributions over the same classes, given as log-probabilities: sum of exp(p) (p - q).

    Differentiable in both. A class that p never takes counts as 0, with a gradient of 0; infinite, without a gradient, where p
    takes a class that q never does.

    Raises:
      ValueError: arrays of different shapes, or NaN, where the values are known (not under jit).

    >>> half, other = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> round(float(kl_divergence(half, other)), 4), float(kl_divergence(half, half))
    (0.1438, 0.0)
    """
    if p.shape != q.shape or not p.shape:
        rule = f"Both distributions must have the same classes in their last axis; got {p.shape} and {q.shape}."
        raise refused(rule, q="wrong_type")
    for name, value in (("p", p), ("q", q)):
        if not isinstance(value, jax.core.Tracer) and bool(jnp.isnan(value).any()):
            rule = f"{name} must hold log-probabilities; got NaN. Leave rows that ended with the reason nan out."
            raise refused(rule, **{name: "out_of_range"})
    is_taken = jnp.exp(p) > 0
    is_both = is_taken & (q > -jnp.inf)
    safe_p, safe_q = jnp.where(is_both, p, 0.0), jnp.where(is_both, q, 0.0)
    total = (jnp.where(is_both, jnp.exp(safe_p), 0.0) * (safe_p - safe_q)).sum(axis=-1)
    return jnp.where((is_taken & ~is_both).any(axis=-1), jnp.inf, total)


def with_rest(logprobs: Float[Array, "*N k"]) -> Float[Array, "*N classes"]:
    """Log-probabilities of some tokens, and in one more column of all others together, in nats.

    The rest is log(1 - sum of exp), by `log1mexp`, so that it is as exact as the sum: float32 knows no rest below 2**-24, which
    it is at least. Use it where the rest is not known otherwise, as from another library; `jkv.score` and
    `jkv.rl.log_probs_at` sum the other tokens, and know a rest of any size.

    Raises:
      ValueError: what is no log-probability, or adds up to more than 1, where the values are known (not under jit).

    >>> np.round(np.exp(with_rest(jnp.log(jnp.array([0.5, 0.25])))), 3).tolist()
    [0.5, 0.25, 0.25]
    """
    total = jax.scipy.special.logsumexp(logprobs, axis=-1)
    if not isinstance(logprobs, jax.core.Tracer):
        check_values("logprobs", np.asarray(logprobs), np.ones(logprobs.shape, bool), may_be_cut=True)
        if bool((total > 1e-3).any()):
            rule = f"logprobs of different tokens must add up to at most 1; got {float(jnp.exp(total.max())):.4g}."
            raise refused(rule, logprobs="out_of_range")
    return join_rest(logprobs, log1mexp(jnp.minimum(total, -LEAST_REST)))


def teacher_advantages(teacher: Any, sampled: Any, mask: Any) -> np.ndarray:
    """The advantage of each drawn token in on-policy distillation, log t - log s in nats: float32 `[N, T]`, 0 elsewhere.

    Minus the estimate of KL(student || teacher) at each place, for `make_batch(out, advantages)` and `policy_loss`, also added
    to the advantages of rewards: `advantages[:, None] + 0.1 * teacher_advantages(...)`. Differences are cut at 20 nats.

    Args:
      teacher: `jkv.score(teacher, out).logprobs`.
      sampled: `out.logprobs`.
      mask: `out.mask`.

    Raises:
      ValueError: arrays of different shapes, what is no log-probability, or no drawn token.

    >>> print(teacher_advantages(np.log([[0.5, 0.1]]), np.log([[0.25, 0.2]]), np.ones((1, 2), bool)).round(3))
    [[ 0.693 -0.693]]
    """
    check_pair(teacher, sampled, mask)
    mask = np.asarray(mask)
    if not mask.any():
        raise refused("The mask must hold at least one token; it is False everywhere. Leave such a batch out.", mask="missing")
    known, drawn = (np.where(mask, np.asarray(x, np.float32), np.float32(0)) for x in (teacher, sampled))
    return np.clip(known - drawn, -LARGEST, LARGEST)
