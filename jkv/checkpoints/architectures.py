"""Converts config.json to a `ModelConfig` and back, and refuses by name every feature that the decoder does not support. Of a
multimodal model, it finds the text model.

The differences between families are in `jkv.checkpoints.families`. `jkv.checkpoints.loading` reads and writes the files.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jkv.checkpoints.families import FAMILIES, find_family
from jkv.checkpoints.family import (
    FULL,
    MAX_EXPERTS,
    MAX_LAYERS,
    NAMES,
    QK_NORM_RULES,
    REQUIRED,
    ROPE,
    ROPELESS_RULES,
    RULES,
    WINDOWED,
    Family,
)
from jkv.checkpoints.fp8_tensors import fp8_block
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
    number,
    shown,
)
from jkv.checkpoints.packed_tensors import packing_of
from jkv.checkpoints.settings import BESIDE_KINDS, kind_of_rope, settings_of
from jkv.checkpoints.unread_fields import check_unread
from jkv.errors import refused
from jkv.model.params import ModelConfig, RopeScaling

COUNT = integer(1, MAX_EXPERTS)
COUNT_RULES = {"num_experts": COUNT, "num_local_experts": COUNT, "num_experts_per_tok": COUNT}
WIDTH_RULES = {"moe_intermediate_size": integer(1, 1 << 20), "norm_topk_prob": SWITCH}
SPARSE_RULES = {  # of families that list their layers without experts
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
        dense = dense_layers(config)
        return fields | {"dense_layers": dense, "dense_width": config.intermediate_size if dense else 0}
    return fields | {
        "routes_by_sigmoid": True,
        "num_dense_layers": config.first_k_dense_replace,
        "dense_width": config.intermediate_size if config.first_k_dense_replace else 0,
        "shared_width": config.n_shared_experts * config.moe_intermediate_size,
        "num_expert_groups": config.n_group,
        "num_active_groups": config.topk_group,
        "route_scale": float(config.routed_scaling_factor),
    }


def dense_layers(config: Any) -> tuple[int, ...]:
    """The layers without experts, of a family that lists them or has experts in every n-th layer alone."""
    listed, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(layer for layer in range(config.num_hidden_layers) if layer in listed or (layer + 1) % step)


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
    if config.dense_layers:
        fields |= {"intermediate_size": config.dense_width, "mlp_only_layers": list(config.dense_layers)}
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
        has_experts = len(dense_layers(config)) < config.num_hidden_layers
        return [*rules, (has_experts, "a layer must have experts, got none by decoder_sparse_step and mlp_only_layers")]
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


ROPE_FIELDS = {  # kind of RoPE -> (field of RopeScaling, name in the checkpoint)
    "default": {},
    "dynamic": {},  # as "default" up to max_position_embeddings, where it would begin to change with the length of the text
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncates": "truncate",
    },
    "proportional": {"factor": "factor", "share": "partial_rotary_factor"},
    "longrope": {
        "original_max_position": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
    },
}
ORIGINAL = "original_max_position"  # a whole number; the others are not
DEFAULTED = "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"  # if not given
MSCALES = "mscale", "mscale_all_dim"
GROWTH = {
    "dynamic": ("factor",),
    "yarn": MSCALES,
    "longrope": ("factor",),
}  # the attention factor follows from them if it is not given
SCALES = (
    *("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("attention_factor", "beta_fast", "beta_slow", *MSCALES),
)
PROPORTIONAL = "proportional"  # RoPE of some families, whose fields have defaults


def advice() -> str:
    """The supported checkpoints, for error messages."""
    known = ", ".join(family.architecture for family in FAMILIES.values())
    return f"jkv runs {known}; docs/models.md has the forms of their files. Choose such a checkpoint."


def parse_config(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """The `ModelConfig` of the fields of a config.json; error messages begin with `where`."""
    fields = text_fields(fields, where)
    family = check_family(fields, where)
    rules, required = rules_of(family), [name for name in REQUIRED if name not in family.absent_fields]
    check_unread(fields, {*rules, *NAMES, *family.ignored_fields}, family.architecture, where)
    required += ["num_key_value_heads", *required_fields(family)]
    if family.has_experts and "num_local_experts" in fields:  # as transformers 5 writes it
        fields = {"num_experts": fields["num_local_experts"]} | {**fields}
    check_fields({**family.defaults, **fields}, rules, where, required)
    check_rope(fields, where, family.has_rope_by_kind, family.rope_kinds, family.defaults.get("partial_rotary_factor", 1.0))
    layers = fields["num_hidden_layers"]
    for name in ("layer_types", *(["no_rope_layers"] if family.has_layers_without_rope else [])):
        if (count := len(fields.get(name) or [])) not in (0, layers):
            rule = f"{where}: {name} must have an entry for each of the {layers} layers, got {count}. {CORRECT}"
            raise refused(rule, **{name: "does_not_fit"})
    if {**family.defaults, **fields}.get("head_dim") is None and fields["hidden_size"] % fields["num_attention_heads"]:
        raise refused(
            f"{where}: hidden_size must be a multiple of num_attention_heads={fields['num_attention_heads']}, got "
            f"{fields['hidden_size']}. {CORRECT}",
            hidden_size="does_not_fit",
        )
    config = settings_of(fields, family, rules)
    rope, of_windows, head_size = config.rope, config.window_rope, config.head_dim
    share = rope["partial_rotary_factor"] or 1.0 if family.has_partial_rotary else 1.0
    rotary_size = int(head_size * share)
    if rotary_size % 2 or not rotary_size:
        rule = f"{where}: the rotary size must be positive and even, got {rotary_size} of {head_size=}. {advice()}"
        raise refused(rule, rotary_size="out_of_range")
    scaling = parse_rope(rope, rotary_size, config.max_position_embeddings, where)
    positions = within(most_positions(config, scaling), config, family, where)
    windows = window_layers(config, family, positions)
    check_features(config, family, positions, windows, where)
    found = ModelConfig(
        family=family.name,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        mlp_width=getattr(config, family.expert_width) if family.has_experts else config.intermediate_size,
        max_positions=positions,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        rotary_size=0 if rotary_size == head_size else rotary_size,
        layers_without_rope=layers_without_rope(config) if family.has_layers_without_rope else (),
        window=config.sliding_window if windows else 0,
        window_layers=windows,
        **(rope_of_windows(of_windows, rope, rotary_size, config, where) if windows else {}),
        norm_epsilon=config.rms_norm_eps,
        qkv_bias=config.attention_bias if family.says_qkv_bias else family.qkv_bias,
        out_bias=config.attention_bias if family.says_out_bias else family.out_bias,
        qk_norm=config.use_qk_norm if family.says_qk_norm else family.qk_norm,
        all_heads_norm=family.all_heads_norm,
        norms_after=family.norms_after,
        has_sinks=family.has_sinks,
        tie_embeddings=config.tie_word_embeddings,
        **read_experts(config, family),
    )
    try:
        found = dataclasses.replace(found, **{**family.switches, **family.reads(config)})
    except ValueError as error:
        raise refused(f"{where}: {error}. {advice()}", file="invalid") from None
    if found.num_query_heads % found.num_kv_heads:
        raise refused(
            f"{where}: query heads must be a multiple of KV heads in layers with full attention too, got "
            f"{found.num_query_heads} and {found.num_kv_heads}. {advice()}",
            num_key_value_heads="invalid",
        )
    return found


def within(positions: int, config: Any, family: Family, where: str) -> int:
    """The positions up to which a model computes what the decoder does; where they are fewer than it has, a warning says so.

    Within a window that all layers have, attention is full. Some models scale queries, beyond their original context alone.
    """
    limits = {}
    if {*config.layer_types} == {WINDOWED} and config.sliding_window is not None and not family.has_rope_by_kind:
        limits[config.sliding_window] = "every layer has a sliding window"
    if family.scales_queries and config.rope.get("llama_4_scaling_beta"):
        limits[config.rope[ROPE_FIELDS["yarn"][ORIGINAL]]] = (
            "queries are scaled by llama_4_scaling_beta beyond its original context"
        )
    fewest = min([positions, *limits])
    if fewest < positions:
        warnings.warn(
            f"{where}: the model runs texts of at most {fewest} tokens in place of {positions}, because {limits[fewest]}.",
            stacklevel=4,
        )
    return fewest


def rope_of_windows(
    own: Mapping[str, Any], rope: Mapping[str, Any], num_rotated: int, config: Any, where: str
) -> dict[str, Any]:
    """The fields of a `ModelConfig` for the RoPE of layers with a window, where it is not that of the other layers."""
    scaling, other = (parse_rope(x, num_rotated, config.max_position_embeddings, where) for x in (own, rope))
    theta = {"window_theta": float(own["rope_theta"])} if own["rope_theta"] != rope["rope_theta"] else {}
    return theta | ({"window_scaling": scaling} if scaling != other else {})


def rules_of(family: Family) -> dict[str, Rule]:
    """The rules of the fields that are read for a family."""
    rules = {name: rule for name, rule in RULES.items() if name not in family.unread_fields}
    rules |= ROPELESS_RULES if family.has_layers_without_rope else {}
    rules |= QK_NORM_RULES if family.says_qk_norm else {}
    return rules | expert_rules(family) | dict(family.rules)


def layers_without_rope(config: Any) -> tuple[int, ...]:
    """The layers whose entry of `no_rope_layers` is 0; 1 marks a layer with RoPE."""
    return tuple(layer for layer, rotates in enumerate(config.no_rope_layers) if not rotates)


def window_layers(config: Any, family: Family, limit: int) -> tuple[int, ...]:
    """The layers with a sliding window; one of all the `limit` positions is full attention, unless its RoPE is another."""
    window = config.sliding_window
    if not family.has_windows or window is None or (window >= limit and not family.has_rope_by_kind):
        return ()
    return tuple(layer for layer, kind in enumerate(config.layer_types) if kind == WINDOWED)


def check_family(fields: Mapping[str, Any], where: str) -> Family:
    """The family of a configuration. Refuses unsupported architectures and quantised weights."""
    check_fields(fields, NAMES, where)
    name, architectures = fields.get("model_type"), fields.get("architectures") or []
    family = FAMILIES.get(name or "")
    if family is None or any(architecture != family.architecture for architecture in architectures):
        rule = f"{where}: the architecture must be supported, got {architectures} of model_type {name!r}. {advice()}"
        raise refused(rule, architectures="unsupported")
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    method = quantised.get("quant_method", "unknown") if quantised else None
    is_read = not quantised or fp8_block(quantised) or (family.reads_mxfp4 and method == "mxfp4")
    if not is_read and packing_of(quantised or {}, where) is None:
        rule = (
            f"{where}: weights must be unquantised, in FP8, or packed by GPTQ, AWQ or compressed-tensors, got "
            f"quantization_config with method {method!r}. {advice()}"
        )
        raise refused(rule, quantization_config="unsupported")
    return family


def check_features(config: Any, family: Family, limit: int, windows: tuple[int, ...], where: str) -> None:
    """Refuses by name the features of a supported family, of `limit` positions, that the decoder lacks."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    window = config.sliding_window
    others = {*config.layer_types} - {FULL, family.state_kind}
    if windows or window is None or window >= limit:  # a window of the maximum length is full attention
        others -= {"sliding_attention"}
    biases = [name for name in family.bias_switches if getattr(config, name, False)]
    activation = getattr(config, family.activation_field)
    rules: tuple[tuple[bool, str], ...] = (
        (not others, f"attention must be full, got {sorted(others)} with sliding_window={window} below {limit} positions"),
        (
            len(windows) < config.num_hidden_layers,
            f"a layer must have full attention, for policies to act on, got a sliding_window={window} in all of them",
        ),
        (
            not family.out_bias or config.attention_bias,
            f"attention_bias must be true in {family.architecture}, got false",
        ),
        (not biases, f"{' and '.join(biases)} must be false in {family.architecture}, got true"),
        (
            activation in family.activations,
            f"{family.activation_field} must be {family.activations[0]!r}, got {activation!r}",
        ),
        (queries % keys == 0, f"query heads must be a multiple of KV heads, got {queries} and {keys}"),
    )
    for holds, rule in (*rules, *check_experts(config, family)):
        if not holds:
            raise refused(f"{where}: {rule}. {advice()}", file="unsupported")


