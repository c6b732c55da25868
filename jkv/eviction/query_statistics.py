"""Statistics of a model's queries before RoPE, for scores that predict future queries (`jkv.calibrate` measures them)."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float

from jkv.eviction.calibration import Calibration
from jkv.model.params import ModelConfig


class QueryMoments(NamedTuple):
    """Moments of the queries before RoPE, of each layer, or of each batch row of a view.

    Attributes:
      mean: of the query.
      modulus: mean length of each rotated pair of channels, at least the length of the pair in `mean`.
    """

    mean: Float[Array, "L N H"]
    modulus: Float[Array, "L N half"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QueryStatistics(Calibration):
    """`QueryMoments` of a model."""

    kind = QueryMoments
    what = "Statistics of queries"
    command = "jkv calibrate"

    def check_shapes(self) -> None:
        mean, modulus = self.arrays
        if mean.ndim != 3 or modulus.shape[:-1] != mean.shape[:-1] or 2 * modulus.shape[-1] > mean.shape[-1]:
            raise ValueError(f"mean must be [L, N, H] and modulus [L, N, half]; got {mean.shape} and {modulus.shape}.")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        heads = config.num_paged_layers, config.num_query_heads
        return {"mean": (*heads, config.head_size), "modulus": (*heads, (config.rotary_size or config.head_size) // 2)}
