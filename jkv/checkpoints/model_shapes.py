"""The shape of a model without its weights, for `jkv.plan` and the benchmarks: from a name, a TOML file or a checkpoint.

The models of the papers are `pallas_kernels/real_models/*.toml`, installed with the package, so that planning works offline.
"""

from pathlib import Path
from typing import Any

from jkv.checkpoints.gguf_files import is_gguf, read_gguf_config
from jkv.checkpoints.gguf_header import read_header
from jkv.checkpoints.loading import fetch, find_folder, read_config
from jkv.checkpoints.saved_config import read_fields
from jkv.errors import refused
from jkv.model.params import Model, ModelConfig, Params
from jkv.text_files import read_toml
from pallas_kernels import models

SHAPES = models.FILES


def find_shape(model: Any) -> tuple[str, ModelConfig]:
    """The name and the configuration of a model.

    A model is a `Model`, `Params`, a `ModelConfig`, a known name, a TOML file, a checkpoint folder, a GGUF file or a
    hub name. Of a folder only config.json is read, of a GGUF file only its header.

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
        rule = f"A model must be a jkv.Model, jkv.Params, a jkv.ModelConfig, a name or a path; got {model!r}."
        raise refused(rule, model="wrong_type")
    if str(model) in SHAPES:
        return str(model), read_shape(SHAPES[str(model)])
    if Path(model).suffix == ".toml":
        return Path(model).stem, read_shape(Path(model))
    if is_gguf(model):
        return Path(model).stem, read_gguf_config(read_header(Path(model)))
    try:
        folder = find_folder(model) or fetch(str(model), ["config.json"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} Or a TOML file of a model's shape.") from None
    return Path(model).name, read_config(folder)


def read_shape(file: Path) -> ModelConfig:
    """The `ModelConfig` in a TOML file.

    Raises:
      ValueError: the file is not TOML, or has other fields than `ModelConfig`.
    """
    try:
        fields = read_toml(file)
        fields.pop("card", None)  # `jkv.checkpoints.cards`
        return read_fields(fields, "shape")
    except (ValueError, TypeError) as error:
        rule = f"{file} must have the fields of a jkv.ModelConfig as TOML: {error}. Correct the file."
        raise refused(rule, model="invalid") from error
