"""StreamingLLM (arXiv 2309.17453): the first tokens and the last ones."""

from jkv.checks import check_known
from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import Recency


@recipe(
    "StreamingLLM",
    idea="keeps the first tokens and the most recent tokens",
    arxiv="2309.17453",
    published={"positions": "cache", "interval": 1},
)
def streaming_llm(
    budget: int, sinks: int = 4, interval: int = 128, positions: str = "true", protect_prompt: bool = False
) -> Policy:
    """The first `sinks` tokens and the newest ones, `budget` slots in total, compacted every `interval` generated tokens.

    With `protect_prompt`, the whole prompt stays.

    Rule:
      keep the first `sinks` tokens and the last (budget - sinks)

    Departures:
      - Keys keep their true positions, as in most implementations. `positions="cache"` is the authors' rule: a key has the
        position of its place in the cache, so the sinks move up to the window when tokens between them are evicted.
      - The authors evict a token at each step; here that is `interval=1`, which runs a compaction program after each step.

    Raises:
      ValueError: a setting out of its range.

    >>> streaming_llm(budget=64).evict.sinks
    4
    """
    check_known(("true", "cache"), positions=positions)
    moves_sinks = positions == "cache" and sinks > 0
    return Policy(
        "streaming_llm",
        Evict(Recency(), sinks=sinks, protect_prompt=protect_prompt),
        Every(budget, interval),
        moves_sinks=moves_sinks,
    )
