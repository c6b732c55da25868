"""Makes `tests/support/golden`: tiny random Hugging Face checkpoints of every family, with the logits of transformers.

Run it by hand with torch installed: `python tests/support/make_golden.py [CASE ...]`. Each case is a checkpoint folder with a
`reference.npz`: `prompt` `[24]`, `prompt_logits` `[24, V]`, `greedy` `[64]` (the tokens of greedy decoding) and `decode_logits`
`[64, V]` (the logits of each of them). All are float32, with eager attention, one token at a time with a cache.

Further forms of these families are in `tests/support/forms`. There `phi3_short.npz` has the logits of the first 16 tokens
of the prompt of `phi3_longrope`, its original context.
"""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
PROMPT, DECODE = 24, 64
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": 95,
    "attn_implementation": "eager",
    "rope_parameters": PLAIN,
}
LLAMA3 = {  # of the four frequencies one is kept, one is on the ramp and two are divided; 88 positions show the difference
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {  # of the eight frequencies three are kept, two are on the ramp and three are divided
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 32,
}
MINISTRAL = YARN | {"original_max_position_embeddings": 96, "llama_4_scaling_beta": 0.1}  # whose scale is 1 in 88 positions
LONGROPE = {  # all 88 positions are beyond the 16 of the original context, so transformers too takes the long factors for all
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.5, 9.0],
}
WINDOWS = {  # a prompt of 24 tokens leaves the window, and so do decode steps
    "num_hidden_layers": 3,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
GPT_OSS = {  # the limit is low enough that it bounds many values
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 16,
    "swiglu_limit": 1.25,
    "rope_parameters": YARN | {"truncate": False},
}
OLMO3 = {  # RoPE of windows is another than that of full attention
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    "head_dim": 16,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
GEMMA3 = {  # a scale of attention that is not the head size's, and RoPE of windows with another base than that of the others
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
GEMMA4 = {  # two heads of 8 channels in windows, one of 16 in full attention, of whose 8 pairs 2 turn
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
}
QWEN3_5 = {  # key heads that serve two value heads each; a head of 16 channels rotates four
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": False,
}
QWEN3_5_EXPERTS = {  # a block beside the experts that is wider than they are
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16}
GEMMA4_SHARING = {  # the last two layers read the keys and values of the third and the second
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
GLM = {  # one layer without experts; two of four groups are chosen from, and a scale that is not 1
    "num_hidden_layers": 3,
    "head_dim": 16,
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "attention_bias": True,
    "use_qk_norm": True,
}
AIR = {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> family, configuration, how it is saved
    "llama_scaled": ("llama", {"eos_token_id": [94, 95], "rope_parameters": LLAMA3, "tie_word_embeddings": False}, {}),
    "llama_tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}, {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {"max_shard_size": "50KB"}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}, {"dtype": "bfloat16"}),
    "qwen3_yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": False}, {}),
    "qwen3_window": ("qwen3", {"head_dim": 16, "use_sliding_window": True} | WINDOWS, {}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16} | EXPERTS, {}),
    "glm4_moe": ("glm4_moe", GLM, {}),
    "glm4_moe_air": ("glm4_moe", GLM | AIR, {"dtype": "bfloat16"}),
    "gpt_oss": ("gpt_oss", WINDOWS | GPT_OSS, {}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}, {}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL, "tie_word_embeddings": False}, {}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}, {}),
    "olmo3": ("olmo3", WINDOWS | OLMO3, {}),
    "qwen3_5": ("qwen3_5_text", QWEN3_5, {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN3_5 | QWEN3_5_EXPERTS, {}),
    "gemma3": ("gemma3_text", WINDOWS | GEMMA3, {}),
    "gemma4": ("gemma4_text", WINDOWS | GEMMA4, {}),
    "gemma4_moe": ("gemma4_text", WINDOWS | GEMMA4 | GEMMA4_EXPERTS, {}),
    "gemma4_sharing": ("gemma4_text", WINDOWS | GEMMA4 | GEMMA4_SHARING, {}),
    "phi3": ("phi3", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}, "tie_word_embeddings": False}, {}),
}


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # the same, for `tests/checkpoints/test_forms.py`
    "llama_bias": ("llama", {"attention_bias": True, "tie_word_embeddings": False}, {}),
    "llama_dynamic": ("llama", {"rope_parameters": PLAIN | {"rope_type": "dynamic", "factor": 4.0}}, {}),
    "qwen3_bias": ("qwen3", {"attention_bias": True, "head_dim": 16}, {}),
    "qwen3_moe_sparse": (
        "qwen3_moe",
        {"head_dim": 16, "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2} | EXPERTS,
        {},
    ),
}


