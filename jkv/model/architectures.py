"""Converts config.json to a `ModelConfig` and back, and refuses by name every feature that the decoder does not support.

The differences between families are in `jkv.model.families`. `jkv.model.checkpoint` reads and writes the files.
"""

import math
from collections.abc import Mapping
from typing import Any

from jkv.model.config_rules import EXPERT_RULES, EXPERTS_REQUIRED, NAMES, REQUIRED, ROPE, ROPELESS_RULES, RULES
from jkv.model.families import FAMILIES, find_family
from jkv.model.family import Family
from jkv.model.huggingface import transformers
from jkv.model.json_files import CORRECT, check_fields, printable, shown
from jkv.model.params import ModelConfig, RopeScaling

ROPE_FIELDS = {  # kind of RoPE -> (field of RopeScaling, name in the checkpoint)
    "default": {},
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
GROWTH = {"yarn": MSCALES, "longrope": ("factor",)}  # the attention factor follows from them if it is not given
SCALES = (
    *("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *("attention_factor", "beta_fast", "beta_slow", *MSCALES),
)
UNSET = ("partial_rotary_factor", "original_max_position_embeddings")  # null is as good as absent


def advice() -> str:
    """The supported checkpoints, for error messages."""
    known = ", ".join(family.architecture for family in FAMILIES.values())
    return f"jkv runs {known}, unquantised or in a GGUF file, with full attention. Choose such a checkpoint."


def parse_config(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """The `ModelConfig` of the fields of a config.json; error messages begin with `where`."""
    family = check_family(fields, where)
    rules, required = dict(RULES), list(REQUIRED)
    if family.has_layers_without_rope:
        rules |= ROPELESS_RULES
    if family.has_experts:
        rules |= EXPERT_RULES
        required += EXPERTS_REQUIRED
        if "num_local_experts" in fields:  # as transformers 5 writes it
            fields = {"num_experts": fields["num_local_experts"]} | {**fields}
    check_fields(fields, rules, where, required)
    check_rope(fields, where)
    layers = fields["num_hidden_layers"]
    for name in ("layer_types", *(["no_rope_layers"] if family.has_layers_without_rope else [])):
        if (count := len(fields.get(name) or [])) not in (0, layers):
            raise ValueError(f"{where}: {name} must have an entry for each of the {layers} layers, got {count}. {CORRECT}")
    from huggingface_hub.errors import StrictDataclassError

    # Only known fields are passed on: transformers builds lists and objects of others, of any size.
    fields = original_of_rope(fields) | {**fields}
    known = {name: fields[name] for name in rules.keys() & fields.keys() if not (name in UNSET and fields[name] is None)}
    try:
        config = transformers().AutoConfig.for_model(family.config_type or family.name, **known)
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: must be a valid {family.name} configuration: {printable(error)}. Correct it or download it again."
        ) from error
    if "num_key_value_heads" not in fields and config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(f"{where}: num_key_value_heads must be {RULES['num_key_value_heads'].wanted}, got none. {CORRECT}")
    rope = config.rope_parameters
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = (rope.get("partial_rotary_factor") or 1.0) if family.has_partial_rotary else 1.0
    rotary_size = int(head_size * share)
    if rotary_size % 2 or not rotary_size:
        raise ValueError(f"{where}: the rotary size must be positive and even, got {rotary_size} of {head_size=}. {advice()}")
    scaling = parse_rope(rope, rotary_size, config.max_position_embeddings, where)
    positions = most_positions(config, scaling)
    windows = window_layers(config, family, positions)
    check_features(config, family, positions, windows, where)
    return ModelConfig(
        family=family.name,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size,
        mlp_width=config.moe_intermediate_size if family.has_experts else config.intermediate_size,
        max_positions=positions,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        rotary_size=0 if rotary_size == head_size else rotary_size,
        layers_without_rope=layers_without_rope(config) if family.has_layers_without_rope else (),
        window=config.sliding_window if windows else 0,
        window_layers=windows,
        norm_epsilon=config.rms_norm_eps,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=config.tie_word_embeddings,
        num_experts=config.num_experts if family.has_experts else 0,
        num_active_experts=config.num_experts_per_tok if family.has_experts else 0,
        normalises_experts=family.has_experts and config.norm_topk_prob,
    )


def layers_without_rope(config: Any) -> tuple[int, ...]:
    """The layers whose entry of `no_rope_layers` is 0; 1 marks a layer with RoPE."""
    return tuple(layer for layer, rotates in enumerate(config.no_rope_layers) if not rotates)


def window_layers(config: Any, family: Family, limit: int) -> tuple[int, ...]:
    """The layers with a sliding window; one of all the `limit` positions is full attention."""
    window = getattr(config, "sliding_window", None)
    if not family.has_windows or window is None or window >= limit:
        return ()
    return tuple(layer for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention")


def check_family(fields: Mapping[str, Any], where: str) -> Family:
    """The family of a configuration. Refuses unsupported architectures and quantised weights."""
    check_fields(fields, NAMES, where)
    name, architectures = fields.get("model_type"), fields.get("architectures") or []
    family = FAMILIES.get(name or "")
    if family is None or any(architecture != family.architecture for architecture in architectures):
        raise ValueError(f"{where}: the architecture must be supported, got {architectures} of model_type {name!r}. {advice()}")
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown")
        raise ValueError(f"{where}: weights must not be quantised, got quantization_config with method {method!r}. {advice()}")
    return family


def check_features(config: Any, family: Family, limit: int, windows: tuple[int, ...], where: str) -> None:
    """Refuses by name the features of a supported family, of `limit` positions, that the decoder lacks."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    window = getattr(config, "sliding_window", None)
    others = set(family.attention_kinds(config))
    others -= {"full_attention"}
    if windows or window is None or window >= limit:  # a window of the maximum length is full attention
        others -= {"sliding_attention"}
    biases = [name for name in family.bias_switches if getattr(config, name, False)]
    has_head_size = getattr(config, "head_dim", None) is not None
    rules: tuple[tuple[bool, str], ...] = (
        (
            has_head_size or config.hidden_size % queries == 0,
            f"hidden_size must be a multiple of num_attention_heads={queries}, got {config.hidden_size}",
        ),
        (not others, f"attention must be full, got {sorted(others)} with sliding_window={window} below {limit} positions"),
        (
            len(windows) < config.num_hidden_layers,
            f"a layer must have full attention, for policies to act on, got a sliding_window={window} in all of them",
        ),
        (not biases, f"{' and '.join(biases)} must be false in {family.architecture}, got true"),
        (config.hidden_act in ("silu", "swish"), f"hidden_act must be 'silu', got {config.hidden_act!r}"),
        (queries % keys == 0, f"query heads must be a multiple of KV heads, got {queries} and {keys}"),
    )
    if family.has_experts:
        active, dense = config.num_experts_per_tok, config.mlp_only_layers
        rules += (
            (
                active <= config.num_experts,
                f"num_experts_per_tok must be at most num_experts={config.num_experts}, got {active}",
            ),
            (
                config.decoder_sparse_step == 1 and not dense,
                "every layer must have experts (decoder_sparse_step 1, no mlp_only_layers), got "
                f"decoder_sparse_step={config.decoder_sparse_step} and mlp_only_layers={dense}",
            ),
        )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"{where}: {rule}. {advice()}")


def check_rope(fields: Mapping[str, Any], where: str) -> None:
    """Refuses RoPE settings out of their range, and those that contradict each other."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)}
    if len(given) > 1 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(f"{where}: rope_parameters and rope_scaling must be the same, got two that differ. {CORRECT}")
    for name, rope in given.items():
        inside = f"{where}: {name}"
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in tuple(ROPE_FIELDS):  # which may be no string
            raise ValueError(f"{inside}: the RoPE type must be one of {', '.join(ROPE_FIELDS)}, got {shown(kind)}. {advice()}")
        used = {*ROPE_FIELDS[kind].values(), *GROWTH.get(kind, ())}
        needed = [field for field in ROPE_FIELDS[kind].values() if field not in DEFAULTED]
        check_fields(
            {field: value for field, value in rope.items() if field in used or field not in SCALES}, ROPE, inside, needed
        )
        nested = [field for field, value in rope.items() if isinstance(value, dict)]
        unused = [field for field in SCALES if field not in used and rope.get(field) not in (None, 1)]
        both = "rope_theta", "partial_rotary_factor", *((ROPE_FIELDS[kind][ORIGINAL],) if kind == "longrope" else ())
        twice = [field for field in both if None not in (rope.get(field), fields.get(field))]
        unequal = [field for field in twice if rope[field] != fields[field]]
        low, high = (rope.get(field, bound) for field, bound in (("low_freq_factor", 0), ("high_freq_factor", math.inf)))
        fast, slow = (rope.get(field) or default for field, default in (("beta_fast", 32), ("beta_slow", 1)))
        rules = (
            (
                rope.get("type", kind) == kind,
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
                raise ValueError(f"{inside}: {rule}. {CORRECT}")


def original_of_rope(fields: Mapping[str, Any]) -> dict[str, int]:
    """The original context of LongRoPE as a field of config.json, where alone some of transformers' configurations read it."""
    name = ROPE_FIELDS["longrope"][ORIGINAL]
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    is_there = "longrope" in (rope.get("rope_type"), rope.get("type")) and name in rope
    return {name: rope[name]} if is_there else {}


def parse_rope(rope: Mapping[str, Any], num_rotated: int, positions: int, where: str) -> RopeScaling:
    """The RoPE scaling of a checkpoint's `rope_parameters`, for so many rotated channels and `max_position_embeddings`."""
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_FIELDS:
        raise ValueError(f"{where}: the RoPE type must be one of {', '.join(ROPE_FIELDS)}, got {kind!r}. {advice()}")
    given = {field: rope[name] for field, name in ROPE_FIELDS[kind].items() if rope.get(name) is not None}
    given = {field: float(value) if type(value) is int and field != ORIGINAL else value for field, value in given.items()}
    if kind == "yarn":
        given.setdefault("attention_factor", attention_factor(rope))
    if kind == "longrope":
        for field in ("short_factor", "long_factor"):
            given[field] = tuple(map(float, given[field]))
            if len(given[field]) != num_rotated // 2:
                raise ValueError(
                    f"{where}: {field} must have a number for each of the {num_rotated // 2} rotated pairs of channels, got "
                    f"{len(given[field])}. {CORRECT}"
                )
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


def config_fields(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of config.json, with RoPE in the form that both transformers 4 and 5 read."""
    scaling = config.rope_scaling
    numbers = {name: getattr(scaling, field) for field, name in ROPE_FIELDS[scaling.kind].items()}
    numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}
    fields = {
        "architectures": [find_family(config.family).architecture],
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
        "rope_scaling": {"rope_type": scaling.kind, **numbers} if numbers else None,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": list(config.end_ids) or None,
        "torch_dtype": dtype,
    }
    if config.num_experts:
        fields |= {"num_experts": config.num_experts, "num_experts_per_tok": config.num_active_experts}
        fields |= {"moe_intermediate_size": config.mlp_width, "norm_topk_prob": config.normalises_experts}
    if scaling.kind == "longrope":
        fields |= original_of_rope(fields)
    if config.layers_without_rope:
        fields["no_rope_layers"] = [int(layer not in config.layers_without_rope) for layer in range(config.num_layers)]
    if config.window_layers:
        kinds = [
            "sliding_attention" if layer in config.window_layers else "full_attention" for layer in range(config.num_layers)
        ]
        fields |= {"use_sliding_window": True, "sliding_window": config.window, "layer_types": kinds}
    if config.rotary_size:
        fields["partial_rotary_factor"] = config.rotary_size / config.head_size
    return fields
