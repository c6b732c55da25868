"""Random sharing, the baseline of ReasonCache: as many pages, any with any."""

import dataclasses
from typing import Any

from jkv.policies.base import Policy
from jkv.policies.reason_cache import reason_cache
from jkv.policies.recipe import recipe


@recipe
def random_share(
    like: Policy | None = None, seed: int = 0, percentile: float = 80.0, warm_up: int = 1024, interval: int = 16
) -> Policy:
    """Shares whenever another policy would (`like`; by default ReasonCache with these settings), but two pages at random.

    The completion's full pages are drawn, the older of two standing in for the newer, from the seed and the request's own
    random key. It saves what the other saves as long as their texts repeat themselves as much.

    Raises:
      ValueError: a setting out of its range, or a policy that shares nothing.

    >>> random_share(seed=3).share.random
    3
    """
    policy: Any = reason_cache(percentile=percentile, warm_up=warm_up, interval=interval) if like is None else like
    if policy.share is None:
        raise ValueError(f"random_share is like a policy that shares; {policy.name} does not.")
    return dataclasses.replace(policy, name="random_share", share=dataclasses.replace(policy.share, random=seed))
