"""The shape of a model without its weights: what `jkv.plan` and the benchmarks ask of a name, a TOML file or a checkpoint.

The models of the papers are `pallas_kernels/real_models/*.toml`, installed with the package, so that planning works offline.
"""

import tomllib
from pathlib import Path
from typing import Any

from jkv.model.checkpoint import fetch, find_folder, read_config
from jkv.model.params import Model, ModelConfig, Params, RopeScaling
from pallas_kernels import models

SHAPES = models.FILES


def find_shape(model: Any) -> tuple[str, ModelConfig]:
    """A name and the configuration of what `jkv.load` gave, a `ModelConfig`, a known name, a TOML file, a checkpoint's folder
    or a hub name, of which config.json alone is read.

    Raises:
      FileNotFoundError: there is no such model.
      ValueError: the decoder cannot run it, or its file is bad.

    >>> find_shape("r1-qwen-1.5b")[1].width
    1536
    """
    if isinstance(model, Model | Params):
        return getattr(model, "name", "") or model.config.family, model.config
    if isinstance(model, ModelConfig):
        return model.family, model
    if not isinstance(model, str | Path):
        raise ValueError(f"A model is what jkv.load returns, a jkv.ModelConfig, a name or a path; got {model!r}.")
    if str(model) in SHAPES:
        return str(model), read_shape(SHAPES[str(model)])
    if Path(model).suffix == ".toml":
        return Path(model).stem, read_shape(Path(model))
    try:
        folder = find_folder(model) or fetch(str(model), ["config.json"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} Known without weights: {', '.join(SHAPES)}; or a TOML file of a shape.") from None
    return Path(model).name, read_config(folder)


def read_shape(file: Path) -> ModelConfig:
    """The `ModelConfig` whose fields a TOML file holds.

    Raises:
      ValueError: a file that is no TOML, or does not hold the fields of a `ModelConfig`.
    """
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
        return ModelConfig(**fields | {"rope_scaling": RopeScaling(**fields.get("rope_scaling", {}))})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{file} must hold the fields of a jkv.ModelConfig as TOML: {error}. Correct the file.") from error
