"""SnapKV (arXiv 2404.14469): keeps what the last queries attend to, at the end of the prompt or all along."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import AfterPrompt, Every, Schedule
from jkv.policies.scores import AttentionMass

WHEN = ("decode", "prefill")


@recipe
def snap_kv(budget: int, when: str = "decode", interval: int = 128, window: int = 8, pool: int = 7) -> Policy:
    """SnapKV with `budget` slots for each layer and KV head; the last `window` tokens always stay.

    `when="decode"` is the baseline of R-KV's paper: R-KV's importance alone, every `interval` generated tokens.
    `when="prefill"` is its authors' rule: the prompt is compacted once (each query's softmax over everything it saw, mean
    pooling; they use window 32 and pool 5), and generated tokens all stay. Theirs keeps a set for each query head, which
    stores a key once for each of them; here it is one for each KV head, by the mean over its group.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> snap_kv(budget=256).is_bounded, snap_kv(budget=256, when="prefill").is_bounded
    (True, False)
    """
    return Policy("snap_kv", Evict(snap_score(when, window, pool), recent=window), snap_schedule(when, budget, interval))


def snap_score(when: str, window: int, pool: int) -> AttentionMass:
    """The attention mass, as each of the two rules has it."""
    if when not in WHEN:
        raise ValueError(f"when must be one of {WHEN}; got {when!r}.")
    if when == "prefill":
        return AttentionMass(window, pool, pooling="mean", over_group="mean", candidates="causal")
    return AttentionMass(window, pool)


def snap_schedule(when: str, budget: int, interval: int) -> Schedule:
    """All along, or once after the prompt."""
    return AfterPrompt(budget) if when == "prefill" else Every(budget, interval)
