"""SmolLM3 (2025, huggingface.co/blog/smollm3): a Llama without RoPE in every fourth layer (NoPE, arXiv 2501.18795)."""

from typing import Any

from jkv.checkpoints.family import FULL, WINDOWED, Family, kinds_by


def kind_of(config: Any, layer: int) -> str:
    """A window in the layers without RoPE, if config.json has one and uses it."""
    has_window = config.use_sliding_window and config.sliding_window is not None and not config.no_rope_layers[layer]
    return WINDOWED if has_window else FULL


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    has_layers_without_rope=True,
    has_windows=True,
    kinds=kinds_by(kind_of),
    defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layers": None, "no_rope_layer_interval": 4},
)
