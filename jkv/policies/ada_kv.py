"""Ada-KV (arXiv 2407.11550): SnapKV whose heads compete for the slots of their layer."""

from jkv.eviction.evict import Evict, protection
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.policies.snap_kv import snap_schedule, snap_score


@recipe(
    "Ada-KV",
    idea="as `snap_kv`; the KV heads of a layer compete for the slots of the layer",
    arxiv="2407.11550",
    published={"when": "prefill", "window": 32},
)
def ada_kv(
    budget: int,
    when: str = "decode",
    interval: int = 128,
    window: int = 8,
    pool: int = 7,
    floor: float = 0.2,
    safeguard: str = "blend",
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """Ada-KV with `budget` slots on average over a layer's KV heads; the last `window` tokens always stay, in every head.

    `when`, `sinks`, `recent` and `protect_prompt` are as in `snap_kv`.

    Rule (Algorithm 2, on the slots before the window; a is `floor`):
      won(head) = how many of the K * budget best slots of a layer's K heads, by SnapKV's score, are the head's
      the head keeps its best (1 - a) * won(head) + a * budget slots

    Departures:
      - The numbers of slots are rounded so that they add up to K * budget; the authors round each by itself.
      - `safeguard="floor"` is the rule of other libraries: the best a * budget slots of each head are sure, and the others are
        ranked together.
      - The default is `when="decode"`, which compacts repeatedly; the authors' rule is "prefill".
      - Each head holds pages only for what it keeps; many implementations mask instead, and free no memory.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> ada_kv(budget=128).evict.scope
    'compete'
    """
    guard = protection(window, sinks, recent, protect_prompt)
    evict = Evict(snap_score(when, window, pool), scope="compete", floor=floor, safeguard=safeguard, **guard)
    return Policy("ada_kv", evict, snap_schedule(when, budget, interval))
