"""How GGUF files have each family: the names of llama.cpp's metadata and tensors, and what its converter does to the numbers.

The table `FORMS` has a `GgufForm` for each `general.architecture` that is read. llama.cpp's `convert_hf_to_gguf.py` and the
source of its models say what each name means; some of it is in no file (the windows of gpt-oss, the layers without RoPE of
SmolLM3). `jkv.checkpoints.gguf_files` reads the files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from jkv.checkpoints.families import find_family
from jkv.checkpoints.family import REQUIRED, TENSORS, Family
from jkv.checkpoints.gguf_header import GgufHeader
from jkv.checkpoints.json_files import CORRECT, shown
from jkv.errors import refused
from jkv.model.params import ModelConfig

LAYER = "blk.{}."  # the prefix of the tensors of a layer
NAMES = dict(  # field of Params or LayerParams -> tensor, where a form has no other
    zip(
        TENSORS,
        (
            *("token_embd.weight", "output_norm.weight", "output.weight"),
            *("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
            *("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
            *("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias", "attn_q_norm.weight", "attn_k_norm.weight"),
        ),
        strict=True,
    )
)
EXPERTS = {
    "experts.router": "ffn_gate_inp.weight",
    "experts.gate": "ffn_gate_exps.weight",
    "experts.up": "ffn_up_exps.weight",
    "experts.down": "ffn_down_exps.weight",
}
JOINED_EXPERTS = dict.fromkeys(("experts.gate", "experts.up"), "ffn_gate_up_exps.weight")  # as some files have them
SHARED = {"gate": "ffn_gate_shexp.weight", "up": "ffn_up_shexp.weight", "down": "ffn_down_shexp.weight"}
BIASES = {
    "experts.router_bias": "ffn_gate_inp.bias",
    "experts.gate_bias": "ffn_gate_exps.bias",
    "experts.up_bias": "ffn_up_exps.bias",
    "experts.down_bias": "ffn_down_exps.bias",
}
DELTA = {
    **dict.fromkeys(("delta.query", "delta.key", "delta.value"), "attn_qkv.weight"),
    **dict.fromkeys(("delta.query_taps", "delta.key_taps", "delta.value_taps"), "ssm_conv1d.weight"),
    "delta.rate": "ssm_beta.weight",
    "delta.decay": "ssm_alpha.weight",
    "delta.decay_bias": "ssm_dt.bias",
    "delta.log_decay": "ssm_a",
    "delta.gate": "attn_gate.weight",
    "delta.norm": "ssm_norm.weight",
    "delta.out": "ssm_out.weight",
}
NORM_BEFORE_MLP = {"mlp_norm": "post_attention_norm.weight"}
UNTRANSPOSED = frozenset({*EXPERTS, *BIASES, *DELTA}) & {
    *("experts.gate", "experts.up", "experts.gate_bias", "experts.up_bias", "experts.down_bias"),
    *("delta.query_taps", "delta.key_taps", "delta.value_taps"),
}
FIELDS = {  # of the metadata, after the name of the architecture -> of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
ACTIVE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # values of expert_gating_func; 0 is that of the architecture
Metadata: TypeAlias = Mapping[str, Any]  # after the name of the architecture
Restore: TypeAlias = Callable[[np.ndarray, ModelConfig], np.ndarray]


@dataclasses.dataclass(frozen=True)
class GgufForm:
    """How GGUF files have a family.

    Attributes:
      family: its name.
      tensors: the fields that have another tensor than `NAMES`.
      tensors_beside_experts: the same in layers with experts.
      fields: further metadata -> field of config.json.
      reads: further fields of config.json, of the metadata and the header.
      restored: what undoes the converter's change of a tensor, by the tensor's name without its layer.
      interval: each layer whose number is a multiple of it has full attention, and the others a window, where the file does not
        say it; 0 for families without windows.
      window_theta: the base of RoPE in layers with a window, where they have their own RoPE; None is that of the others.
      rope: what RoPE has beside the metadata.
      yarn: further metadata -> parameter of YaRN.
      gating: how experts are weighed.
      strips: whether its SentencePiece tokenizer ignores spaces after special tokens.
    """

    family: str
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors_beside_experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: Callable[[Metadata, GgufHeader], Mapping[str, Any]] = lambda *_: {}
    restored: Mapping[str, Restore] = dataclasses.field(default_factory=dict)
    interval: int = 0
    window_theta: float | None = None
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    yarn: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gating: int = SOFTMAX
    strips: bool = False

    @property
    def known_fields(self) -> dict[str, str]:
        """All metadata with a field of config.json of the same meaning."""
        return FIELDS | dict(self.fields)

    def needed_fields(self, required: tuple[str, ...]) -> list[str]:
        """The metadata that a file must have, where config.json must have these fields besides the fields of every family."""
        absent = find_family(self.family).absent_fields
        names = {*REQUIRED, *required, "rms_norm_eps"} - absent
        return sorted(field for field, name in self.known_fields.items() if name in names or field in SIZES)

    def named(self, family: Family, tensors: Mapping[str, Any]) -> Family:
        """The family, with the names and the layout that its tensors have in a file with these `tensors`."""
        names = {**NAMES, **self.tensors}
        if any(name.endswith(JOINED_EXPERTS["experts.gate"]) for name in tensors):
            names |= JOINED_EXPERTS
        return dataclasses.replace(
            family,
            tensors=names,
            tensors_beside_experts=self.tensors_beside_experts,
            other_tensors={},
            layer_prefix=LAYER,
            interleaved=frozenset(),
            untransposed=UNTRANSPOSED,
        )


# What the converter changes


def uninterleaved(num_heads: str) -> Restore:
    """Undoes the order of rows of query and key projections that llama.cpp rotates by neighbouring channels.

    In: rows 0 4 1 5 2 6 3 7 of a head of 8. Out: 0 1 2 3 4 5 6 7.
    """
    return lambda values, config: (
        values.reshape(getattr(config, num_heads), -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
    )


def less_one(values: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The weights of a norm that adds 1 to them, which a file has with the 1."""
    return values - 1