def ropes_in(fields: Mapping[str, Any], where: str, is_by_kind: bool) -> dict[str, Mapping[str, Any]]:
    """The objects with RoPE settings, by name; with `is_by_kind`, rope_parameters may have one for each kind of layer."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)}
    nested = given.get("rope_parameters", {})
    if is_by_kind and nested.keys() & {FULL, WINDOWED}:
        nested = {name: value for name, value in nested.items() if (name, value) not in BESIDE_KINDS}
    if not (is_by_kind and nested.keys() & {FULL, WINDOWED}):
        if len(given) > 1 and given["rope_parameters"] != given["rope_scaling"]:
            rule = f"{where}: rope_parameters and rope_scaling must be the same, got two that differ. {CORRECT}"
            raise refused(rule, rope_parameters="conflict")
        return given
    odd = [kind for kind, rope in nested.items() if kind not in (FULL, WINDOWED) or not isinstance(rope, dict)]
    if odd or len(given) > 1:
        raise refused(
            f"{where}: rope_parameters must have an object for {FULL} and one for {WINDOWED}, and no rope_scaling beside them, "
            f"got {shown([*odd, *given])}. {CORRECT}",
            rope_parameters="invalid",
        )
    return {f"rope_parameters: {kind}": rope for kind, rope in nested.items()}


def check_rope(
    fields: Mapping[str, Any],
    where: str,
    is_by_kind: bool = False,
    kinds: Sequence[str] = tuple(ROPE_FIELDS),
    usual_share: float = 1.0,
) -> None:
    """Refuses RoPE settings out of their range, of other kinds, and those that contradict each other.

    Transformers 5.0 writes the `usual_share` of a family's channels outside of rope_parameters, whatever is inside.
    """
    given = ropes_in(fields, where, is_by_kind)
    for name, rope in given.items():
        inside = f"{where}: {name}"
        kind = kind_of_rope(rope)
        if kind not in tuple(kinds):  # which may be no string
            message = f"{inside}: the RoPE type must be one of {', '.join(kinds)}, got {shown(kind)}. {advice()}"
            raise refused(message, rope_parameters="unsupported")
        used = {*ROPE_FIELDS[kind].values(), *GROWTH.get(kind, ())}
        needed = [field for field in ROPE_FIELDS[kind].values() if field not in DEFAULTED and kind != PROPORTIONAL]
        check_fields(
            {field: value for field, value in rope.items() if field in used or field not in SCALES}, ROPE, inside, needed
        )
        nested = [field for field, value in rope.items() if isinstance(value, dict)]
        unused = [field for field in SCALES if field not in used and rope.get(field) not in (None, 1)]
        both = "rope_theta", "partial_rotary_factor", *((ROPE_FIELDS[kind][ORIGINAL],) if ORIGINAL in ROPE_FIELDS[kind] else ())
        twice = [field for field in both if None not in (rope.get(field), fields.get(field))]
        unequal = [field for field in twice if rope[field] != fields[field]]
        unequal = [field for field in unequal if (field, fields[field]) != ("partial_rotary_factor", usual_share)]
        low, high = (rope.get(field, bound) for field, bound in (("low_freq_factor", 0), ("high_freq_factor", math.inf)))
        fast, slow = (rope.get(field) or default for field, default in (("beta_fast", 32), ("beta_slow", 1)))
        rules = (
            (
                kind_of_rope({"type": rope.get("type", kind)}) == kind,
                f"type and rope_type must be the same, got {shown(rope.get('type'))} and {kind!r}",
            ),
            (not nested, f"must be the same for all layers, got objects of {shown(nested)}"),
            (not unused, f"{', '.join(unused)} must not be set, because RoPE of type {kind!r} has no such factor"),
            (not unequal, f"{', '.join(unequal)} must be what config.json has outside of {name}, got another value"),
            (slow < fast, f"beta_slow must be below beta_fast={fast}, got {slow}"),
            (kind != "llama3" or low < high, f"low_freq_factor must be below high_freq_factor={high}, got {low}"),
        )
        for holds, rule in rules:
            if not holds:
                raise refused(f"{inside}: {rule}. {CORRECT}", rope_parameters="invalid")


def parse_rope(rope: Mapping[str, Any], num_rotated: int, positions: int, where: str) -> RopeScaling:
    """The RoPE scaling of a checkpoint's `rope_parameters`, for so many rotated channels and `max_position_embeddings`."""
    kind = rope["rope_type"]
    if kind == "dynamic":
        return RopeScaling()
    given = {field: rope[name] for field, name in ROPE_FIELDS[kind].items() if rope.get(name) is not None}
    given = {field: float(value) if type(value) is int and field != ORIGINAL else value for field, value in given.items()}
    if kind == "yarn":
        given.setdefault("attention_factor", attention_factor(rope))
    if kind == "longrope":
        for field in ("short_factor", "long_factor"):
            given[field] = tuple(map(float, given[field]))
            if len(given[field]) != num_rotated // 2:
                raise refused(
                    f"{where}: {field} must have a number for each of the {num_rotated // 2} rotated pairs of channels, got "
                    f"{len(given[field])}. {CORRECT}",
                    rope_parameters="does_not_fit",
                )
        if (original := rope[ROPE_FIELDS["longrope"][ORIGINAL]]) < 2:
            rule = f"{where}: original_max_position_embeddings must be at least 2 with LongRoPE, got {original}. {CORRECT}"
            raise refused(rule, original_max_position_embeddings="out_of_range")
        given.setdefault("attention_factor", longrope_attention_factor(rope, positions))
    return RopeScaling(kind, **given)


