"""The fields of a config.json that are not read: which of them are ignored, which are warned of, and which are refused.

One rule for all families. A field that says nothing about a forward pass is ignored. One that is known to change the arithmetic
of some model is refused, unless its value changes nothing. Of fields that nobody here knows, a single value is named in a
warning and ignored, as transformers ignores it; an object or a list is refused, because they describe new parts of models.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from jkv.checkpoints.json_files import shown
from jkv.errors import refused

BY_PURPOSE = {
    "Where the file comes from": (
        "transformers_version _name_or_path name_or_path model_name base_model _commit_hash license unsloth_version "
        "unsloth_fixed auto_map custom_pipelines transformers.js_config is_llama_config datasets language "
        "task_specific_params finetuning_task fused_from"
    ),
    "How it is run": (
        "use_cache return_dict use_return_dict output_attentions output_hidden_states output_scores "
        "return_dict_in_generate chunk_size_feed_forward torchscript use_bfloat16 tf_legacy_loss pruned_heads "
        "attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
        "_experts_implementation experts_implementation cache_implementation use_flash_attn _flash_attn_2_enabled "
        "use_flash_attention use_flash_attention_2 flash_attention use_fused_mlp fused_mlp use_kernel pretraining_tp "
        "tensor_parallel onnx_safe gradient_checkpointing use_gradient_checkpointing base_model_tp_plan "
        "base_model_pp_plan base_model_ep_plan ep_size model_parallel_size sub_configs"
    ),
    "Encoders and classifiers": (
        "is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder id2label "
        "label2id num_labels problem_type classifier_dropout prefix decoder_start_token_id"
    ),
    "Training": (
        "initializer_range initializer_factor attention_dropout hidden_dropout dropout attn_dropout resid_pdrop "
        "embd_pdrop attn_pdrop router_aux_loss_coef aux_loss_alpha seq_aux output_router_logits router_jitter_noise "
        "input_jitter_noise z_loss_coeff router_z_loss_coef"
    ),
    "Tokens, and how they are drawn": (
        "bos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id bos_token eos_token pad_token "
        "unk_token padding_side add_bos_token add_eos_token vocab_file max_length min_length model_max_length "
        "max_sequence_length max_seq_len seq_length max_new_tokens do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty length_penalty "
        "no_repeat_ngram_size num_return_sequences encoder_no_repeat_ngram_size bad_words_ids remove_invalid_values "
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_bos_token_id "
        "forced_eos_token_id generation_config"
    ),
}
HARMLESS = frozenset(" ".join(BY_PURPOSE.values()).split())
NOTHING = (None, False)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # what changes the arithmetic -> the values that do not
    # Logits, attention and hidden states are multiplied, capped or cut
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping", "clip_qkv"), (None, False, 0)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "scale_emb", "embedding_multiplier", "residual_multiplier"), (None, 1)),
    **dict.fromkeys(
        ("residual_scale", "scale_depth", "dim_model_base", "query_pre_attn_scalar", "attention_multiplier"), (None,)
    ),
    **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), (None, 1)),
    **dict.fromkeys(("mup_width_multiplier", "width_scale", "attn_temperature_tuning", "llama_4_scaling_beta"), (*NOTHING, 1)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "attn_scale", "floor_scale"), NOTHING),
    # Which tokens a query reads
    **dict.fromkeys(
        ("use_sliding_window", "use_bidirectional_attention", "bidirectional", "prefix_lm", "sparse_attention"), NOTHING
    ),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_pattern", "window_size", "attention_sink_size"), (*NOTHING, 0)),
    **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (None, 1)),
    "is_causal": (None, True),
    "sliding_window": (None, 0),
    "max_window_layers": (None,),
    # Positions
    **dict.fromkeys(("alibi", "use_alibi", "use_mrope", "rope_interleaved", "rope_interleave", "use_mup", "nope"), NOTHING),
    **dict.fromkeys(("use_rope", "use_rotary", "rotary", "rope"), (None, True)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct", "rope_percent"), (None, 1)),
    **dict.fromkeys(("no_rope_layer_interval", "rope_local_base_freq", "rotary_emb_base"), (None, 0)),
    "original_max_position_embeddings": (None,),
    # Norms, biases and the order of blocks
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "use_post_norm", "post_norm", "layer_norm_bias", "use_bias"), NOTHING
    ),
    **dict.fromkeys(
        ("mlp_bias", "attention_bias", "attention_out_bias", "qkv_bias", "bias", "lm_head_bias", "norm_bias"), NOTHING
    ),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "parallel_residual", "new_decoder_architecture"), NOTHING),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "cross_layer_sharing", "multi_query"), NOTHING),
    "norm_type": (None, "rmsnorm", "rms_norm", "RMSNorm"),
    # Parts that a layer may have
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts"), (*NOTHING, 0)
    ),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "index_topk", "index_n_heads", "state_size"), (None, 0)
    ),
    **dict.fromkeys(("altup_num_inputs", "laurel_rank", "hc_count"), (None, 0)),
    **dict.fromkeys(("moe_layer_freq", "decoder_sparse_step"), (None, 1)),
    "mlp_only_layers": (None, []),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input", "num_hash_layers", "hc_mult"), (None, 0)),
    **dict.fromkeys(
        ("attn_output_gate", "enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp", "gated_attention"), NOTHING
    ),
}


def check_unread(fields: Mapping[str, Any], read: Collection[str], model: str, where: str) -> None:
    """Warns of, or refuses, what is not `read` of the config.json of a `model`; the module's docstring has the rule.

    Raises:
      ValueError: a field that changes the arithmetic, or an unknown object or list.
    """
    others = {name: value for name, value in fields.items() if name not in HARMLESS and name not in read}
    wrong = [name for name, value in others.items() if name in NEUTRAL and not is_neutral(name, value)]
    wrong += [
        name
        for name, value in others.items()
        if name not in NEUTRAL and (isinstance(value, dict) or (isinstance(value, list) and value))
    ]
    if wrong:
        raise refused(
            f"{where}: every field must be known for {model}, got also {shown(sorted(wrong))}, which may change the "
            "arithmetic. Remove what has no effect, or choose a checkpoint without it.",
            **{min(wrong): "unknown_name"},
        )
    unknown = sorted(name for name, value in others.items() if name not in NEUTRAL and value not in (None, []))
    if unknown:
        warnings.warn(
            f"{where}: {shown(unknown)} of {model} {'are' if unknown[1:] else 'is'} not known to jkv, and ignored as in "
            "transformers. Remove what has no effect from the file, or check that the model's answers are as elsewhere.",
            stacklevel=2,
        )


def is_neutral(name: str, value: Any) -> bool:
    """Whether a value of a field of `NEUTRAL` changes nothing."""
    return any(type(value) in (type(one), float) and value == one for one in NEUTRAL[name])
