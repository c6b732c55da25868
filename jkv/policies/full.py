"""The full cache: nothing is dropped."""

from jkv.policies.base import Policy
from jkv.policies.recipe import recipe


@recipe
def full() -> Policy:
    """Every token stays: what every other policy is compared with.

    >>> full().is_bounded
    False
    """
    return Policy("full")
