"""G-KV (arXiv 2512.00504): R-KV whose importance remembers what earlier compactions saw."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.checks import check_between, check_least
from jkv.eviction.evict import Evict, protection
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.scores import attention, is_query, less, sinks_by_group
from jkv.eviction.view import CacheView, Numbers
from jkv.policies.r_kv import redundancy_of


@dataclasses.dataclass(frozen=True)
class RememberedImportance:
    """`importance * F - (1 - importance) * R`, and F to carry: the docstring of `g_kv` has the rule."""

    window: int
    decay: float
    importance: float
    similarity: float

    def __post_init__(self) -> None:
        check_least(1, " last query, which scores", window=self.window)
        check_between(0, 1, ", as a weight does", decay=self.decay, importance=self.importance)
        check_between(-1, 1, ", as a cosine does", similarity=self.similarity)

    @property
    def needs(self) -> Needs:
        """The last queries, the importance at the last compaction, and the time of comparing keys."""
        return Needs(window=self.window, carried=("importance",), compares_keys=True)

    def __call__(self, view: CacheView) -> tuple[Float[Array, "B K S"], Numbers]:
        assert view.carried is not None
        is_past = view.is_filled & (view.age >= self.window)

        def of_largest(x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            x = jnp.where(is_past, x, 0.0)
            return x / jnp.maximum(x.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)

        importance = of_largest(largest_attention(view, self.window))
        importance = jnp.where(is_past, jnp.maximum(importance, self.decay * view.carried["importance"]), 0.0)
        redundancy = of_largest(redundancy_of(view, self.similarity))
        return less(self.importance * importance, (1 - self.importance) * redundancy), {"importance": importance}


def largest_attention(view: CacheView, window: int) -> Float[Array, "B K S"]:
    """The mean over the last `window` queries of the largest softmax among a KV head's query heads, over all slots seen.

    The softmax has the learned sink of a model with such in its denominator.
    """
    assert view.query is not None
    batch, heads, _, size = view.key.shape
    query = view.query[:, :, -window:].reshape(batch, heads, -1, window, size)
    is_seen, sink = is_query(view, window), sinks_by_group(view)

    def add(total: Float[Array, "B K S"], w: Array) -> tuple[Float[Array, "B K S"], None]:
        logits = size**-0.5 * jnp.einsum(
            "bkgh,bksh->bkgs", query[:, :, :, w], view.key, precision="highest", preferred_element_type=jnp.float32
        )
        if view.log_weight is not None:
            logits += view.log_weight[:, :, None]
        where = view.is_filled & (view.age >= window - 1 - w)
        share = attention(logits, where[:, :, None], None if sink is None else sink[..., None]).max(axis=2)
        return total + jnp.where(is_seen[:, w, None, None], share, 0.0), None

    total, _ = jax.lax.scan(add, jnp.zeros(view.position.shape), jnp.arange(window, dtype=jnp.int32))
    return total / jnp.maximum(is_seen.sum(axis=-1), 1).astype(jnp.float32)[:, None, None]


@recipe(
    "G-KV",
    idea="as `r_kv`, but a token's importance fades from compaction to compaction instead of being forgotten",
    arxiv="2512.00504",
)
def g_kv(
    budget: int,
    interval: int = 128,
    window: int = 16,
    decay: float = 0.8,
    importance: float = 0.5,
    similarity: float = 0.5,
    sinks: int = 0,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """G-KV with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The last `window` tokens always stay. Each slot carries its importance from one compaction to the next: 4 bytes a slot. The
    first `sinks` tokens, the last `recent` (by default the window) and, with `protect_prompt`, the prompt are never evicted.

    Rule:
      score = importance * F - (1 - importance) * R / max R
      F = max(A / max A, decay * F of the last compaction), where F was 0 for the slots of the window and for later ones
      A = mean over the last `window` queries of the largest, among the query heads of the KV head, of
          softmax over all slots that the query saw of q . key / sqrt(H)
      R = R-KV's: softmax over all slots of the mean cosine of the slot's key to the other keys,
          without the most recent look-alike (cosine above `similarity`) of each key
      both maxima run over the slots before the window

    Departures:
      - As in R-KV's rule, one look-alike of a key is left out, the last of all. The authors' first kernel left one out in
        each block of 64 slots, which they have since corrected. A key without a look-alike exempts none.
      - Of the authors' updates, this is the maximum; their mean and sum are left out.
      - A compaction is due by the row's own generated tokens.

    Raises:
      ValueError: a setting out of its range, or a budget smaller than the window.

    >>> g_kv(budget=256).needs.carried
    ('importance',)
    """
    score = RememberedImportance(window, decay, importance, similarity)
    evict = Evict(score, **protection(window, sinks, recent, protect_prompt))
    return Policy("g_kv", evict, Every(budget, interval))
