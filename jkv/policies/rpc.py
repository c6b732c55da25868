"""RPC, Reasoning Path Compression (arXiv 2505.13866): keeps a fixed share of the thought, and all of the prompt."""

from jkv.policies.base import Evict, Policy
from jkv.policies.recipe import recipe
from jkv.policies.schedules import Growing
from jkv.policies.scores import AttentionMass

SCOPES = ("layer", "head")


@recipe
def rpc(
    interval: int = 4096, ratio: int = 4, window: int = 32, scope: str = "layer", pool: int = 7, released: bool = False
) -> Policy:
    """RPC: every `interval` generated tokens, one in `ratio` of them joins the slots that stay.

    The prompt and the last `window` tokens always stay. The rest is scored by the attention mass that the last `window`
    queries give it (softmax over what is scored alone, mean over them), mean-pooled over `pool` slots; `scope="layer"`
    averages over all query heads of a layer (the paper's choice), "head" over those of each KV head. A set for each query
    head, the paper's third choice, would store keys once for each of them, and is left out. The cache still grows, `ratio`
    times slower than the thought.

    `released=True` reproduces an accident of the authors' code: the newest query counts twice, and the oldest not at all.

    Raises:
      ValueError: a setting out of its range.

    >>> rpc(interval=1024).schedule.most_slots(prompt=100, new=32768)
    9060
    """
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {SCOPES}; got {scope!r}.")
    score = AttentionMass(window, pool, "mean", over_group="mean", candidates="thought", repeat_newest=released)
    evict = Evict(score, recent=window, protect_prompt=True, scope=scope)
    return Policy("rpc", evict, Growing(interval, ratio, window))