def most_positions(config: Any, scaling: RopeScaling) -> int:
    """The positions of a model. With YaRN, max_position_embeddings may be those before it was extended."""
    extended = int(scaling.factor * scaling.original_max_position) if scaling.kind == "yarn" else 0
    return max(config.max_position_embeddings, extended)


def attention_factor(rope: Mapping[str, Any]) -> float:
    """What YaRN (arXiv 2309.00071, section 3.4) multiplies queries and keys by, where a checkpoint does not say it."""
    of_queries, of_all = (rope.get(name) or 0.0 for name in MSCALES)
    growth = 0.1 * math.log(rope["factor"])
    return (of_queries * growth + 1) / (of_all * growth + 1) if of_queries and of_all else growth + 1


def longrope_attention_factor(rope: Mapping[str, Any], positions: int) -> float:
    """What LongRoPE (arXiv 2402.13753) multiplies queries and keys by, where a checkpoint does not say it."""
    original = rope[ROPE_FIELDS["longrope"][ORIGINAL]]
    growth = rope.get("factor") or positions / original
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def rope_fields(config: ModelConfig) -> dict[str, Any]:
    """The `rope_parameters` of layers of one kind."""
    scaling = config.rope_scaling
    numbers = {name: getattr(scaling, field) for field, name in ROPE_FIELDS[scaling.kind].items()}
    numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}
    return {"rope_type": scaling.kind, "rope_theta": config.rope_theta, **numbers}


