"""Mistral, Mistral-Small and Magistral (arXiv 2310.06825), and Ministral 3, which scales queries in long texts.

Newer checkpoints of the makers also read images; of these the text model is read. Where every layer has a sliding window, as in
Mistral-7B-v0.1, texts may be as long as the window.
"""

import dataclasses

from jkv.checkpoints.families.gemma3 import PREFIXES
from jkv.checkpoints.family import Family, Multimodal, alike

IMAGES = Multimodal(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    frozenset(
        {
            *("vision_config", "image_token_index", "image_token_id", "multimodal_projector_bias", "projector_hidden_act"),
            *("spatial_merge_size", "vision_feature_layer"),
        }
    ),
    PREFIXES,
    ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    decides_ties=True,
)
FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    bias_switches=(),
    kinds=alike,
    defaults={"sliding_window": 4096},
    multimodal=IMAGES,
)
MINISTRAL = dataclasses.replace(
    FAMILY,
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    scales_queries=True,
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
