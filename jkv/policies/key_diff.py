"""KeyDiff (arXiv 2504.15364): keeps the keys that differ most from the mean key."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import by_blocks, default_recent
from jkv.eviction.view import CacheView


@dataclasses.dataclass(frozen=True)
class KeyDifference:
    """Minus the cosine of a slot's key with the mean of all unit keys."""

    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        key = jnp.where(view.is_filled[..., None], view.key.astype(jnp.float32), 0.0)
        unit = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-12)
        anchor = unit.sum(axis=2)  # the cosine needs its direction only
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.einsum("bksh,bkh->bks", unit, anchor, precision="highest")


@recipe("KeyDiff", idea="keeps the keys that differ most from the mean key; reads no queries", arxiv="2504.15364")
def key_diff(
    budget: int,
    interval: int = 128,
    sinks: int = 4,
    recent: int | None = None,
    protect_prompt: bool = False,
    block: int = 1,
) -> Policy:
    """KeyDiff with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The first `sinks` tokens, the last `recent` (by default 64, or a quarter of a budget below 256) and, with `protect_prompt`,
    the prompt are never evicted. With `block=page_size`, it keeps or evicts whole pages of the text, by the mean score of a
    page's slots; one block may be cut to fill the budget, and keeps its first tokens.

    Rule:
      score(s) = -cosine(key of s, mean over all slots of key / |key|)
      with `block`: each slot gets the mean score of its block's remaining slots; the block's number is position // block

    Departures:
      - Keys are compared as they are cached, rotated for their positions.
      - The paper compacts blocks of the prompt; here a row is compacted every `interval` of its own generated tokens.
      - `block` is not in the paper: it applies this score to blocks, as in PagedEviction (arXiv 2509.04377). A block that
        holds protected tokens may lose its other tokens.
      - Sinks and recent tokens are protected by default; `sinks=0, recent=0` is the bare rule.

    Raises:
      ValueError: a setting out of its range, or a budget that does not hold the sinks and the recent tokens.

    >>> key_diff(budget=1024).evict.recent
    64
    """
    recent = default_recent(budget) if recent is None else recent
    evict = Evict(by_blocks(KeyDifference(), block), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("key_diff", evict, Every(budget, interval))
