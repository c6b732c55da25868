"""StreamingLLM (arXiv 2309.17453): the first tokens and the last ones."""

from jkv.policies.base import Evict, Policy
from jkv.policies.schedules import Every
from jkv.policies.scores import Recency


def streaming_llm(budget: int, sinks: int = 4, interval: int = 128, positions: str = "true") -> Policy:
    """The first `sinks` tokens and the newest, `budget` slots together, compacted every `interval` generated tokens.

    Keys keep their true positions. The authors' code rotates them at their place in the cache instead (`positions="cache"`),
    which this release does not offer.

    Raises:
      ValueError: a setting out of its range.

    >>> streaming_llm(budget=64).evict.sinks
    4
    """
    if positions != "true":
        raise ValueError(f"streaming_llm keeps keys at their true positions, positions='true'; got {positions!r}.")
    return Policy("streaming_llm", Evict(Recency(), sinks=sinks), Every(budget, interval))
