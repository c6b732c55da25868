"""What each KV head is worth: the loss of a text when that head alone is compressed, and budgets by it (Focus-KV, HeadKV).

A text is decoded once under a policy, which records what every head dropped. Each head's part of that trace is then replayed
alone, with the full cache in all others, so the loss of a head is exact and takes one forward pass.
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
    """By how many nats a token of each text is less likely when one KV head alone reads what the policy left it.

    The mean over the tokens of the continuation. The slots are those that the head keeps when all heads are compressed. It
    takes a decode of all texts, and a forward pass for each layer and KV head.

    Args:
      model: whose heads they are.
      texts: pairs, the prompt and its continuation, each a text or token ids, such as the model's own reasoning.
      policy: what a compressed head drops, such as `jkv.snap_kv(budget=64)`. The smaller its budget, the nearer to a head that
        is left out.
      settings: of the engine (`jkv.EngineOptions`).

    Raises:
      ValueError: no texts, one without a continuation, a policy that does more than evict, or one that dropped nothing.
    """
    texts = ids_of(model, texts)
    if not isinstance(policy, Policy):
        raise wrong_policy(policy)
    if not texts or not all(len(prompt) and len(rest) for prompt, rest in texts):
        rule = "The losses of heads need texts, each with a prompt and tokens that follow; got none, or an empty one."
        raise refused(rule, texts="missing")
    if policy.evict is None or policy.read or policy.share or policy.steer or policy.moves_sinks:
        rule = (
            f"The losses of heads are those of evicted slots, head by head; {policy.name} evicts none, or reads pages, shares "
            "them, steers or moves sinks as well. Take a policy that evicts only, such as jkv.snap_kv(budget=64)."
        )
        raise refused(rule, policy="unsupported")
    run = decode(model, texts, policy, settings)
    trace, totals = join_traces(run.traces), [len(prompt) + len(rest) for prompt, rest in texts]
    if not any(ended[..., :total].any() for ended, total in zip(trace.ended, totals, strict=True)):
        longest = max(totals)
        rule = "{name} dropped nothing of {field}, of at most {longest} tokens. Lower its budget or interval."
        raise InputError(rule, field="texts", code="unsupported", name=policy.name, longest=longest)
    prompts, rests = zip(*texts, strict=True)
    lengths = [len(rest) for rest in rests]
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, rest in zip(tokens, rests, strict=True):
        row[: len(rest)] = rest

    def means(ended: np.ndarray) -> np.ndarray:
        replayed = score(model, tokens, dataclasses.replace(trace, ended=ended), prompts=prompts, lengths=lengths)
        return np.asarray(replayed.logprobs).sum(axis=1) / lengths

    open_ended = np.zeros_like(trace.ended)  # the first moment is that of columns that stay
    full = means(open_ended)
    losses = np.zeros(trace.shape[:3])
    for layer, head in np.ndindex(*trace.shape[1:3]):
        alone = open_ended.copy()
        alone[:, layer, head] = trace.ended[:, layer, head]
        losses[:, layer, head] = full - means(alone)
    return losses


def head_budgets(losses: Any, budget: int, *, floor: float = 0.2, most: int | None = None) -> Int[np.ndarray, "L K"]:
    """Slots of each layer and KV head by what compressing it loses, `budget` on average, for `Policy.with_budgets`.

    Rule:
      each head has floor * budget slots, and the rest of all budgets goes to heads in proportion to max(0, loss)
      what a head would have beyond `most` goes to the others likewise, and where none is left with a loss, to all alike
      numbers are rounded down, and the slots that this leaves go to the largest remainders, the first of equal ones

    Departures:
      - Focus-KV (its readme is what could be read) ablates query heads on a set of reasoning problems, and counts answers; the
        losses here are exact, in nats, and of KV heads, which are what holds slots.
      - The division is HeadKV's (arXiv 2410.19258), with a limit: a few heads have most of the loss, and slots beyond a text's
        length are of no use.

    Args:
      losses: `[L, K]`, or `[texts, L, K]` as `head_losses` returns them, of which the mean counts.
      budget: slots of a layer and KV head, on average.
      floor: the part of the budget that every head has.
      most: slots of one head, such as the longest text's; None for no limit.

    Raises:
      ValueError: losses of another shape or that are no finite numbers, or a setting out of its range.

    >>> head_budgets([[3.0, 1.0], [0.0, -2.0]], budget=50, floor=0.2)
    array([[130,  50],
           [ 10,  10]])
    """
    try:
        found = np.asarray(losses, float)
    except (TypeError, ValueError):  # lists of several lengths, or no numbers
        found = np.zeros(0)
    if found.ndim not in (2, 3) or not found.size or not np.isfinite(found).all():
        rule = "{field} must be finite numbers, [L, K] or [texts, L, K]; got {got}. Take those of jkv.head_losses."
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
