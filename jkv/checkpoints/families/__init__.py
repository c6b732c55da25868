"""The supported model families: one file and one line of `FAMILIES` each.

To add a family whose layers `jkv.model.decoder` can compute, write its `Family` in a file here and add it to `FAMILIES`.
"""

from jkv.checkpoints.families import (
    gemma3,
    gemma4,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    smollm3,
)
from jkv.checkpoints.family import Family
from jkv.checks import check_known

FAMILIES: dict[str, Family] = {  # by `model_type` of config.json
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "mistral": mistral.FAMILY,
    "ministral3": mistral.MINISTRAL,
    "olmo3": olmo3.FAMILY,
    "phi3": phi3.FAMILY,
    "smollm3": smollm3.FAMILY,
}


def find_family(name: str) -> Family:
    """The family with this name.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.

    >>> find_family("phi3").tensor_of("layers.1.key")
    'model.layers.1.self_attn.qkv_proj.weight'
    """
    check_known(FAMILIES, family=name)
    return FAMILIES[name]
