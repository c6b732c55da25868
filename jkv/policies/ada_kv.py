"""Ada-KV (arXiv 2407.11550): SnapKV whose heads compete for the slots of their layer."""

from jkv.policies.evict import Evict
from jkv.policies.policy import Policy
from jkv.policies.recipe import recipe
from jkv.policies.snap_kv import snap_schedule, snap_score


@recipe("Ada-KV", idea="as `snap_kv`; the KV heads of a layer compete for the slots of the layer", arxiv="2407.11550")
def ada_kv(
    budget: int, when: str = "decode", interval: int = 128, window: int = 8, pool: int = 7, floor: float = 0.2
) -> Policy:
    """Ada-KV with `budget` slots on average over a layer's KV heads; the last `window` tokens always stay, in every head.

    `when` is that of `snap_kv`.

    Rule (Algorithm 1):
      each head keeps its best floor * budget slots by SnapKV's score, the paper's safeguard
      the other slots of all K heads of a layer are ranked together, until the layer keeps K * budget

    Departures:
      - The default is `when="decode"`, which compacts repeatedly; the authors' rule is "prefill".
      - Each head holds pages only for what it keeps; many implementations mask instead, and free no memory.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> ada_kv(budget=128).evict.scope
    'compete'
    """
    evict = Evict(snap_score(when, window, pool), recent=window, scope="compete", floor=floor)
    return Policy("ada_kv", evict, snap_schedule(when, budget, interval))
