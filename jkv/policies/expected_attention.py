"""Expected Attention (arXiv 2510.00636): keeps what future queries will attend to, if they are like the last ones."""

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
from jkv.eviction.scores import attention, sinks_by_group
from jkv.eviction.view import CacheView
from jkv.model.decoder import rotate
from jkv.model.rotary import mean_turn, unrotate


@dataclasses.dataclass(frozen=True)
class ExpectedAttention:
    """The attention that a normal distribution of future queries pays to each slot, times the norm of its value.

    The learned sinks of a model with such are in the denominator of the attention.

    Attributes:
      num_queries: last queries that the mean and covariance are taken from.
      future: positions after the newest token that the queries are rotated to, on average.
      sinks: first tokens, whose queries and keys are unlike all others and are left out.
    """

    num_queries: int
    future: int
    sinks: int

    def __post_init__(self) -> None:
        check_least(1, num_queries=self.num_queries, future=self.future)

    @property
    def needs(self) -> Needs:
        """The queries, and RoPE to rotate them."""
        return Needs(window=self.num_queries, rope=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.query is not None
        assert view.rope is not None
        newest = view.num_seen[:, None]
        position = newest - self.num_queries + jnp.arange(self.num_queries, dtype=jnp.int32)
        query = unrotate(view.rope, view.query[:, :, -self.num_queries :].swapaxes(1, 2), position)
        cos, sin = mean_turn(view.rope, newest + jnp.arange(self.future, dtype=jnp.int32))
        query = rotate(query, cos, sin)  # [B, W, N, H], each rotated to all future positions on average
        is_used = position >= jnp.minimum(self.sinks, newest - 1)

        def of_row(query: Array, is_used: Array, key: Array, is_filled: Array, sink: Array | None) -> Float[Array, "K S"]:
            heads, _, size = key.shape
            grouped = query.reshape(len(query), heads, -1, size)
            logits = jnp.einsum("wkgh,ksh->kgws", grouped, key.astype(jnp.float32), precision="highest") * size**-0.5
            mean = logits.mean(axis=2, where=is_used[:, None])
            variance = logits.var(axis=2, where=is_used[:, None])  # key . covariance . key / H
            expected = attention(mean + variance / 2, is_filled[:, None], sink)
            return expected.mean(axis=1)

        is_old = view.is_filled & (view.position >= self.sinks)
        sink = sinks_by_group(view)
        rows = query, is_used, view.key, is_old, None if sink is None else sink[..., None]
        share = jax.lax.map(lambda row: of_row(*row), rows)  # of one row at once: [K, G, W, S]
        return share * jnp.linalg.norm(view.value.astype(jnp.float32), axis=-1)


@recipe(
    "Expected Attention",
    idea="keeps what future queries will attend to, if they are distributed like the last ones; weighs by the norms of values",
    arxiv="2510.00636",
)
def expected_attention(
    budget: int,
    interval: int = 128,
    num_queries: int = 64,
    future: int = 512,
    sinks: int = 4,
    recent: int = 0,
    protect_prompt: bool = False,
) -> Policy:
    """Expected Attention with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    The first `sinks` tokens, the last `recent` and, with `protect_prompt`, the prompt are never evicted.

    Rule:
      m, C = mean and covariance of the last `num_queries` queries before RoPE, each rotated to the next `future` positions
          and averaged over them; the queries of sinks are left out
      e = softmax over the slots after the sinks of (m . key / sqrt(H) + key . C . key / (2 H)), for each query head
      score = mean of e over the query heads * |value|

    Departures:
      - The released code (kvpress) takes m and C from the hidden states of the whole prompt, or of a buffer while decoding.
        Here they are of the last queries, from which RoPE is removed; a key and its query are rounded in between.
      - It works for models with a norm of queries, too, which kvpress refuses.

    Raises:
      ValueError: a setting out of its range, or a budget that does not hold the sinks and the recent tokens.

    >>> expected_attention(budget=1024).needs
    Needs(window=64, rope=True)
    """
    score = ExpectedAttention(num_queries, future, sinks)
    evict = Evict(score, sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("expected_attention", evict, Every(budget, interval))
