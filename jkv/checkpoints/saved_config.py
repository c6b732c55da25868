"""Checks the fields of a `ModelConfig` in jkv.json or in a TOML file of a model's shape, before anything is built from them.

The bounds are the same as for config.json (`jkv.checkpoints.family`): far above real models, and low enough that nothing sized
by a field is large.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jkv.checkpoints.architectures import ROPE_FIELDS
from jkv.checkpoints.families import FAMILIES
from jkv.checkpoints.family import EVEN, MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, RULES, SHARE, THETA, TOKEN
from jkv.checkpoints.json_files import (
    CORRECT,
    OBJECT,
    SWITCH,
    TEXT,
    Rule,
    at_least,
    check_fields,
    integer,
    list_of,
    nullable,
    shown,
)
from jkv.errors import refused
from jkv.model.delta_weights import DeltaNet
from jkv.model.params import ModelConfig, RopeScaling

HEADS, WIDTH = RULES["num_attention_heads"], integer(0, 1 << 20)
NUMBER = at_least(-1e6, 1e12)
LAYERS = list_of(integer(0, MAX_LAYERS - 1), MAX_LAYERS)
KINDS: Mapping[Any, Rule] = {  # the rule of a field of each type, where it has none of its own
    bool: SWITCH,
    int: WIDTH,
    float: at_least(0, 1e12),
    str: TEXT,
    float | None: nullable(NUMBER),
    tuple[int, ...]: LAYERS,
    tuple[float, ...]: list_of(at_least(0.01, 1e6), 2048),
    RopeScaling: OBJECT,
    RopeScaling | None: nullable(OBJECT),
    DeltaNet | None: nullable(OBJECT),
}


def one_of(*names: str) -> Rule:
    """One of these strings."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names)


OWN = {
    "family": one_of(*FAMILIES),
    "vocab_size": RULES["vocab_size"],
    "width": RULES["hidden_size"],
    "num_layers": RULES["num_hidden_layers"],
    "num_query_heads": HEADS,
    "num_kv_heads": HEADS,
    "head_size": EVEN,
    "mlp_width": RULES["intermediate_size"],
    "max_positions": RULES["max_position_embeddings"],
    "rope_theta": THETA,
    "rotary_size": integer(0, 4096),
    "window": integer(0, MAX_POSITIONS),
    "window_theta": nullable(THETA),
    "window_head_size": integer(0, 4096),
    "window_kv_heads": integer(0, 1 << 12),
    "norm_epsilon": RULES["rms_norm_eps"],
    "activation": one_of("silu", "gelu_tanh"),
    "num_sharing_layers": integer(0, MAX_LAYERS - 1),
    "end_ids": list_of(TOKEN, 1024),
    "num_experts": integer(0, MAX_EXPERTS),
    "num_active_experts": integer(0, MAX_EXPERTS),
    "num_own_experts": integer(0, MAX_EXPERTS),
    "num_dense_layers": integer(0, MAX_LAYERS),
    "num_expert_groups": integer(1, MAX_EXPERTS),
    "num_active_groups": integer(1, MAX_EXPERTS),
}
OF_ROPE = {
    "kind": one_of(*(kind for kind in ROPE_FIELDS if kind != "dynamic")),
    "factor": at_least(1e-6, 1e6),
    "original_max_position": integer(0, MAX_POSITIONS),
    "attention_factor": at_least(0.01, 100),
    "share": SHARE,
}
OF_DELTA = {
    "num_key_heads": HEADS,
    "num_value_heads": HEADS,
    "key_size": integer(1, 4096),
    "value_size": integer(1, 4096),
    "taps": integer(1, 64),
}


