"""The gate measures what it says, on a model too small and untrained to pass it."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

from jkv.checkpoints.loading import export
from jkv.model.params import ModelConfig
from jkv.model.weight_shapes import init_params
from research.tasks import gate, trail_vocabulary
from research.tasks.gate import Criterion
from research.tasks.problems import GATE_SEED, problems_of

NAMES = ["full", "oracle", "semantic", "foreseen", "sinks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained model with the tokenizer of trails."""
    tokenizer = trail_vocabulary.make_tokenizer()
    config = ModelConfig(
        "qwen2",
        trail_vocabulary.SIZE,
        16,
        2,
        2,
        1,
        8,
        16,
        384,
        qkv_bias=True,
        tie_embeddings=True,
        end_ids=(tokenizer.eos_token_id,),
    )
    path = tmp_path_factory.mktemp("models") / "untrained"
    export(init_params(config, jax.random.key(0)), tokenizer, path, np.float32)
    return path


def test_a_criterion_passes_from_its_least_on():
    criterion = Criterion("full", 0.97, 0.9, 1.0, 0.97)
    assert criterion.passed
    assert not dataclasses.replace(criterion, value=0.969).passed
    assert "pass" in gate.table([criterion])


def test_a_model_of_trails_is_asked_trails():
    own = problems_of(trail_vocabulary.make_tokenizer(), 2, GATE_SEED)
    assert all("#" in trail.prompt for trail in own)
    assert all("#" not in chain.prompt for chain in problems_of(None, 2, GATE_SEED))


def test_the_command_records_every_criterion_and_an_untrained_model_fails(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["gate", "--model", str(folder), "--problems", "2", "--texts", "2", "--out", str(tmp_path)]
    )
    gate.main()
    record = json.loads((tmp_path / "gate-untrained.json").read_text())
    assert [one["name"] for one in record["criteria"]] == NAMES
    assert (record["criteria"][0]["value"], record["criteria"][0]["passed"]) == (0.0, False)
    assert all(one["low"] <= one["value"] <= one["high"] for one in record["criteria"])
    assert record["figures"]["texts"] == 2
    assert (tmp_path / "gate-untrained.md").read_text().strip() == capsys.readouterr().out.strip()


def test_the_oracle_of_a_run_that_reads_nothing_dropped_is_the_run(folder, monkeypatch):
    model = gate.checkpoint.load(folder)
    out, _ = gate.solve(model, problems_of(model.tokenizer, 1, GATE_SEED), gate.full(), max_new_tokens=40, progress=False)
    texts = [(out.prompts[0].tolist(), out.tokens[0, :40].tolist())]
    tokens = [model.tokenizer.convert_ids_to_tokens([*texts[0][0], *texts[0][1]])]
    monkeypatch.setattr(gate, "SHARE", 1.0)
    assert gate.follows_oracle(model, texts).all()
    assert gate.follows_live_set(model, texts, tokens, is_latest=False).all()
