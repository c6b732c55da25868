"""The model families that the decoder runs: one file each, and one line of the table.

To add a family whose layers are those of `jkv.model.decoder`, write its `Family` in a file here and add it to `FAMILIES`.
"""

from jkv.model.families import llama, phi3, qwen2, qwen3
from jkv.model.family import Family

FAMILIES: dict[str, Family] = {  # by `model_type` of config.json
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "phi3": phi3.FAMILY,
}


def find_family(name: str) -> Family:
    """The family of this name.

    Raises:
      ValueError: an unknown name; the known ones are listed.

    >>> find_family("phi3").tensor_of("layers.1.key")
    'model.layers.1.self_attn.qkv_proj.weight'
    """
    if name not in FAMILIES:
        raise ValueError(f"A model family must be one of {', '.join(FAMILIES)}; got {name!r}. Check ModelConfig.family.")
    return FAMILIES[name]
