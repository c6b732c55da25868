"""PyramidKV (arXiv 2406.02069): SnapKV with more slots in the first layers and fewer in the last."""

from jkv.checks import check_least
from jkv.eviction.evict import Evict, protection
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.policies.snap_kv import snap_schedule, snap_score


@recipe(
    "PyramidKV",
    idea="as `snap_kv`, with larger budgets in the first layers than in the last",
    arxiv="2406.02069",
    published={"when": "prefill", "window": 32, "pool": 5},
)
def pyramid_kv(
    budget: int,
    when: str = "decode",
    interval: int = 128,
    window: int = 8,
    pool: int = 7,
    beta: float = 20.0,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """PyramidKV with `budget` slots on average over layers; the last `window` tokens always stay, in every layer.

    `when`, `sinks`, `recent` and `protect_prompt` are as in `snap_kv`.

    Rule:
      the last layer keeps window + (budget - window) / beta slots, by SnapKV's score
      the first layer is as far above the mean as the last is below it
      the layers between lie on a straight line
      until a row has seen 2 (budget - window) tokens, all layers keep the same

    Departures:
      - The default is `when="decode"`, which compacts repeatedly; the authors' rule is "prefill".
      - Each layer holds pages only for its own share, while the authors' code keeps one length for each layer in dense memory.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> [pyramid_kv(budget=108).budgets(108, 3, seen).tolist() for seen in (199, 200, 201, 203)]
    [[108, 108, 108], [200, 108, 16], [201, 108, 15], [203, 108, 13]]
    """
    check_least(1, ", how many times less than the mean the last layer keeps", beta=beta)
    evict = Evict(snap_score(when, window, pool), **protection(window, sinks, recent, protect_prompt))
    return Policy("pyramid_kv", evict, snap_schedule(when, budget, interval), pyramid=2 - 1 / beta)
