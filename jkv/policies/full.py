"""The full cache: nothing is dropped."""

from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe


@recipe("full cache", idea="keeps every token")
def full() -> Policy:
    """Every token stays. All other policies are compared with it.

    Rule:
      keep every slot

    >>> full().is_bounded
    False
    """
    return Policy("full")
