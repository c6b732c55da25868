"""Qwen3.5 and Qwen3.6 with a mixture of experts in every layer (35B-A3B): see `jkv.checkpoints.families.qwen3_5`.

Beside the experts that a token chooses, it goes through a block whose output a sigmoid multiplies.
"""

import dataclasses
from typing import Any

from jkv.checkpoints.families import qwen3_5, qwen3_moe
from jkv.checkpoints.json_files import integer
from jkv.model.params import ModelConfig

SHARED = {
    "gate": "mlp.shared_expert.gate_proj.weight",
    "up": "mlp.shared_expert.up_proj.weight",
    "down": "mlp.shared_expert.down_proj.weight",
    "shared_gate": "mlp.shared_expert_gate.weight",
}

STACKED = {  # all experts of a layer, as the makers store them
    **dict.fromkeys(("experts.gate", "experts.up"), "mlp.experts.gate_up_proj"),
    "experts.down": "mlp.experts.down_proj",
}


def reads(config: Any) -> dict[str, Any]:
    """Switches of `ModelConfig` from a transformers configuration.

    Raises:
      ValueError: as of the dense models.
    """
    return qwen3_5.reads(config) | {"shared_width": config.shared_expert_intermediate_size, "gates_shared": True}


def writes(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json for these switches."""
    return qwen3_5.writes(config) | {"shared_expert_intermediate_size": config.shared_width}


DENSE = qwen3_5.FAMILY
assert DENSE.multimodal is not None
FAMILY = dataclasses.replace(
    DENSE,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    has_experts=True,
    reads=reads,
    writes=writes,
    rules={**DENSE.rules, "shared_expert_intermediate_size": integer(1, 1 << 20), "norm_topk_prob": qwen3_5.only(True)},
    defaults={**DENSE.defaults, "shared_expert_intermediate_size": 512},
    absent_fields=frozenset({"intermediate_size"}),
    multimodal=dataclasses.replace(DENSE.multimodal, name="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration"),
    tensors={**DENSE.tensors, **qwen3_moe.EXPERTS, **SHARED},
    other_tensors=STACKED,
    untransposed=DENSE.untransposed | {"experts.gate", "experts.up"},
)
