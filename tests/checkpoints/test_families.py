"""A model family is one file and one line of a table: a made-up one, written by the test, runs everywhere."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints import saved_config
from jkv.checkpoints.families import FAMILIES, find_family
from jkv.model.weight_shapes import init_params
from jkv.testing import TINY

ROOT = Path(__file__).parents[2]
MADE_UP = """
from jkv.checkpoints.family import TENSORS, Family

FAMILY = Family(
    "made_up",
    "MadeUpForCausalLM",
    qkv_bias=True,
    layer_prefix="decoder.blocks.{}.",
    tensors=TENSORS
    | {"embedding": "decoder.tokens", "query": "mix.q", "query_bias": "mix.q_bias"}
    | dict.fromkeys(("gate", "up"), "mix.gate_and_up"),
)
"""
RENAMED = {  # what differs from the tensors of Qwen2
    r"model\.layers\.": "decoder.blocks.",
    r"model\.embed_tokens\.weight": "decoder.tokens",
    r"self_attn\.q_proj\.weight": "mix.q",
    r"self_attn\.q_proj\.bias": "mix.q_bias",
}


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """The made-up family, added to the table."""
    file = tmp_path / "made_up.py"
    file.write_text(MADE_UP)
    spec = importlib.util.spec_from_file_location("made_up", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, "made_up", module.FAMILY)
    monkeypatch.setitem(saved_config.OWN, "family", saved_config.one_of(*FAMILIES))  # which is made of the table at import
    return module.FAMILY


def write_checkpoint(params, folder):
    """A checkpoint of the made-up family, written without its record: one of Qwen2 with other names."""
    checkpoint.export(params, None, folder, dtype=jnp.float32)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "made_up", "architectures": ["MadeUpForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, new in RENAMED.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
    for layer in range(params.config.num_layers):
        gate, up = (tensors.pop(f"decoder.blocks.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        tensors[f"decoder.blocks.{layer}.mix.gate_and_up"] = np.concatenate([gate, up])
    save_file(tensors, folder / "model.safetensors")


def test_a_family_is_added_by_one_file_and_one_line(made_up, tmp_path):
    params = init_params(TINY, jax.random.key(0), scale=0.3)
    write_checkpoint(params, tmp_path / "theirs")
    model = jkv.load(tmp_path / "theirs")
    assert model.config.family == "made_up"
    assert model.config.qkv_bias

    def same(others):
        for one, other in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(one, other)

    same(model.params)
    settings = {
        "max_new_tokens": 8,
        "stop_ids": (),
        "sampling": jkv.Sampling(temperature=0.0),
        "progress": False,
        "page_size": 4,
    }
    out, expected = (jkv.generate(one, [5, 1, 9], **settings) for one in (model, params))
    assert out.tokens.tolist() == expected.tokens.tolist()
    mesh = Mesh(jax.devices()[:1], ("tensor",))
    jkv.save(jkv.shard(model.params, mesh), tmp_path / "saved")
    restored = jkv.restore(tmp_path / "saved", jkv.shardings(jkv.weight_shapes(model.config), mesh))
    assert restored.config == model.config
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(restored)} == {mesh}
    same(restored)
    checkpoint.export(model.params, None, tmp_path / "ours", dtype=jnp.float32)
    assert (
        load_file(tmp_path / "ours" / "model.safetensors").keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )
    same(jkv.load(tmp_path / "ours").params)


def test_a_made_up_family_is_checked_like_the_others(made_up, tmp_path):
    params = init_params(TINY, jax.random.key(0))
    write_checkpoint(params, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["decoder.blocks.1.mix.q_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"must contain decoder\.blocks\.1\.mix\.q_bias"):
        jkv.load(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"mlp_bias": True}))
    with pytest.raises(ValueError, match=r"mlp_bias must be false in MadeUpForCausalLM.*jkv runs .*MadeUpForCausalLM"):
        jkv.load(tmp_path)


def test_without_its_line_a_family_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=r"must be one of llama, qwen2, .*phi3, smollm3; got 'made_up'"):
        find_family("made_up")


def test_the_table_has_each_family_by_its_name():
    assert {family.name: family for family in FAMILIES.values()} == FAMILIES


def test_no_other_file_asks_for_a_family_by_name():
    asks = re.compile(r"""family\s*(==|!=|in\s*[(\[{"'])|["']phi3["']""")
    tables = ROOT / "jkv" / "checkpoints"  # of families, and of how GGUF files have them
    files = [*ROOT.glob("jkv/**/*.py")]
    files = [file for file in files if file.parent != tables / "families" and file != tables / "gguf_families.py"]
    assert len(files) > 100
    for file in files:
        found = asks.search(file.read_text())
        assert not found, (
            f"{file.relative_to(ROOT)} asks for a family: {found[0]}. Add a field to jkv.checkpoints.family.Family."
        )
