"""Statistics of a model's queries before RoPE, calibrated once for each model, for scores that predict future queries.

`jkv.calibrate` and `jkv calibrate` measure them, a safetensors file holds them, and the engine passes them to the score.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jkv.checks import shown
from jkv.model.params import Model, ModelConfig
from jkv.reports import write_bytes
from jkv.text_files import check_file


class QueryMoments(NamedTuple):
    """Moments of the queries before RoPE, of each layer, or of each batch row of a view.

    Attributes:
      mean: of the query.
      modulus: mean length of each rotated pair of channels, at least the length of the pair in `mean`.
    """

    mean: Float[Array, "L N H"]
    modulus: Float[Array, "L N half"]


@dataclasses.dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Statistics of a model's queries, and how they were made.

    Attributes:
      moments: float32 NumPy arrays.
      about: the model, the number of tokens, the RoPE and a digest of the weights, as strings.

    Raises:
      ValueError: arrays that are not finite, or whose shapes do not fit each other.
    """

    moments: Any  # QueryMoments
    about: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        mean, modulus = self.moments
        if mean.ndim != 3 or modulus.shape[:-1] != mean.shape[:-1] or 2 * modulus.shape[-1] > mean.shape[-1]:
            raise ValueError(f"mean must be [L, N, H] and modulus [L, N, half]; got {mean.shape} and {modulus.shape}.")
        if not (np.isfinite(mean).all() and np.isfinite(modulus).all()):
            raise ValueError("Statistics of queries must be finite; these are not. Calibrate again.")

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the content: equal for equal statistics."""
        content = hashlib.blake2s(repr(sorted(self.about.items())).encode(), digest_size=8)
        for x in self.moments:
            content.update(np.ascontiguousarray(x).tobytes())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueryStatistics) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        layers, heads, _ = self.moments.mean.shape
        return f"QueryStatistics({layers} layers, {heads} heads, {self.about.get('tokens', '?')} tokens, {self.digest})"

    def save(self, path: Path | str) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save

        write_bytes(path, save(self.moments._asdict(), metadata=self.about))


def load_statistics(path: Path | str) -> QueryStatistics:
    """Reads a file of `QueryStatistics.save`.

    Raises:
      ValueError: there is no such file, or it has no statistics.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_file(Path(path))
        with safe_open(str(path), framework="numpy") as file:
            moments = QueryMoments(*(file.get_tensor(name).astype(np.float32) for name in QueryMoments._fields))
            return QueryStatistics(moments, dict(file.metadata() or {}))
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        why = str(error).replace(str(path), "it").rstrip(".")[:300]
        raise ValueError(
            f"Statistics of queries must be a safetensors file made by `jkv calibrate`; {shown(str(path))}: {why}."
        ) from error


def rope_words(config: ModelConfig) -> str:
    """The RoPE of a model in words, equal for equal RoPE."""
    scaling = config.rope_scaling
    how = "no scaling" if scaling.kind == "default" else str(scaling)
    return f"theta {config.rope_theta} for {config.rotary_size or config.head_size} channels, {how}"


def identity_of(model: Model) -> dict[str, str]:
    """What statistics record of their model, to be compared when they are used."""
    return {"model": model.name, "rope": rope_words(model.config), "weights": model.digest}


def check_statistics(name: str, statistics: QueryStatistics, model: Model, is_trained: bool = False) -> None:
    """Refuses statistics of another model: of another shape or RoPE, or of other weights unless those are being trained.

    Raises:
      ValueError: what differs.
    """
    (layers, heads, size), config = statistics.moments.mean.shape, model.config
    half = (config.rotary_size or config.head_size) // 2
    shape = (layers, heads, size, statistics.moments.modulus.shape[-1])
    wanted_shape = (config.num_layers, config.num_query_heads, config.head_size, half)
    traits = [
        ("layers, heads, head size and rotated pairs", shape, wanted_shape),
        ("RoPE", statistics.about.get("rope"), rope_words(config)),
    ]
    if not is_trained:
        traits.append(("weights with the digest", statistics.about.get("weights"), model.digest))
    for trait, got, wanted in traits:
        if got != wanted:
            raise ValueError(
                f"{name}'s statistics must be of this model, with {trait} {wanted}; got {shown(got)}. Make them with "
                "`jkv calibrate`."
            )
