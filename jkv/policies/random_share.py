"""Random sharing, the baseline of ReasonCache: as many pages are shared, but any page with any other."""

import dataclasses
from typing import Any

from jkv.errors import refused
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.policies.reason_cache import reason_cache


@recipe("baseline", idea="shares as many pages as `reason_cache`, in random pairs")
def random_share(like: Policy | None = None, seed: int = 0, percentile: float = 80.0, interval: int = 16) -> Policy:
    """Shares as many pages as another policy (`like`, by default ReasonCache with these settings), but any page with any other.

    Nothing is measured, so there is no warm-up, and a distance threshold has no effect. Draws depend on the seed, the prompt
    and the index of the sample.

    Rule:
      for each page that the other policy would measure, with a probability of `percentile` percent:
      draw two full pages of the completion; the older one replaces the newer one

    Raises:
      ValueError: a setting out of its range, or a policy that shares nothing.

    >>> random_share(seed=3).share.random
    3
    """
    policy: Any = reason_cache(percentile=percentile, interval=interval) if like is None else like
    if policy.share is None:
        rule = f"random_share's like= must be a policy that shares pages, such as jkv.reason_cache(); {policy.name} does not."
        raise refused(rule, like="unsupported")
    return dataclasses.replace(policy, name="random_share", share=dataclasses.replace(policy.share, random=seed))
