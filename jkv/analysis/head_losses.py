"""The loss of each KV head, when this head alone is compressed, and budgets in proportion to these losses (Focus-KV, HeadKV).

The engine decodes a text once under a policy, and its trace records the evictions of every head. The replay of one head
applies this head's evictions and keeps the full cache in all other heads. So a head's loss is exact and takes a forward pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jkv.analysis.recall import Text, decode, ids_of
from jkv.checks import check_between, shown, typed
from jkv.engine.requests import wrong_policy
from jkv.errors import InputError, refused
from jkv.eviction import Policy
from jkv.eviction.schedules import check_budget
from jkv.model.params import Model
from jkv.replay.score import score
from jkv.replay.trace import join_traces


def head_losses(
    model: Model, texts: Sequence[Text | tuple[str, str]], policy: Policy, **settings: Any
) -> Float[np.ndarray, "texts L K"]:
    """The loss of each text in nats a token, for each layer and KV head, when this head alone is compressed.

    A loss is the drop of the mean log-probability of the continuation's tokens, relative to the full cache. The compressed head
    keeps the same slots as when the policy compresses all heads. The cost is a decode of all texts, and a forward pass for each
    layer and KV head.

    Args:
      model: the model whose heads are measured.
      texts: pairs of a prompt and its continuation, each a text or token ids, such as the model's own reasoning.
      policy: evicts the slots of the compressed head, such as `jkv.snap_kv(budget=64)`. A small budget comes close to removing
        the head.
      settings: the engine's (`jkv.EngineOptions`).

    Raises:
      ValueError: no texts, a text without a continuation, a policy that does more than evict, or one that evicted nothing.
    """
    texts = ids_of(model, texts)
    if not isinstance(policy, Policy):
        raise wrong_policy(policy)
    if not texts or not all(len(prompt) and len(rest) for prompt, rest in texts):
        rule = "jkv.head_losses needs texts, each with a prompt and a continuation; got no text, or an empty part of one."
        raise refused(rule, texts="missing")
    if policy.evict is None or policy.read or policy.share or policy.steer or policy.moves_sinks:
        rule = (
            f"jkv.head_losses needs a policy that only evicts slots; {policy.name} evicts none, or also selects or shares "
            "pages, steers or moves sinks. Use another policy, such as jkv.snap_kv(budget=64)."
        )
        raise refused(rule, policy="unsupported")
    run = decode(model, texts, policy, settings)
    trace, totals = join_traces(run.traces), [len(prompt) + len(rest) for prompt, rest in texts]
    if not any(ended[..., :total].any() for ended, total in zip(trace.ended, totals, strict=True)):
        longest = max(totals)
        rule = "{name} evicted nothing from {field}, which have at most {longest} tokens. Lower its budget or interval."
        raise InputError(rule, field="texts", code="unsupported", name=policy.name, longest=longest)
    prompts, rests = zip(*texts, strict=True)
    lengths = [len(rest) for rest in rests]
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, rest in zip(tokens, rests, strict=True):
        row[: len(rest)] = rest

    def means(ended: np.ndarray) -> np.ndarray:
        replayed = score(model, tokens, dataclasses.replace(trace, ended=ended), prompts=prompts, lengths=lengths)
        return np.asarray(replayed.logprobs).sum(axis=1) / lengths

    open_ended = np.zeros_like(trace.ended)  # 0 is for columns that stay to the end
    full = means(open_ended)
    losses = np.zeros(trace.shape[:3])
    for layer, head in np.ndindex(*trace.shape[1:3]):
        alone = open_ended.copy()
        alone[:, layer, head] = trace.ended[:, layer, head]
        losses[:, layer, head] = full - means(alone)
    return losses


def head_budgets(losses: Any, budget: int, *, floor: float = 0.2, most: int | None = None) -> Int[np.ndarray, "L K"]:
    """A number of slots for each layer and KV head, in proportion to its loss and `budget` on average (`Policy.with_budgets`).

    Rule:
      each head gets floor * budget slots; the remaining slots are divided in proportion to max(0, loss)
      slots above a head's limit `most` are divided again among the heads below it, equally if none of these has a loss
      numbers are rounded down; the slots left over go to the heads with the largest remainders, in order where equal

    Departures:
      - Focus-KV (we could read only its readme) ablates query heads on a set of reasoning problems and counts right answers.
        The losses here are exact, in nats, and for KV heads, because KV heads hold the slots.
      - The division is HeadKV's (arXiv 2410.19258) with a limit, because a few heads have most of the loss, and slots beyond
        the length of a text are useless.

    Args:
      losses: `[L, K]`, or `[texts, L, K]` as `head_losses` returns them; the texts are averaged.
      budget: slots of a layer and KV head, on average.
      floor: the share of the budget that every head gets.
      most: the most slots of one head, such as the length of the longest text; None for no limit.

    Raises:
      ValueError: losses with another shape or with numbers that are not finite, or a setting out of its range.

    >>> head_budgets([[3.0, 1.0], [0.0, -2.0]], budget=50, floor=0.2)
    array([[130,  50],
           [ 10,  10]])
    """
    try:
        found = np.asarray(losses, float)
    except (TypeError, ValueError):  # lists of several lengths, or no numbers
        found = np.zeros(0)
    if found.ndim not in (2, 3) or not found.size or not np.isfinite(found).all():
        rule = "{field} must be finite numbers, [L, K] or [texts, L, K]; got {got}. Use what jkv.head_losses returns."
        raise InputError(rule, field="losses", code="wrong_type", got=shown(losses))
    budget, floor, most = typed("budget", budget, int), typed("floor", floor, float), typed("most", most, int | None)
    check_budget(budget)
    check_between(0, 1, " of the budget", floor=floor)
    if most is not None and most < budget:
        rule = "{field} must be at least the mean budget, {budget} slots; got {got}."
        raise InputError(rule, field="most", code="out_of_range", budget=budget, got=most)
    found = found.mean(axis=0) if found.ndim == 3 else found
    total, limit = budget * found.size, np.inf if most is None else most
    slots = np.full(found.size, floor * budget)
    worth = np.maximum(found.ravel(), 0.0)
    while (left := total - slots.sum()) > 1e-9 * total:
        is_open = slots < limit
        own = np.where(is_open, worth, 0.0)
        own = own if own.sum() > 0 else is_open.astype(float)
        slots = np.minimum(slots + left * own / own.sum(), limit)
    whole = np.floor(slots + 1e-6).astype(int)
    by_rest = np.argsort(-(slots - whole).round(6), kind="stable")
    whole[by_rest[: total - whole.sum()]] += 1
    return whole.reshape(found.shape)
