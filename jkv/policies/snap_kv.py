"""SnapKV (arXiv 2404.14469): keeps what the last queries attend to, after the prompt or throughout decoding."""

from jkv.checks import check_known
from jkv.eviction.evict import Evict, protection
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import AfterPrompt, Every, Schedule
from jkv.eviction.scores import AttentionMass

WHEN = ("decode", "prefill")


@recipe(
    "SnapKV",
    idea='keeps tokens with high attention from the last queries; repeatedly, or once after the prompt (`when="prefill"`)',
    arxiv="2404.14469",
    published={"when": "prefill", "window": 32, "pool": 5},
)
def snap_kv(
    budget: int,
    when: str = "decode",
    interval: int = 128,
    window: int = 8,
    pool: int = 7,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """SnapKV with `budget` slots for each layer and KV head; the last `window` tokens always stay.

    `when="decode"` is the baseline of the R-KV paper: R-KV's importance only, every `interval` generated tokens.
    `when="prefill"` is the authors' rule: the prompt is compacted once, and all generated tokens stay. The first `sinks`
    tokens, the last `recent` (by default the window) and, with `protect_prompt`, the prompt are never evicted.

    Rule:
      score = pool over `pool` slots of the mean over the last `window` queries of softmax(q . key / sqrt(H))
      "decode": the softmax runs over the slots before the window, of the largest logit of the query group; max-pooling
      "prefill": each query's softmax runs over all that it saw; mean over the query group, and mean-pooling

    Departures:
      - The default is `when="decode"`. With "prefill", the authors use window 32 and pool 5.
      - The authors keep a set for each query head, which stores a key once for each of them; here it is one set for each KV
        head.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> snap_kv(budget=256).is_bounded, snap_kv(budget=256, when="prefill").is_bounded
    (True, False)
    """
    evict = Evict(snap_score(when, window, pool), **protection(window, sinks, recent, protect_prompt))
    return Policy("snap_kv", evict, snap_schedule(when, budget, interval))


def snap_score(when: str, window: int, pool: int) -> AttentionMass:
    """The attention mass of either rule."""
    check_known(WHEN, when=when)
    if when == "prefill":
        return AttentionMass(window, pool, pooling="mean", over_group="mean", candidates="causal")
    return AttentionMass(window, pool)


def snap_schedule(when: str, budget: int, interval: int) -> Schedule:
    """Throughout decoding, or once after the prompt."""
    return AfterPrompt(budget) if when == "prefill" else Every(budget, interval)
