"""LagKV (arXiv 2504.04704): keeps tokens whose keys and values vary most against the keys and values of the next chunk."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.checks import check_least
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.view import CacheView
from pallas_kernels.largest_slots import ROUNDING


@dataclasses.dataclass(frozen=True)
class LagRelativeSpread:
    """The rank of a slot in its chunk, below 1, and at least 1 in the last chunks: the docstring of `lag_kv` has the rule."""

    lag: int
    sinks: int
    needs = Needs()

    def __post_init__(self) -> None:
        check_least(2, " slots of a chunk", lag=self.lag)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        batch, heads, num_slots = view.position.shape
        slot = jnp.arange(num_slots, dtype=jnp.int32)
        end = jnp.where(view.is_filled, slot + 1, 0).max(axis=-1, keepdims=True)
        chunk = (slot - self.sinks) // self.lag
        is_scored = (chunk >= 0) & (self.sinks + (chunk + 2) * self.lag <= end)  # the next chunk is full
        newest_first = jnp.broadcast_to(1 + slot.astype(jnp.float32), view.position.shape)
        num_chunks = (num_slots - self.sinks) // self.lag
        if num_chunks < 2:
            return newest_first
        whole = slice(self.sinks, self.sinks + num_chunks * self.lag)
        by_chunk = batch, heads, num_chunks, self.lag
        is_filled = view.is_filled[:, :, whole].reshape(by_chunk)
        of_keys, of_values = (
            jax.nn.softmax(
                relative_spread(x[:, :, whole].reshape(*by_chunk, -1), is_filled), axis=-1, where=is_filled[:, :, :-1]
            )
            for x in (view.key, view.value)
        )
        rank = rank_up_to_rounding(of_keys + of_values).astype(jnp.float32).reshape(batch, heads, -1) / self.lag
        rank = jnp.pad(rank, [(0, 0), (0, 0), (self.sinks, num_slots - self.sinks - rank.shape[-1])])
        return jnp.where(is_scored, rank, newest_first)


def rank_up_to_rounding(x: Float[Array, "*N n"]) -> Int[Array, "*N n"]:
    """How many entries of a row are less, or as large up to `ROUNDING` and earlier."""
    mine, other, place = x[..., :, None], x[..., None, :], jnp.arange(x.shape[-1], dtype=jnp.int32)
    apart = mine - other
    is_tie = jnp.abs(apart) <= ROUNDING * jnp.abs(mine)
    return jnp.where(is_tie, place < place[:, None], apart > 0).sum(axis=-1, dtype=jnp.int32)


def relative_spread(x: Array, is_filled: Array) -> Array:
    """[B, K, C - 1, lag]: the standard deviation over channels of `x` [B, K, C, lag, H], scaled by the next chunk's range."""
    x, where = x.astype(jnp.float32), is_filled[..., None]
    least = jnp.where(where, x, jnp.inf).min(axis=3, keepdims=True)[:, :, 1:]
    most = jnp.where(where, x, -jnp.inf).max(axis=3, keepdims=True)[:, :, 1:]
    size = jnp.maximum(jnp.abs(most), jnp.abs(least))
    span = jnp.where(most - least > ROUNDING * size, most - least, 1.0)
    return ((jnp.where(where, x, 0.0)[:, :, :-1] - least) / span).std(axis=-1, ddof=1)


@recipe(
    "LagKV",
    idea="keeps tokens whose keys and values vary most against the chunk after theirs; reads no queries",
    arxiv="2504.04704",
)
def lag_kv(
    budget: int,
    interval: int = 128,
    lag: int | None = None,
    sinks: int = 4,
    recent: int | None = None,
    protect_prompt: bool = False,
) -> Policy:
    """LagKV with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    A chunk has `lag` slots, by default 128, or a quarter of a budget below 512. The last full chunk and what follows it have no
    later chunk to be compared with, and stay. The first `sinks` tokens, the last `recent` (by default `lag`) and, with
    `protect_prompt`, the prompt are never evicted.

    Rule:
      the slots after the sinks form chunks of `lag`, in order
      spread(x) = softmax over the chunk of the standard deviation over channels of (x - low) / (high - low),
          low and high the smallest and largest x of the channel in the next chunk
      score = the slot's rank in its chunk by spread(key) + spread(value), divided by lag;
          at least 1 for slots without a full next chunk, the newest highest

    Departures:
      - The authors keep the same share of each chunk once and for all; here the budget is fixed, so that slots which stayed
        form chunks with later ones and are compared again.
      - A channel that is constant in the next chunk, up to rounding, is only shifted, where the authors divide by zero or by
        rounding errors. Spreads that are equal up to rounding rank in the order of the slots.

    Raises:
      ValueError: a setting out of its range, or a budget that does not hold the sinks and the recent tokens.

    >>> lag_kv(budget=1024).evict.score.lag, lag_kv(budget=256).evict.score.lag
    (128, 64)
    """
    lag = max(2, min(128, budget // 4)) if lag is None else lag
    evict = Evict(
        LagRelativeSpread(lag, sinks), sinks=sinks, recent=lag if recent is None else recent, protect_prompt=protect_prompt
    )
    return Policy("lag_kv", evict, Every(budget, interval))