def read_fields(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """The `ModelConfig` with these fields, lists for tuples and objects for records; errors begin with `where`.

    Raises:
      ValueError: a field is unknown or missing, breaks its rule, or contradicts another one.
    """
    check_record(fields, ModelConfig, OWN, where)
    for name, record, rules in (
        ("rope_scaling", RopeScaling, OF_ROPE),
        ("window_scaling", RopeScaling, OF_ROPE),
        ("delta_net", DeltaNet, OF_DELTA),
    ):
        if fields.get(name) is not None:
            check_record(fields[name], record, rules, f"{where}: {name}")
    config = ModelConfig.of(fields)
    for holds, rule in relations(config):
        if not holds:
            raise refused(f"{where}: {rule}. {CORRECT}", file="invalid")
    return config


def check_record(fields: Mapping[str, Any], record: type, own: Mapping[str, Rule], where: str) -> None:
    """Checks each field of a dataclass: by its own rule, or else by that of its type."""
    known = {field.name: field for field in dataclasses.fields(record)}
    if unknown := sorted(set(fields) - set(known)):
        rule = f"{where}: every field must be one of {record.__name__}, got also {shown(unknown)}. {CORRECT}"
        raise refused(rule, **{unknown[0]: "unknown_name"})
    rules = {name: own[name] if name in own else KINDS[field.type] for name, field in known.items()}
    check_fields(fields, rules, where, [name for name, field in known.items() if field.default is dataclasses.MISSING])


def relations(config: ModelConfig) -> list[tuple[bool, str]]:
    """The rules between fields, and whether each holds."""
    c = config
    windows, states, ropeless = c.window_layers, c.state_layers, c.layers_without_rope
    rotated = c.rotary_size or c.head_size
    layers = {"window_layers": windows, "state_layers": states, "layers_without_rope": ropeless, "dense_layers": c.dense_layers}
    odd = [name for name, own in layers.items() if list(own) != sorted({layer for layer in own if layer < c.num_layers})]
    owned = range(c.num_layers - c.num_sharing_layers)
    kinds = {layer in windows for layer in owned} >= {layer in windows for layer in range(c.num_layers)}
    groups, active = c.num_expert_groups, c.num_active_experts
    heads = {c.num_kv_heads, c.window_kv_heads or c.num_kv_heads}
    factors = [factors for x in (c.rope_scaling, c.window_scaling) if x for factors in (x.short_factor, x.long_factor)]
    ropes = [x for x in (c.rope_scaling, c.window_scaling) if x]
    delta = c.delta_net
    return [
        (
            all(c.num_query_heads % count == 0 for count in heads),
            f"num_query_heads must be a multiple of KV heads, got {c.num_query_heads}",
        ),
        (
            rotated % 2 == 0 and rotated <= c.head_size,
            f"rotary_size must be even and at most head_size={c.head_size}, got {rotated}",
        ),
        (c.window_head_size % 2 == 0, f"window_head_size must be even, got {c.window_head_size}"),
        (not odd, f"{', '.join(odd)} must be ascending indices below num_layers={c.num_layers}"),
        (not {*windows} & {*states}, "a layer must not be in window_layers and in state_layers"),
        (len({*windows, *states}) < c.num_layers, "a layer must have full attention, for policies to act on"),
        (bool(windows) == (c.window > 0), f"window must be above 0 if and only if there are window_layers, got {c.window}"),
        (bool(states) == (delta is not None), "delta_net must be given if and only if there are state_layers"),
        (
            delta is None or delta.num_value_heads % delta.num_key_heads == 0,
            "delta_net must have value heads for each key head",
        ),
        (
            len(owned) > 0 and kinds,
            f"num_sharing_layers must leave a layer of each kind, got {c.num_sharing_layers} of {c.num_layers}",
        ),
        (all(index < c.vocab_size for index in c.end_ids), f"end_ids must be below vocab_size={c.vocab_size}, got {c.end_ids}"),
        (
            (active > 0) == (c.num_experts > 0) and active <= c.num_experts,
            f"num_active_experts must be at most num_experts={c.num_experts}, got {active}",
        ),
        (
            c.num_own_experts <= c.num_experts,
            f"num_own_experts must be at most num_experts={c.num_experts}, got {c.num_own_experts}",
        ),
        (
            groups == 1 or c.num_experts % groups == 0,
            f"num_expert_groups must divide num_experts={c.num_experts}, got {groups}",
        ),
        (
            c.num_active_groups <= groups,
            f"num_active_groups must be at most num_expert_groups={groups}, got {c.num_active_groups}",
        ),
        (
            c.num_dense_layers <= c.num_layers,
            f"num_dense_layers must be at most num_layers={c.num_layers}, got {c.num_dense_layers}",
        ),
        (
            all(len(own) in (0, rotated // 2) for own in factors),
            f"short_factor and long_factor must have a number for each of the {rotated // 2} rotated pairs of channels",
        ),
        (
            all(x.original_max_position > 0 for x in ropes if x.kind in ("llama3", "yarn", "longrope")),
            "original_max_position must be above 0 for this kind of RoPE, got 0",
        ),
        (
            all(x.short_factor and x.long_factor for x in ropes if x.kind == "longrope"),
            "longrope needs short_factor and long_factor",
        ),
    ]
