"""Gates: small networks that judge each token when it is written, from the hidden state at the input of each layer.

The engine computes the gate in every step and stores one number beside each slot (`CacheView.gate`). The numbers of a file are
data; only its kind (`jkv.eviction.gate_kinds`) is compiled.
"""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from jkv.checks import shown
from jkv.eviction.calibration import Calibration
from jkv.eviction.gate_files import read_gate
from jkv.eviction.gate_kinds import WINDOWS
from jkv.model.params import Model, ModelConfig


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Gate(Calibration):
    """The weights of a gate, of one of the kinds of `jkv.eviction.gate_kinds`.

    A gate with a record of its model (`about`, which `save` keeps) is refused for other weights. A published file has no such
    record, so only its shapes are compared; it works with the weights that it was trained with.
    """

    kind = tuple(WINDOWS)
    what = "The weights of a gate"

    def __post_init__(self) -> None:
        if not isinstance(self.arrays, self.kind):
            names = ", ".join(kind.__name__ for kind in self.kind)
            raise ValueError(f"{self.what} must be one of {names}; got {shown(self.arrays)}.")
        super().__post_init__()

    @property
    def remedy(self) -> str:
        return "Use the gate that was trained for this model."

    @property
    def window(self) -> int:
        """Tokens that the gate's authors keep whatever it says."""
        return WINDOWS[type(self.arrays)]

    def __repr__(self) -> str:
        return f"Gate({type(self.arrays).__name__}, {len(self.arrays[0])} layers, {self.digest})"

    def check_shapes(self) -> None:
        sizes: dict[str, int] = {}
        for name, letters in axes_of(self.arrays).items():
            shape = getattr(self.arrays, name).shape
            if len(shape) != len(letters) or any(sizes.setdefault(x, n) != n for x, n in zip(letters, shape, strict=True)):
                raise ValueError(f"{name} must be [{', '.join(letters)}], with {shown(sizes)} so far; got {shape}.")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, int] = {}
        for name, letters in axes_of(self.arrays).items():
            sizes |= zip(letters, getattr(self.arrays, name).shape, strict=True)
        sizes |= {"L": config.num_layers, "K": config.num_kv_heads, "G": config.group_size, "D": config.width}
        return {name: tuple(sizes[x] for x in letters) for name, letters in axes_of(self.arrays).items()}

    def traits(self, model: Model, is_trained: bool) -> dict[str, Any]:
        wanted = super().traits(model, is_trained)
        del wanted["RoPE"]  # no gate reads positions
        if "weights" not in self.about:
            wanted.pop("weights with the digest", None)
        return wanted

    @classmethod
    def load(cls, path: Path | str) -> "Gate":
        """Reads a safetensors file: of `save`, or with the tensors that the gate's authors publish.

        Tensor names and shapes decide which kind it is: those that `save` writes (the fields of a kind), or, for layer i,

          DMS           model.layers.i.self_attn.dms_proj_alpha.weight [K, D], .bias [K] (may be absent),
                        model.layers.i.self_attn.dms_proj_alpha_norm.weight [D]
          KVzap linear  layers.i.weight [K, D], layers.i.bias [K]
          KVzap MLP     layers.i.0.weight [I, D], layers.i.0.bias [I], layers.i.2.weight [K, I], layers.i.2.bias [K]
          Fast KVzip    layers.i.q_proj.weight [K*G*E, D], .q_proj.bias [K*G*E], .k_proj.weight [K*E, D], .q_norm.weight [E],
                        .k_norm.weight [E], .k_base [K, 1, I, E], .b [K, 1, G]

        Raises:
          ValueError: there is no such file, or it holds something else. Pickles (`.pt`) are never opened.
        """
        arrays, about = read_gate(Path(path), cls.what)
        try:
            return cls(arrays, about)
        except ValueError as error:
            raise ValueError(f"{cls.what} must fit each other; {shown(str(path))}: {error}") from error


def axes_of(arrays: Any) -> dict[str, list[str]]:
    """The axes of each array of a kind, by name, from their annotations."""
    hints: dict[str, Any] = typing.get_type_hints(type(arrays), include_extras=True)
    return {name: hints[name].dim_str.split() for name in arrays._fields}
