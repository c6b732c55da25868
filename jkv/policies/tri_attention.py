"""TriAttention (arXiv 2604.04921): keeps the keys that the mean query of a calibrated model will attend to from afar."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.eviction.calibration import QueryStatistics
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.view import CacheView
from jkv.model.decoder import rotate
from jkv.model.rotary import mean_turn, pair_norms
from pallas_kernels.largest_slots import ROUNDING

DISTANCES = tuple(2**i for i in range(17))  # positions ahead: 1 to 65,536


@dataclasses.dataclass(frozen=True)
class TrigonometricSeries:
    """How near each key is to the mean query at several distances ahead, in standard deviations over the slots that compete.

    Attributes:
      protects_prompt: whether the prompt's slots do not compete.
    """

    protects_prompt: bool
    needs = Needs(rope=True, calibration=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.rope is not None
        assert view.calibration is not None
        mean, modulus = view.calibration
        half = view.rope.frequency.shape[-1]
        # A cached key holds its own rotation, so the sum of cosines is its product with the query, rotated to each distance.
        cos, sin = mean_turn(view.rope, view.num_seen[:, None] + jnp.asarray(DISTANCES, jnp.int32))
        ahead = rotate(mean[:, None], cos, sin)[:, 0]
        spread = (modulus - pair_norms(mean, half)) * view.rope.factor[:, None, None]

        def of_row(ahead: Float[Array, "N H"], spread: Float[Array, "N half"], key: Float[Array, "K S H"]) -> Array:
            key = key.astype(jnp.float32)
            ahead, spread = (x.reshape(len(key), -1, x.shape[-1]) for x in (ahead, spread))
            return dot(ahead, key) + dot(spread, pair_norms(key, half))

        dot = functools.partial(jnp.einsum, "kgh,ksh->kgs", precision="highest")
        series = jax.lax.map(lambda row: of_row(*row), (ahead, spread, view.key))  # float32 keys of one row at once
        competes = view.is_filled
        if self.protects_prompt:
            assert view.prompt_length is not None
            competes &= view.position >= view.prompt_length[:, None, None]
        where = competes[:, :, None]
        centred = series - series.mean(axis=-1, where=where, keepdims=True)
        deviation = series.std(axis=-1, where=where, ddof=1, keepdims=True)  # NaN for a single slot
        size = jnp.abs(series).max(axis=-1, where=where, initial=0.0, keepdims=True)
        has_spread = deviation > ROUNDING * size  # else all keys are equal up to rounding, or there is one
        return jnp.where(has_spread, centred / jnp.where(has_spread, deviation, 1.0), 0.0).max(axis=2)


@recipe(
    "TriAttention",
    idea="keeps keys near the mean query of the model, measured once by `jkv calibrate`, at many distances ahead",
    arxiv="2604.04921",
)
def tri_attention(
    budget: int,
    statistics: QueryStatistics | Path | str,
    interval: int = 128,
    sinks: int = 0,
    recent: int = 0,
    protect_prompt: bool = True,
) -> Policy:
    """TriAttention with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    `statistics` are what `jkv.calibrate` returns, or the file that `jkv calibrate` writes. The prompt stays by default, and its
    slots count: the budget must hold it. It reads no queries, so an engine keeps none.

    Rule:
      q = mean query before RoPE, m = mean length of each of its pairs of channels, in each layer and query head
      series = mean over d = 1, 2, 4 ... 65,536 of the sum over pairs f of
                   s^2 |q_f| |k_f| cos(frequency_f * (t - p + d) + angle between q_f and k_f)
               + the sum over pairs of s^2 (m_f - |q_f|) |k_f|
          with the key k before RoPE, its position p, the length t of the sequence, and the attention factor s of RoPE
      score = the largest, over the query heads, of (series - mean) / standard deviation over the slots that may be evicted

    Departures:
      - The authors do not count the prompt in the budget. Here a budget is memory, so it counts; add the prompt's length.
      - Each KV head keeps its own slots, one of the authors' variants; their table has one set for a KV head in all layers.
      - Ties go to the earlier slot; the authors break them by noise. Keys that are equal up to rounding all score 0.
      - Channels without RoPE count as the product of the mean query and the key.

    Raises:
      ValueError: a file that holds no statistics, or a setting out of its range. Statistics of another model are refused when
        an engine meets them.
    """
    loaded = statistics if isinstance(statistics, QueryStatistics) else QueryStatistics.load(statistics)
    evict = Evict(TrigonometricSeries(protect_prompt), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("tri_attention", evict, Every(budget, interval), calibration=loaded)
