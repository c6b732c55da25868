"""CUR (CurDKV, arXiv 2509.15038, as resampled for decoding): keeps slots by the norms of their projected keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import check_least
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import by_blocks, default_recent, layer_of
from jkv.eviction.view import CacheView


@dataclasses.dataclass(frozen=True)
class NormProduct:
    """The squared norm of a slot's key times the squared norm of its value, after a random projection, new at each compaction.

    Attributes:
      rank: columns of the projection; 0 for the norms without a projection.
      seed: seed of the projections, which depend only on it, the layer and the length of the sequence.
    """

    rank: int
    seed: int
    needs = Needs()

    def __post_init__(self) -> None:
        check_least(0, " columns, 0 for the norms themselves", rank=self.rank)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        key, value = view.key.astype(jnp.float32), view.value.astype(jnp.float32)
        if self.rank:
            size = key.shape[-1]
            seed = jax.random.key(self.seed)

            def draw(layer: Array, num_seen: Array) -> Float[Array, "H r"]:
                folded = jax.random.fold_in(jax.random.fold_in(seed, layer), num_seen)
                return jax.random.normal(folded, (size, self.rank)) * self.rank**-0.5

            projection = jax.vmap(draw)(layer_of(view), view.num_seen)
            key, value = (jnp.einsum("bksh,bhr->bksr", x, projection, precision="highest") for x in (key, value))
        product = (key**2).sum(axis=-1) * (value**2).sum(axis=-1)
        total = jnp.where(view.is_filled, product, 0.0).sum(axis=-1, keepdims=True)
        return product / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


@recipe(
    "CUR", idea="keeps slots with large keys and values under a fresh random projection; reads no queries", arxiv="2509.15038"
)
def cur(
    budget: int,
    interval: int = 64,
    rank: int = 20,
    sinks: int = 4,
    recent: int | None = None,
    seed: int = 0,
    protect_prompt: bool = False,
    block: int = 1,
) -> Policy:
    """CUR with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The first `sinks` tokens, the last `recent` (by default 64, or a quarter of a budget below 256) and, with `protect_prompt`,
    the prompt are never evicted. It reads no queries and keeps no attention statistics, so a compaction costs a matrix product
    with `rank` columns. With `block=page_size`, it keeps or evicts whole pages of the text, by the mean score of a page's
    slots; one block may be cut to fill the budget, and keeps its first tokens.

    Rule:
      G = a matrix [H, rank] of normal numbers over sqrt(rank), drawn anew for each layer and compaction
      score = |key G|^2 * |value G|^2, over its sum over the slots; keys as they are cached, after RoPE
      with `block`: each slot gets the mean score of its block's remaining slots; the block's number is position // block

    Departures:
      - CurDKV scores the prompt once by leverage scores. The rule here is the variant for decoding in the code of VaSE
        (arXiv 2606.03928).
      - Unlike in VaSE's code, projections depend only on seed, layer and length, so they are batch-invariant, and the row's
        own generated tokens decide when a compaction is due.
      - `rank=0` takes exact norms over all slots. kvpress's default takes exact norms, too, but each as a share of its block of
        16 slots (`use_local_approximation`).
      - `block` is in neither: it applies this score to blocks, as in PagedEviction (arXiv 2509.04377). A block that holds
        protected tokens may lose its other tokens.

    Raises:
      ValueError: a setting out of its range, or a budget that does not hold the sinks and the recent tokens.

    >>> cur(budget=1024).evict.recent, cur(budget=128).evict.recent
    (64, 32)
    """
    recent = default_recent(budget) if recent is None else recent
    evict = Evict(by_blocks(NormProduct(rank, seed), block), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("cur", evict, Every(budget, interval))
