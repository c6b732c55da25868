"""The record that describes a model family; `jkv.checkpoints.families` has one file per family.

All families run on one decoder, which reads the switches of `ModelConfig`. A `Family` defines which switches its config.json
sets, and how its checkpoints name and stack the weights. How a weight is split over a mesh follows from the axes of
`jkv.model.params.LayerParams`. The rules that a field of config.json obeys in every family come first.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jkv.checkpoints.json_files import OBJECT, SWITCH, TEXT, Rule, at_least, either, integer, list_of, nullable, number, whole

MAX_VOCAB = 1 << 21  # XLM-V has 901,629 tokens
MAX_POSITIONS = 1 << 24  # Llama 4 has 10,485,760
MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 12
MAX_FREQUENCY_FACTOR = 1 << 20

TOKEN = integer(0, MAX_VOCAB - 1)
NO_TOKEN = -1
END = integer(NO_TOKEN, MAX_VOCAB - 1)
TOKENS = nullable(either(END, list_of(END, 1024)))
EVEN = Rule("an even integer in [2, 4096]", lambda value: type(value) is int and 2 <= value <= 4096 and value % 2 == 0)
POSITIONS = integer(1, MAX_POSITIONS)
THETA = number(1, 1e12)
SHARE = number(0, 1)
ZERO = Rule("0", lambda value: type(value) in (int, float) and value == 0)

RULES = {  # the fields that `jkv.checkpoints.architectures` uses; it ignores all others
    "vocab_size": integer(1, MAX_VOCAB),
    "hidden_size": integer(1, 1 << 18),
    "intermediate_size": integer(1, 1 << 20),
    "num_hidden_layers": integer(1, MAX_LAYERS),
    "num_attention_heads": integer(1, 1 << 12),
    "num_key_value_heads": nullable(integer(1, 1 << 12)),
    "head_dim": nullable(EVEN),
    "hidden_act": TEXT,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": number(0, 0.1),
    "tie_word_embeddings": nullable(SWITCH),
    "attention_bias": SWITCH,
    "mlp_bias": SWITCH,
    "rope_theta": THETA,
    "rope_scaling": nullable(OBJECT),
    "rope_parameters": nullable(OBJECT),
    "partial_rotary_factor": nullable(SHARE),
    "original_max_position_embeddings": nullable(POSITIONS),
    "use_sliding_window": SWITCH,
    "sliding_window": nullable(POSITIONS),
    "max_window_layers": integer(0, MAX_LAYERS),
    "layer_types": nullable(list_of(TEXT, MAX_LAYERS)),
}
ROPELESS_RULES = {  # of families with layers without RoPE; others ignore them
    "no_rope_layers": nullable(list_of(integer(0, 1), MAX_LAYERS)),
    "no_rope_layer_interval": integer(1, MAX_LAYERS),
}
QK_NORM_RULES = {"use_qk_norm": SWITCH}  # of families that may have norms of queries and keys
NAMES = {  # what is read beside them
    "model_type": nullable(TEXT),
    "architectures": nullable(list_of(TEXT, 16)),
    "quantization_config": nullable(OBJECT),
    "compression_config": nullable(OBJECT),
    "tokenizer_class": nullable(TEXT),
    "torch_dtype": nullable(TEXT),
    "dtype": nullable(TEXT),
    "eos_token_id": TOKENS,
}
UNREAD = frozenset(  # of `RULES`, in families that never had such a field
    {"mlp_bias", "use_sliding_window", "max_window_layers", "partial_rotary_factor", "original_max_position_embeddings"}
)
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
GENERATION = {  # of generation_config.json
    "eos_token_id": TOKENS,
    "do_sample": nullable(SWITCH),
}
SAMPLING = {  # of generation_config.json, where do_sample is true
    "temperature": nullable(either(ZERO, number(0, 1e6))),
    "top_p": nullable(number(0, 1)),
    "top_k": nullable(whole(-1, MAX_VOCAB)),  # -1 and 0 keep all tokens
    "min_p": nullable(number(0, 1)),
}
PENALTIES = {"repetition_penalty": nullable(at_least(0.01, 100))}  # of generation_config.json, for greedy decoding too
UNUSED = {  # of generation_config.json, what changes the draws and the engine cannot apply; with the values that change nothing
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "force_words_ids": [],
    "constraints": [],
    "sequence_bias": {},
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": [],
    "forced_bos_token_id": [],
    "forced_eos_token_id": [],
    "stop_strings": [],
    "max_time": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "dola_layers": [],
    "watermarking_config": {},
    "token_healing": False,
}
UNUSED_DRAWS = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}  # the same, where do_sample is missing
UNUSED_CUTS = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 1}  # the same, where do_sample is true
DIVISORS = list_of(at_least(0.01, MAX_FREQUENCY_FACTOR), 2048, least=1)
ROPE = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": THETA,
    "partial_rotary_factor": nullable(SHARE),
    "factor": at_least(1, MAX_FREQUENCY_FACTOR),
    "low_freq_factor": number(0, MAX_FREQUENCY_FACTOR),
    "high_freq_factor": number(0, MAX_FREQUENCY_FACTOR),
    "original_max_position_embeddings": POSITIONS,
    "beta_fast": nullable(at_least(0.01, MAX_FREQUENCY_FACTOR)),
    "beta_slow": nullable(at_least(0.01, MAX_FREQUENCY_FACTOR)),
    "attention_factor": nullable(at_least(0.01, 100)),
    "truncate": SWITCH,
    "short_factor": DIVISORS,
    "long_factor": DIVISORS,
    "mscale": nullable(number(0, 100)),
    "mscale_all_dim": nullable(number(0, 100)),
}


TENSORS = {  # field of Params or LayerParams -> tensor of a Llama checkpoint, in which matrices are transposed
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",  # this and the following have the prefix of the layer
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "out_bias": "self_attn.o_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}


FULL, WINDOWED = "full_attention", "sliding_attention"  # kinds of layers


def kinds_by(default: Callable[[Any, int], str]) -> Callable[[Any], Sequence[str]]:
    """The kind of attention of each layer: its entry of `layer_types`, or without that field what `default` gives."""
    return lambda config: config.layer_types or [default(config, layer) for layer in range(config.num_hidden_layers)]


KINDS = kinds_by(lambda *_: FULL)  # full attention, unless config.json says otherwise


def every(interval: int, kind: str = WINDOWED) -> Callable[[Any, int], str]:
    """Full attention in each layer whose number is a multiple of `interval`, and `kind` in the others."""
    return lambda _, layer: kind if (layer + 1) % interval else FULL


def from_layer(config: Any, layer: int) -> str:
    """A window in the layers from `max_window_layers` on."""
    return WINDOWED if config.sliding_window is not None and layer >= config.max_window_layers else FULL


def alike(config: Any) -> Sequence[str]:
    """A window in every layer, if config.json has one; `layer_types` counts for nothing."""
    return [FULL if config.sliding_window is None else WINDOWED] * config.num_hidden_layers


@dataclasses.dataclass(frozen=True)
class Multimodal:
    """How the text model of a family is stored in the checkpoints of a model that also reads images or sound.

    Attributes:
      name, architecture: `model_type` and `architectures` of their config.json, whose `text_config` is that of the text model.
      ignored_fields: of this config.json, without a meaning for text.
      prefixes: prefixes of the text model's tensors -> prefixes in its own checkpoints.
      others: prefixes of the tensors of images and sound, which are not read.
      decides_ties: whether its `tie_word_embeddings` counts in place of the text model's.
    """

    name: str
    architecture: str
    ignored_fields: frozenset[str]
    prefixes: Mapping[str, str]
    others: tuple[str, ...]
    decides_ties: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
      name: `model_type` in config.json.
      architecture: the class in `architectures` of config.json.
      qkv_bias: whether query, key and value projections add a bias.
      out_bias: whether the attention's output projection does.
      qk_norm: whether queries and keys are normalised per head.
      all_heads_norm: whether queries and keys are normalised over all heads together.
      norms_after: whether attention and MLP have their norms after them instead of before.
      has_sinks: whether each query head has a learned logit in the denominator of its softmax.
      has_partial_rotary: whether `partial_rotary_factor` is used; in other families transformers ignores it.
      has_window_switch: whether `sliding_window` counts only with `use_sliding_window`.
      says_qkv_bias, says_out_bias, says_qk_norm: whether `attention_bias` and `use_qk_norm` of config.json decide about these.
      scales_queries: whether `llama_4_scaling_beta` of RoPE scales queries beyond the original context.
      has_experts: whether its feed-forward blocks are mixtures of experts.
      expert_count, expert_width: the fields of config.json with the number of experts, and the width of one.
      routes_by_sigmoid: of `ModelConfig`; layers are then as in DeepSeek-V3: the first ones without experts, the others with
        experts and a shared block.
      expert_bias: whether the router and the matrices of experts add biases.
      swiglu_limit, swiglu_alpha: of `ModelConfig`, where config.json does not give them.
      has_layers_without_rope: whether config.json lists layers whose queries and keys are not rotated (`no_rope_layers`).
      has_windows: whether its layers may have a sliding window, each by its entry of `layer_types`.
      has_rope_by_kind: whether layers with a window and layers with full attention have RoPE parameters of their own.
      switches: further fields of `ModelConfig`, the same in all its models.
      reads: further fields of `ModelConfig` that follow from the settings (`jkv.checkpoints.settings`).
      writes: the fields of config.json that `reads` and `rules` need, of a `ModelConfig`.
      rules: further fields of config.json that are read, and what they must be.
      defaults: fields that config.json may leave out, as transformers has them.
      absent_fields: fields that other families need and that have no meaning here.
      activation_field: the field of config.json with the activation of feed-forward blocks.
      activations: the names that it may have there, all of `ModelConfig.activation`.
      multimodal: the checkpoints that its text models are also in.
      num_foreign_tokens: tokens at the end of its tokenizers that a text model has no embedding for.
      rope_kinds: the types that RoPE may have.
      bias_switches: fields of config.json that add biases which the decoder lacks.
      kinds: the kind of attention of each layer, of the settings.
      state_kind: the kind of layers with a recurrent state; empty where there are none.
      unread_fields: of `RULES`, what has no meaning here.
      ignored_fields: further fields of config.json without a meaning here.
      tensors: field of `Params` or `LayerParams` -> its tensor in a checkpoint. Fields of one tensor are stacked in it by rows,
        in the order of the fields. A field of `Experts` has a tensor of each expert where the name has `{}`.
      tensors_beside_experts: the `tensors` that have another name in layers with experts.
      prediction_tensor: what the layers of multi-token prediction, which follow the last one and are not read, have; empty
        where a checkpoint has none.
      other_tensors: the same of some fields, in checkpoints that have them so; other makers' are as in `tensors`.
      interleaved: fields that take turns along the last axis of their tensor, in place of being stacked.
      untransposed: fields with two axes or more whose tensor has the axes of the field; of others the last two are swapped.
      reads_mxfp4: whether its weights may be in MXFP4 (`jkv.checkpoints.checkpoint_tensors`).
      layer_prefix: the prefix of the tensors of layer `{}`.
    """

    name: str
    architecture: str
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    says_qkv_bias: bool = False
    says_out_bias: bool = False
    scales_queries: bool = False
    says_qk_norm: bool = False
    all_heads_norm: bool = False
    norms_after: bool = False
    has_sinks: bool = False
    has_partial_rotary: bool = False
    has_experts: bool = False
    expert_count: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    routes_by_sigmoid: bool = False
    expert_bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    has_layers_without_rope: bool = False
    has_windows: bool = False
    has_rope_by_kind: bool = False
    has_window_switch: bool = False
    rope_kinds: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    writes: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent_fields: frozenset[str] = frozenset()
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    multimodal: Multimodal | None = None
    num_foreign_tokens: int = 0
    bias_switches: tuple[str, ...] = ("attention_bias", "mlp_bias")
    kinds: Callable[[Any], Sequence[str]] = KINDS
    state_kind: str = ""
    unread_fields: frozenset[str] = frozenset()
    ignored_fields: frozenset[str] = frozenset()
    tensors: Mapping[str, str] = dataclasses.field(default_factory=lambda: TENSORS)
    other_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tensors_beside_experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prediction_tensor: str = ""
    interleaved: frozenset[str] = frozenset()
    untransposed: frozenset[str] = frozenset({"experts.gate", "experts.up"})
    reads_mxfp4: bool = False
    layer_prefix: str = "model.layers.{}."

    @property
    def has_expert_width(self) -> bool:
        """Whether the width of an expert has a field of its own."""
        return self.expert_width == "moe_intermediate_size"

    @property
    def switches_windows(self) -> bool:
        """Whether `use_sliding_window` decides about its windows."""
        return self.has_windows and "use_sliding_window" not in self.unread_fields

    def as_stored(self, names: Collection[str]) -> "Family":
        """The family whose tensors are called as in a checkpoint with these names."""
        first = self.layer_prefix.format(0)
        if not any(first + name in names for name in self.other_tensors.values()):
            return self
        return dataclasses.replace(self, tensors={**self.tensors, **self.other_tensors})

    def tensor_of(self, leaf: str, expert_layers: Collection[int] = ()) -> str:
        """The tensor of a leaf of `Params` with a name such as `layers.0.query`."""
        if not leaf.startswith("layers."):
            return self.tensors[leaf]
        layer = leaf.split(".")[1]
        tensors = {**self.tensors, **self.tensors_beside_experts} if int(layer) in expert_layers else self.tensors
        return self.layer_prefix.format(layer) + tensors[field_of(leaf)]

    def is_prediction(self, tensor: str, num_layers: int, tensors: Collection[str]) -> bool:
        """Whether a tensor of the checkpoint is of a layer of multi-token prediction, beyond the last of `num_layers`."""
        start, end = self.layer_prefix.split("{}")
        layer = tensor.removeprefix(start).split(end)[0]
        if not self.prediction_tensor or not tensor.startswith(start) or not layer.isdecimal():
            return False
        return int(layer) >= num_layers and self.layer_prefix.format(layer) + self.prediction_tensor in tensors


def field_of(leaf: str) -> str:
    """The field of `Params` or `LayerParams` of a leaf.

    >>> field_of("layers.0.experts.gate"), field_of("embedding")
    ('experts.gate', 'embedding')
    """
    return leaf.split(".", 2)[2] if leaf.startswith("layers.") else leaf
