"""Fields of config.json that are not read: ignored, warned of, or refused, by one rule for all families."""

import json
import warnings
from pathlib import Path

import pytest

from jkv.checkpoints.architectures import parse_config
from jkv.checkpoints.families import FAMILIES

WRITTEN = json.loads((Path(__file__).parents[1] / "support" / "written_configs.json").read_text())
EVERY = {family: WRITTEN[family]["all"] | WRITTEN[family]["5.24.0"] for family in FAMILIES}
WRAPPED = {name: WRITTEN[name]["all"] | WRITTEN[name]["5.24.0"] for name in ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")}
BOOKKEEPING = {
    "unsloth_version": "2025.9.1",
    "unsloth_fixed": True,
    "model_name": "org/model",
    "name_or_path": "org/model",
    "unk_token_id": 0,
    "sep_token_id": 3,
    "_attn_implementation_autoset": True,
    "is_decoder": True,
    "add_cross_attention": False,
    "pruned_heads": {},
    "max_length": 20,
    "min_length": 0,
    "num_return_sequences": 1,
    "temperature": 1.0,
    "bad_words_ids": [[5], [6]],
    "task_specific_params": {"summary": {"prefix": "tl;dr"}},
    "torchscript": False,
    "use_bfloat16": True,
    "auto_map": {"AutoConfig": "configuration.Config"},
    "transformers.js_config": {"dtype": "q4"},
    "num_labels": 2,
    "pretraining_tp": 1,
}
every = pytest.mark.parametrize("model", [*EVERY, *WRAPPED])


def fields_of(model):
    return (EVERY | WRAPPED)[model]


@every
def test_bookkeeping_is_ignored_in_every_family(model):
    fields = fields_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_config(BOOKKEEPING | fields, "config.json") == parse_config(fields, "config.json")


@every
def test_unknown_values_are_named_once_and_change_nothing(model):
    fields = fields_of(model)
    with pytest.warns(UserWarning, match=r"config.json: \['foo_bar', 'made_by'\] of \w+ are not known to jkv") as found:
        config = parse_config(fields | {"foo_bar": 3.5, "made_by": "me", "nothing": None, "empty": []}, "config.json")
    assert config == parse_config(fields, "config.json")
    assert len(found) == 1


REFUSED = [
    {"new_block": {"width": 4}},
    {"layer_scales": [1.0, 0.5]},
    {"residual_multiplier": 0.22},
    {"logits_scaling": 8.0},
    {"attn_logit_softcapping": 50.0},
    {"moe_num_experts": 8},
    {"kv_lora_rank": 512},
    {"alibi": True},
    {"is_causal": False},
]


@every
def test_what_may_change_the_arithmetic_is_refused_in_every_family(model):
    for fields in REFUSED:
        with pytest.raises(ValueError, match=rf"{next(iter(fields))}'\]|{next(iter(fields))} must be null"):
            parse_config(fields_of(model) | fields, "config.json")


@every
def test_a_part_that_is_switched_off_is_ignored(model):
    off = {
        "residual_multiplier": 1.0,
        "logits_scaling": 1,
        "clip_qkv": None,
        "alibi": False,
        "kv_lora_rank": 0,
        "is_causal": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_config(fields_of(model) | off, "config.json") == parse_config(fields_of(model), "config.json")
