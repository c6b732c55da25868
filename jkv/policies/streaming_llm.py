"""StreamingLLM (arXiv 2309.17453): the first tokens and the last ones."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import Every
from jkv.policies.scores import Recency


@recipe
def streaming_llm(budget: int, sinks: int = 4, interval: int = 128, positions: str = "true") -> Policy:
    """The first `sinks` tokens and the newest, `budget` slots together, compacted every `interval` generated tokens.

    Keys keep their true positions, as most others have it. `positions="cache"` is the authors' own rule: each key counts as
    standing at its place in the cache, so the sinks move up to the window as tokens between them are dropped. Theirs drops a
    token at each step; here that is `interval=1`, a compaction program after each.

    Raises:
      ValueError: a setting out of its range.

    >>> streaming_llm(budget=64).evict.sinks
    4
    """
    if positions not in ("true", "cache"):
        raise ValueError(f"positions must be 'true' or 'cache'; got {positions!r}.")
    moves_sinks = positions == "cache" and sinks > 0
    return Policy("streaming_llm", Evict(Recency(), sinks=sinks), Every(budget, interval), moves_sinks=moves_sinks)
