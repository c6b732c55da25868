"""RPC, Reasoning Path Compression (arXiv 2505.13866): keeps all of the prompt and a fixed share of the thoughts."""

from jkv.checks import check_known
from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Growing
from jkv.eviction.scores import AttentionMass

SCOPES = ("layer", "head")


@recipe("RPC", idea="keeps the prompt and a fixed share of the generated tokens", arxiv="2505.13866")
def rpc(
    interval: int = 4096, ratio: int = 4, window: int = 32, scope: str = "layer", pool: int = 7, released: bool = False
) -> Policy:
    """RPC: of every `interval` generated tokens, one in `ratio` stays.

    The prompt and the last `window` tokens always stay. `scope="layer"` averages over all query heads of a layer (the paper's
    choice), "head" over the query heads of each KV head. The cache still grows, `ratio` times slower than the sequence.

    Rule:
      score = mean-pool over `pool` slots of the mean over the last `window` queries and their heads of
          softmax over the generated slots before the window of q . key / sqrt(H)
      the n-th compaction, at window + n * interval generated tokens, keeps n * interval / ratio of these slots

    Departures:
      - The paper's third scope, a set for each query head, would store keys once for each query head, and is left out.
      - In the authors' code, by accident, the newest query counts twice, and the oldest not at all; `released=True` reproduces
        it.

    Raises:
      ValueError: a setting out of its range.

    >>> rpc(interval=1024).schedule.most_slots(prompt=100, new=32768)
    9060
    """
    check_known(SCOPES, scope=scope)
    score = AttentionMass(window, pool, "mean", over_group="mean", candidates="thought", repeat_newest=released)
    evict = Evict(score, recent=window, protect_prompt=True, scope=scope)
    return Policy("rpc", evict, Growing(interval, ratio, window))
