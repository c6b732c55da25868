"""The fields of config.json about mixtures of experts: their rules, how they become a `ModelConfig`, and back.

Families differ in the names, and in whether their layers may also have other feed-forward blocks.
`jkv.checkpoints.architectures` reads all other fields.
"""

from typing import Any

from jkv.checkpoints.config_rules import MAX_EXPERTS, MAX_LAYERS
from jkv.checkpoints.family import Family
from jkv.checkpoints.json_files import SWITCH, Rule, at_least, integer, list_of, nullable, number
from jkv.model.params import ModelConfig

COUNT = integer(1, MAX_EXPERTS)
COUNT_RULES = {"num_experts": COUNT, "num_local_experts": COUNT, "num_experts_per_tok": COUNT}
WIDTH_RULES = {"moe_intermediate_size": integer(1, 1 << 20), "norm_topk_prob": SWITCH}
SPARSE_RULES = {  # of families that may have layers without experts, but where each layer has them here
    "decoder_sparse_step": integer(1, MAX_LAYERS),
    "mlp_only_layers": nullable(list_of(integer(0, MAX_LAYERS), MAX_LAYERS)),
}
SIGMOID_RULES = {  # of families with the router of DeepSeek-V3
    "n_routed_experts": COUNT,
    "num_experts_per_tok": COUNT,
    "n_shared_experts": COUNT,
    "n_group": COUNT,
    "topk_group": COUNT,
    "routed_scaling_factor": number(0, 1e6),
    "first_k_dense_replace": integer(0, MAX_LAYERS),
}
SWIGLU_RULES = {"swiglu_limit": at_least(0.01, 1e6), "swiglu_alpha": at_least(0.01, 1e6)}  # of families that bound SwiGLU


def expert_rules(family: Family) -> dict[str, Rule]:
    """The rules of the fields about experts that are read for a family; it ignores or refuses others."""
    if not family.has_experts:
        return {}
    rules = SIGMOID_RULES if family.routes_by_sigmoid else COUNT_RULES
    if family.has_expert_width:
        rules = rules | WIDTH_RULES | ({} if family.routes_by_sigmoid else SPARSE_RULES)
    return rules | (SWIGLU_RULES if family.swiglu_limit else {})


def required_fields(family: Family) -> tuple[str, ...]:
    """The fields about experts that a config.json must have."""
    return (family.expert_count, "num_experts_per_tok", family.expert_width) if family.has_experts else ()


def read_experts(config: Any, family: Family) -> dict[str, Any]:
    """The fields of a `ModelConfig` about experts, of a transformers configuration."""
    if not family.has_experts:
        return {}
    fields = {
        "num_experts": getattr(config, family.expert_count),
        "num_active_experts": config.num_experts_per_tok,
        "normalises_experts": getattr(config, "norm_topk_prob", True),
        "expert_bias": family.expert_bias,
        "swiglu_limit": getattr(config, "swiglu_limit", family.swiglu_limit),
        "swiglu_alpha": getattr(config, "swiglu_alpha", family.swiglu_alpha),
    }
    if not family.routes_by_sigmoid:
        return fields
    return fields | {
        "routes_by_sigmoid": True,
        "num_dense_layers": config.first_k_dense_replace,
        "dense_width": config.intermediate_size if config.first_k_dense_replace else 0,
        "shared_width": config.n_shared_experts * config.moe_intermediate_size,
        "num_expert_groups": config.n_group,
        "num_active_groups": config.topk_group,
        "route_scale": float(config.routed_scaling_factor),
    }


def write_experts(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The fields of config.json about experts."""
    if not (family.has_experts and config.num_experts):
        return {}
    fields: dict[str, Any] = {
        family.expert_count: config.num_experts,
        "num_experts_per_tok": config.num_active_experts,
        family.expert_width: config.mlp_width,
    }
    if family.has_expert_width:
        fields["norm_topk_prob"] = config.normalises_experts
    if config.swiglu_limit:
        fields |= {"swiglu_limit": config.swiglu_limit, "swiglu_alpha": config.swiglu_alpha}
    if config.routes_by_sigmoid:
        fields |= {
            "intermediate_size": config.dense_width or config.mlp_width,
            "first_k_dense_replace": config.num_dense_layers,
            "n_shared_experts": config.shared_width // config.mlp_width,
            "n_group": config.num_expert_groups,
            "topk_group": config.num_active_groups,
            "routed_scaling_factor": config.route_scale,
        }
    return fields


def check_experts(config: Any, family: Family) -> list[tuple[bool, str]]:
    """The rules between the fields about experts of a transformers configuration, and whether each holds."""
    if not family.has_experts:
        return []
    name, count, active = family.expert_count, getattr(config, family.expert_count), config.num_experts_per_tok
    rules = [(active <= count, f"num_experts_per_tok must be at most {name}={count}, got {active}")]
    if not family.routes_by_sigmoid:
        dense, sparse_step = getattr(config, "mlp_only_layers", None), getattr(config, "decoder_sparse_step", 1)
        is_sparse = sparse_step == 1 and not dense
        got = f"decoder_sparse_step={sparse_step} and mlp_only_layers={dense}"
        return [*rules, (is_sparse, f"every layer must have experts (decoder_sparse_step 1, no mlp_only_layers), got {got}")]
    groups, chosen, first = config.n_group, config.topk_group, config.first_k_dense_replace
    divides = groups == 1 or (count % groups == 0 and count // groups >= 2)
    return [
        *rules,
        (divides, f"{name}={count} must be n_group equal groups of at least 2 experts, got n_group={groups}"),
        (chosen <= groups, f"topk_group must be at most n_group={groups}, got {chosen}"),
        (
            active <= chosen * count // groups,
            f"num_experts_per_tok={active} experts must be in topk_group={chosen} of n_group={groups} groups of {name}={count}",
        ),
        (
            first < config.num_hidden_layers,
            f"first_k_dense_replace must be below num_hidden_layers={config.num_hidden_layers}, got {first}",
        ),
    ]
