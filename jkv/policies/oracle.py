"""The oracle: keeps what will be read most, which it knows because the text has been decoded before.

No method can do this. It shows what a budget allows: a row above all others in a table (`jkv.testing.oracle`).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jkv.errors import refused
from jkv.eviction.calibration import Calibration
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.view import CacheView
from jkv.model.params import ModelConfig


class Reads(NamedTuple):
    """How much later queries of one text read each position, from each of E moments on; zeros beyond the text.

    The first moment is the end of the prompt, and the others follow at equal distances.
    """

    later: Float[Array, "L K E S"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FutureReads(Calibration):
    """The `Reads` of one text, as `jkv.analysis.recall.future_reads` computes them."""

    kind = Reads
    what = "The reads that an oracle knows"
    command = "jkv.testing.oracle"

    def check_shapes(self) -> None:
        if self.arrays.later.ndim != 4:
            raise refused(f"later must be [L, K, E, S]; got {self.arrays.later.shape}.", oracle="wrong_type")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {"later": (config.num_paged_layers, config.num_kv_heads, *self.arrays.later.shape[2:])}


@dataclasses.dataclass(frozen=True)
class LaterReads:
    """How much each slot will be read, by the table of the moment; moments are `interval` tokens apart."""

    interval: int
    needs = Needs(calibration=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.calibration is not None
        assert view.prompt_length is not None
        later = view.calibration.later
        moment = (view.num_seen - view.prompt_length) // self.interval
        now = jnp.take_along_axis(later, jnp.clip(moment, 0, later.shape[2] - 1)[:, None, None, None], axis=2)[:, :, 0]
        place = jnp.clip(view.position, 0, later.shape[3] - 1)
        return jnp.take_along_axis(now, place, axis=-1)


@recipe("bound", idea="keeps the slots that will be read most, which it knows from an earlier run")
def oracle(reads: FutureReads, budget: int, interval: int = 16, sinks: int = 0, recent: int = 4) -> Policy:
    """The oracle of one text with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    `interval` must be that of the moments of `reads`. The first `sinks` and the last `recent` tokens are never evicted.

    Rule:
      score = the sum over all later queries of the text of their attention to the slot, to a power, in the full cache

    Raises:
      ValueError: a setting out of its range. Reads of another model are refused when an engine meets them.
    """
    evict = Evict(LaterReads(interval), sinks=sinks, recent=recent)
    return Policy("oracle", evict, Every(budget, interval), calibration=reads)
