"""The rules of the fields of config.json and generation_config.json, checked before anything is built from them.

Bounds are far above real models and low enough that nothing sized by a field is large. `jkv.checkpoints.architectures` has the
rules that depend on the family.
"""

from jkv.checkpoints.json_files import OBJECT, SWITCH, TEXT, Rule, at_least, either, integer, list_of, nullable, number

MAX_VOCAB = 1 << 21  # XLM-V has 901,629 tokens
MAX_POSITIONS = 1 << 24  # Llama 4 has 10,485,760
MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 12
MAX_FREQUENCY_FACTOR = 1 << 20

TOKEN = integer(0, MAX_VOCAB - 1)
TOKENS = nullable(either(TOKEN, list_of(TOKEN, 1024, least=1)))
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
    "tie_word_embeddings": SWITCH,
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
UNREAD = {  # of `RULES`, by families that do not ignore fields
    *("mlp_bias", "use_sliding_window", "max_window_layers", "partial_rotary_factor", "original_max_position_embeddings"),
}
MEANINGLESS = {  # for a forward pass, in any family
    *("transformers_version", "_name_or_path", "use_cache", "initializer_range", "bos_token_id", "pad_token_id"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "attn_implementation", "_attn_implementation"),
}
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
    "top_k": nullable(integer(-1, MAX_VOCAB)),  # -1 and 0 keep all tokens
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