def make_model(family: str, fields: dict[str, Any], seed: int, dtype: str) -> Any:
    """A torch model with random weights, norms and biases included, all exactly representable in `dtype`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **TINY | fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    of_embedding = {"gemma3_text": 0.1, "gemma4_text": 0.19}.get(family, 0.4)  # which Gemma multiplies by the root of the width
    of_matrix = {"qwen3_5_moe_text": 1.2}.get(family, 1.5)  # so that rounding does not grow over the layers with a state
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        if "norm" in name:
            is_offset = family.startswith("qwen3_5") and "linear_attn" not in name  # by 1, in the model
            drawn = (0.0 if is_offset else 1.0) + 0.3 * noise
        elif "A_log" in name:
            drawn = noise - 2  # states that halve in some five tokens
        elif weight.ndim == 1:
            drawn = 0.5 * noise
        else:
            drawn = noise * (of_embedding if "embed" in name else of_matrix * weight.shape[-1] ** -0.5)
        weight.copy_(drawn.to(getattr(torch, dtype)))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_((0.7 + 0.6 * torch.rand_like(buffer)).to(getattr(torch, dtype)))
        elif name.endswith("e_score_correction_bias"):  # about as large as the differences of the scores
            buffer.copy_((0.2 * torch.randn_like(buffer)).to(getattr(torch, dtype)))
    return model


def run(model: Any, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """The reference of a model: the logits of the prompt, then greedy decoding."""
    import torch

    out = model(torch.tensor(prompt[None].astype(np.int64)), use_cache=True)
    prompt_logits, greedy, decode_logits = out.logits[0], [], []
    for _ in range(DECODE):
        decode_logits.append(out.logits[0, -1])
        greedy.append(int(decode_logits[-1].argmax()))
        out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return {
        "prompt": prompt.astype(np.int32),
        "prompt_logits": prompt_logits.numpy(),
        "greedy": np.array(greedy, np.int32),
        "decode_logits": torch.stack(decode_logits).numpy(),
    }


def is_sensitive(reference: dict[str, np.ndarray]) -> bool:
    """Whether the reference exposes a wrong model: varied tokens, no end token, each well ahead of the second choice."""
    second, first = np.sort(reference["decode_logits"], axis=-1)[:, -2:].T
    varied = len(set(reference["greedy"][-32:].tolist())) >= 12
    return varied and reference["greedy"].max() < 94 and (first - second).min() > 0.01 and reference["decode_logits"].std() > 1


def main() -> None:
    """Writes every case, with the first seed whose reference is sensitive."""
    import torch

    for name in sys.argv[1:] or [*CASES, *FORMS]:
        family, fields, saving = (CASES | FORMS)[name]
        dtype = saving.get("dtype", "float32")
        for seed in itertools.count():
            model = make_model(family, fields, seed, dtype)
            reference = run(model, np.random.default_rng(seed).integers(0, 94, PROMPT))
            if is_sensitive(reference):
                break
        folder = (GOLDEN if name in CASES else GOLDEN.with_name("forms")) / name
        shutil.rmtree(folder, ignore_errors=True)
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=saving.get("max_shard_size", "1GB"))
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors makes files readable by their owner alone
        np.savez_compressed(folder / "reference.npz", **reference)
        print(name, f"seed {seed}", f"{len(set(reference['greedy'].tolist()))} distinct tokens", sorted(folder.iterdir()))


if __name__ == "__main__":
    main()
