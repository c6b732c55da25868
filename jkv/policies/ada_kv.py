"""Ada-KV (arXiv 2407.11550): SnapKV whose heads compete for the slots of their layer."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.snap_kv import snap_schedule, snap_score


@recipe
def ada_kv(
    budget: int, when: str = "decode", interval: int = 128, window: int = 8, pool: int = 7, floor: float = 0.2
) -> Policy:
    """Ada-KV with `budget` slots on average over a layer's KV heads; the last `window` tokens always stay, in every head.

    The slots of all heads of a layer are ranked together (Algorithm 1 there), after each head's best `floor * budget`, the
    safeguard. `when` is SnapKV's; the authors' rule is "prefill". Each head holds pages for what it keeps; many
    implementations mask instead, and free nothing.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> ada_kv(budget=128).evict.scope
    'compete'
    """
    evict = Evict(snap_score(when, window, pool), recent=window, scope="compete", floor=floor)
    return Policy("ada_kv", evict, snap_schedule(when, budget, interval))
