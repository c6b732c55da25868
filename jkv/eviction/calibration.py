"""What is measured of a model once, for scores that read it: arrays of each layer in a safetensors file.

The engine passes the arrays to the score (`CacheView.calibration`), and refuses arrays of another model. `QueryStatistics` are
the moments of a model's queries before RoPE.
"""

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from jkv.checks import shown
from jkv.errors import refused
from jkv.model.params import Model, ModelConfig
from jkv.reports import write_bytes
from jkv.text_files import check_file


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Arrays measured of a model, and how they were made. A subclass says which arrays.

    Attributes:
      arrays: a `kind`, of float32 NumPy arrays that begin with the layer.
      about: the model, the number of tokens, the RoPE and a digest of the weights, as strings.

    Raises:
      ValueError: arrays that are not finite, or that do not fit each other.
    """

    arrays: Any
    about: dict[str, str] = dataclasses.field(default_factory=dict)

    kind: ClassVar[Any]  # the NamedTuple of the arrays
    what: ClassVar[str]  # in errors
    command: ClassVar[str] = ""  # which makes it

    @property
    def remedy(self) -> str:
        """What to do about one of another model."""
        return f"Make them with `{self.command}`."

    def __post_init__(self) -> None:
        self.check_shapes()
        if not all(np.isfinite(array).all() for array in self.arrays):
            raise refused(f"{self.what} must be finite; these are not. Calibrate again.", calibration="out_of_range")

    def check_shapes(self) -> None:
        """Refuses arrays that do not fit each other."""
        raise NotImplementedError

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The shapes that the arrays must have for a model, by name."""
        raise NotImplementedError

    def traits(self, model: Model, is_trained: bool) -> dict[str, Any]:
        """What the calibration must have for a model, by name."""
        wanted: dict[str, Any] = self.shapes_for(model.config) | {"RoPE": rope_words(model.config)}
        return wanted if is_trained else wanted | {"weights with the digest": model.digest}

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the content: equal for equal arrays and records."""
        content = hashlib.blake2s(repr(sorted(self.about.items())).encode(), digest_size=8)
        for x in self.arrays:
            content.update(np.ascontiguousarray(x).tobytes())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        size = f"{len(self.arrays[0])} layers, {self.about.get('tokens', '?')} tokens"
        return f"{type(self).__name__}({size}, {self.digest})"

    def save(self, path: Path | str) -> None:
        """Writes a safetensors file."""
        from safetensors.numpy import save

        write_bytes(path, save(self.arrays._asdict(), metadata=self.about))

    @classmethod
    def load(cls, path: Path | str) -> Any:
        """Reads a file of `save`.

        Raises:
          ValueError: there is no such file, or it holds something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            check_file(Path(path))
            with safe_open(str(path), framework="numpy") as file:
                arrays = cls.kind(*(file.get_tensor(name).astype(np.float32) for name in cls.kind._fields))
                return cls(arrays, dict(file.metadata() or {}))
        except (OSError, TypeError, ValueError, SafetensorError) as error:
            why = str(error).replace(str(path), "it").rstrip(".")[:300]
            rule = f"{cls.what} must be a safetensors file made by `{cls.command}`; {shown(str(path))}: {why}."
            raise refused(rule, path="invalid") from error

    def check(self, name: str, model: Model, is_trained: bool = False) -> None:
        """Refuses what is of another model: of other shapes or RoPE, or of other weights unless those are being trained.

        Raises:
          ValueError: what differs.
        """
        wanted = self.traits(model, is_trained)
        got: dict[str, Any] = {field: array.shape for field, array in self.arrays._asdict().items()}
        got |= {"RoPE": self.about.get("rope"), "weights with the digest": self.about.get("weights")}
        for trait, value in wanted.items():
            if got[trait] != value:
                rule = f"{self.what} must be of this model, with {trait} {value}; {name} has {shown(got[trait])}. {self.remedy}"
                raise refused(rule, model="conflict")


def rope_words(config: ModelConfig) -> Any:
    """The RoPE of a model in words, equal for equal RoPE."""
    scaling = config.rope_scaling
    how = "no scaling" if scaling.kind == "default" else str(scaling).replace(", share=1.0", "")  # of before
    without = f", none in layers {list(config.layers_without_rope)}" if config.layers_without_rope else ""
    return f"theta {config.rope_theta} for {config.rotary_size or config.head_size} channels, {how}{without}"


def identity_of(model: Model) -> dict[str, str]:
    """What a calibration records of its model, to be compared when it is used."""
    return {"model": model.name, "rope": rope_words(model.config), "weights": model.digest}


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
            rule = f"mean must be [L, N, H] and modulus [L, N, half]; got {mean.shape} and {modulus.shape}."
            raise refused(rule, calibration="wrong_type")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        heads = config.num_paged_layers, config.num_query_heads
        return {"mean": (*heads, config.head_size), "modulus": (*heads, (config.rotary_size or config.head_size) // 2)}
