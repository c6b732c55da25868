"""Random sharing, the baseline of ReasonCache: as many pages, any with any."""

import dataclasses
from typing import Any

from jkv.policies.base import Policy
from jkv.policies.reason_cache import reason_cache
from jkv.policies.recipe import recipe


@recipe
def random_share(like: Policy | None = None, seed: int = 0, percentile: float = 80.0, interval: int = 16) -> Policy:
    """Shares as many pages as another policy would (`like`; by default ReasonCache with these settings), but any for any.

    For each page that the other would measure, one in a hundred `percentile` times, two full pages of the completion are drawn,
    and the older stands for the newer. Nothing is measured, so there is no warm-up, and a distance in place of the percentile
    has no meaning. Draws depend on the seed, the prompt and the sample's index.

    Raises:
      ValueError: a setting out of its range, or a policy that shares nothing.

    >>> random_share(seed=3).share.random
    3
    """
    policy: Any = reason_cache(percentile=percentile, interval=interval) if like is None else like
    if policy.share is None:
        raise ValueError(f"random_share is like a policy that shares; {policy.name} does not.")
    return dataclasses.replace(policy, name="random_share", share=dataclasses.replace(policy.share, random=seed))