def grouped_heads(values: np.ndarray, config: ModelConfig, axis: int = 0, after: int = 0, size: int = 1) -> np.ndarray:
    """Value heads of a recurrent state in the order of their key heads, from place `after` of an axis on.

    In: of two key heads with two value heads each, the heads 0 2 1 3. Out: 0 1 2 3.
    """
    sizes = config.delta_net
    assert sizes is not None
    first, heads = np.split(values, [after], axis)
    shape = heads.shape
    order = shape[:axis], (sizes.num_value_heads // sizes.num_key_heads, sizes.num_key_heads, size), shape[axis + 1 :]
    heads = heads.reshape(*order[0], *order[1], *order[2]).swapaxes(axis, axis + 1).reshape(shape)
    return np.concatenate([first, heads], axis)


def grouped_channels(axis: int = 0, after_keys: bool = False) -> Restore:
    """`grouped_heads` of all channels of the values, after the channels of queries and keys where the tensor has them too."""

    def restore(values: np.ndarray, config: ModelConfig) -> np.ndarray:
        sizes = config.delta_net
        assert sizes is not None
        after = 2 * sizes.num_key_heads * sizes.key_size if after_keys else 0
        return grouped_heads(values, config, axis, after, sizes.value_size)

    return restore


def log_decay(values: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The logarithm of the decay, which a file has as a negative number."""
    return grouped_heads(np.log(-values.astype(np.float64)).astype(np.float32), config)


INTERLEAVED = {"attn_q.weight": uninterleaved("num_query_heads"), "attn_k.weight": uninterleaved("num_kv_heads")}
REORDERED_INPUTS = frozenset({"ssm_out.weight"})  # what is restored by another order of columns; of other matrices, of rows
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
GEMMA_NORMS = ("attn_norm.weight", "post_attention_norm.weight", "ffn_norm.weight", "post_ffw_norm.weight")
GATED_DELTA_NET = {
    **dict.fromkeys(("output_norm.weight", "attn_norm.weight", "post_attention_norm.weight", *HEAD_NORMS), less_one),
    **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight"), grouped_channels(after_keys=True)),
    **dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight", "ssm_dt.bias"), grouped_heads),
    "attn_gate.weight": grouped_channels(),
    "ssm_out.weight": grouped_channels(axis=1),
    "ssm_a": log_decay,
}


# Families


def gemma3(own: Metadata, header: GgufHeader) -> dict[str, Any]:
    """The scale of attention, which is that of a head but in the model of 62 layers (27B)."""
    head = own["embedding_length"] // own["attention.head_count"]
    scalar = head if own["block_count"] == 62 else own.get("attention.key_length", head)
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def glm4_moe(own: Metadata, header: GgufHeader) -> dict[str, Any]:
    """Biases and norms, which a file has or has not."""
    first = LAYER.format(0)
    return {
        "attention_bias": first + NAMES["query_bias"] in header.tensors,
        "use_qk_norm": first + NAMES["query_norm"] in header.tensors,
    }


def qwen35(own: Metadata, header: GgufHeader) -> dict[str, Any]:
    """The size of a value head of a recurrent state.

    Raises:
      ValueError: no such size.
    """
    heads, width = own["ssm.time_step_rank"], own.get("ssm.inner_size")
    if type(width) is not int or width < heads or width % heads:
        rule = f"{header.file}: ssm.inner_size must be a multiple of ssm.time_step_rank={heads}, got {shown(width)}. {CORRECT}"
        raise refused(rule, **{"ssm.inner_size": "invalid"})
    return {"linear_value_head_dim": width // heads}


SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
STATES = {**SIZES, "full_attention_interval": "full_attention_interval"}
ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
FORMS = {  # by general.architecture
    "llama": GgufForm("llama", restored=INTERLEAVED),
    "qwen2": GgufForm("qwen2"),
    "qwen3": GgufForm("qwen3"),
    "phi3": GgufForm(
        "phi3",
        {**dict.fromkeys(("query", "key", "value"), "attn_qkv.weight"), **dict.fromkeys(("gate", "up"), "ffn_up.weight")},
        strips=True,
    ),
    "smollm3": GgufForm("smollm3", restored=INTERLEAVED),
    "mistral3": GgufForm(
        "ministral3",
        restored=INTERLEAVED,
        rope={"mscale": 1.0},
        yarn={"rope.scaling.yarn_log_multiplier": "mscale_all_dim", "attention.temperature_scale": "llama_4_scaling_beta"},
    ),
    "gemma3": GgufForm(
        "gemma3_text",
        {
            "after_attention_norm": "post_attention_norm.weight",
            "mlp_norm": "ffn_norm.weight",
            "after_mlp_norm": "post_ffw_norm.weight",
        },
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        reads=gemma3,
        restored=dict.fromkeys(("output_norm.weight", *GEMMA_NORMS, *HEAD_NORMS), less_one),
        interval=6,
        window_theta=10_000.0,
    ),
    "olmo2": GgufForm(
        "olmo3",
        {
            "attention_norm": "post_attention_norm.weight",
            "mlp_norm": "post_ffw_norm.weight",
            "all_query_norm": "attn_q_norm.weight",
            "all_key_norm": "attn_k_norm.weight",
        },
        interval=4,
    ),
    "gpt-oss": GgufForm(
        "gpt_oss",
        {**NORM_BEFORE_MLP, "sink": "attn_sinks.weight", **EXPERTS, **BIASES},
        fields={**ACTIVE, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        interval=2,
        rope={"truncate": False},
        gating=SOFTMAX_OF_CHOSEN,
    ),
    "qwen3moe": GgufForm(
        "qwen3_moe",
        EXPERTS,
        fields={**ACTIVE, **WIDTH, "expert_weights_norm": "norm_topk_prob"},
        reads=lambda own, _: {"norm_topk_prob": own.get("expert_weights_norm", True)},
    ),
    "glm4moe": GgufForm(
        "glm4_moe",
        {**NORM_BEFORE_MLP, **EXPERTS, "experts.choice_bias": "exp_probs_b.bias"},
        SHARED,
        fields={**ROUTED, **WIDTH},
        reads=glm4_moe,
        gating=SIGMOID,
    ),
    "qwen35": GgufForm("qwen3_5_text", {**NORM_BEFORE_MLP, **DELTA}, fields=STATES, reads=qwen35, restored=GATED_DELTA_NET),
    "qwen35moe": GgufForm(
        "qwen3_5_moe_text",
        {**NORM_BEFORE_MLP, **DELTA, **EXPERTS, **SHARED, "shared_gate": "ffn_gate_inp_shexp.weight"},
        fields={**STATES, **ACTIVE, **WIDTH, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        reads=qwen35,
        restored=GATED_DELTA_NET,
    ),
}


def form_of(family: str) -> GgufForm:
    """The form of a family's GGUF files."""
    return next(form for form in FORMS.values() if form.family == family)


# What changes the arithmetic, and is in the files of other architectures -> the values that change nothing
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.temperature_scale", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.shared_kv_layers", "altup.num_inputs"), (0,)),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "embedding_length_per_layer_input"), (0,)),
    **dict.fromkeys(("expert_shared_count", "expert_shared_feed_forward_length", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "ssm.state_size", "moe_latent_size"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "full_attention_interval"), (0, 1)),
    "expert_weights_norm": (True,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "expert_count": (0,),
}