def config_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of config.json, with RoPE in the form that both transformers 4 and 5 read."""
    scaling, numbers = config.rope_scaling, rope_fields(config)
    del numbers["rope_theta"]
    family = find_family(config.family)
    fields = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": numbers if len(numbers) > 1 or "rope_parameters" in family.defaults else None,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        family.activation_field: family.activations[0],
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": list(config.end_ids) or None,
        "torch_dtype": dtype,
    }
    fields = {name: value for name, value in fields.items() if name not in family.absent_fields}
    if config.out_bias:
        fields["attention_bias"] = True
    if family.says_qkv_bias:
        fields["attention_bias"] = config.qkv_bias
    if family.says_qk_norm:
        fields["use_qk_norm"] = config.qk_norm
    fields |= write_experts(config, family)
    if scaling.kind == "longrope":  # transformers' Phi-3 reads it there alone
        fields["original_max_position_embeddings"] = scaling.original_max_position
    if config.layers_without_rope:
        fields["no_rope_layers"] = [int(layer not in config.layers_without_rope) for layer in range(config.num_layers)]
    if config.window_layers or (family.has_windows and not family.switches_windows):
        kinds = [WINDOWED if layer in config.window_layers else FULL for layer in range(config.num_layers)]
        fields |= {"sliding_window": config.window or config.max_positions, "layer_types": kinds}
    if config.window_layers and family.switches_windows:
        fields["use_sliding_window"] = True
    if family.has_rope_by_kind:
        del fields["rope_theta"], fields["rope_scaling"]
        fields["rope_parameters"] = {FULL: rope_fields(config), WINDOWED: rope_fields(config.in_windows)}
    if family.has_partial_rotary:
        fields["partial_rotary_factor"] = (config.rotary_size or config.head_size) / config.head_size
    return fields | dict(family.writes(config))


OUTER = NAMES | {"model_type": TEXT, "text_config": OBJECT, "tie_word_embeddings": nullable(SWITCH)}
KEPT = ("quantization_config", "compression_config", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")


def text_fields(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config.json of the text model in that of a multimodal one; any other config.json as it is.

    Raises:
      ValueError: no text model, a model of another class, or a field that may have a meaning.
    """
    families = [one for one in FAMILIES.values() if one.multimodal and one.multimodal.name == fields.get("model_type")]
    inner = fields.get("text_config")
    named = [one for one in families if isinstance(inner, dict) and inner.get("model_type") == one.name]
    family = next(iter(named or families), None)
    if family is None or family.multimodal is None:
        return fields
    whole, name = family.multimodal, family.name
    of_class = Rule(f"[{whole.architecture!r}]", lambda value: value == [whole.architecture])
    check_fields(fields, OUTER | {"architectures": of_class}, where, ["text_config"])
    check_unread(fields, {*OUTER, *whole.ignored_fields}, whole.architecture, where)
    text = dict(fields["text_config"])
    check_fields(text, {"model_type": Rule(repr(name), lambda value: value == name)}, f"{where}: text_config")
    text.pop("architectures", None)
    outer = {field: fields[field] for field in KEPT if fields.get(field) is not None}
    if whole.decides_ties and "tie_word_embeddings" in outer:
        text.pop("tie_word_embeddings", None)
    unequal = [field for field in outer if text.get(field) not in (None, outer[field])]
    if "tie_word_embeddings" in unequal:
        rule = f"{where}: tie_word_embeddings must be the same in text_config, got another value there. {CORRECT}"
        raise refused(rule, tie_word_embeddings="conflict")
    return text | outer | {"model_type": name, "architectures": [family.architecture]}


def text_tensors(names: Iterable[str], family: Family, where: str) -> dict[str, str]:
    """The tensors of a checkpoint by their names in the family's own checkpoints, without tensors of images and sound.

    A checkpoint of the model without its head has names without the first part, which is then added.

    Raises:
      ValueError: two tensors of one name.
    """
    names, embedding = list(names), family.tensors["embedding"]
    base, _, rest = embedding.partition(".")
    if rest in names and embedding not in names:
        return {name if name == family.tensors["unembedding"] else f"{base}.{name}": name for name in names}
    if family.multimodal is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(family.multimodal.others):
            continue
        prefix = max((prefix for prefix in family.multimodal.prefixes if name.startswith(prefix)), key=len, default="")
        own = family.multimodal.prefixes.get(prefix, "") + name.removeprefix(prefix)
        if own in found:
            rule = f"{where} must have one tensor {own}, got {found[own]} and {name}. Remove either."
            raise refused(rule, tensors="conflict")
        found[own] = name
    return found
