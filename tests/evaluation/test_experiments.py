"""The files of experiments: each names policies, settings and texts that there are, and those for real models run."""

import dataclasses
import importlib.machinery
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jkv import cli
from jkv.checkpoints import loading as checkpoint
from jkv.cli import evaluate as command
from jkv.cli import probe as probe_command
from jkv.cli.options import defaults_of, read_config
from jkv.evaluation import compare as bench
from jkv.evaluation.contrasts import check_contrasts
from jkv.evaluation.held_out import held_out
from jkv.evaluation.oracles import ORACLE
from jkv.evaluation.probe import runs_of, text_sets
from jkv.policies import has_budget
from jkv.reasoning.steering import SteeringVector
from jkv.testing import random_networks, random_statistics, tiny_model

FOLDER = Path("configs/experiments").absolute()
EXPERIMENTS = sorted(path for path in FOLDER.glob("*.toml") if not path.stem.startswith(("train", "grpo", "probe", "real")))
NETWORKS = sorted({name for path in FOLDER.glob("*.toml") for name in re.findall(r'"(\S+\.safetensors)"', path.read_text())})
PROBES, REAL = (sorted(FOLDER.glob(f"{kind}*.toml")) for kind in ("probe", "real"))


def ids(paths):
    return {"ids": [path.stem for path in paths]}


@pytest.fixture
def in_folder(monkeypatch, tmp_path):
    """A folder with the files that policies are made of."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(NETWORKS):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        random_networks(tiny_model(), seed=seed).save(name)
    SteeringVector(np.ones((4, 8), np.float32)).save("steer.safetensors")
    random_statistics(tiny_model()).save("queries.safetensors")
    encoders = types.ModuleType("sentence_transformers")  # an extra that need not be installed
    encoders.__spec__ = importlib.machinery.ModuleSpec("sentence_transformers", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", encoders)


def policies_of(config):
    """Every policy of an experiment, with a budget if it takes one."""
    settings = command.with_protection(config["settings"], config["policies"], config.get("protection", {}))
    recipes = {n: settings.get(n, {}).get("policy", n) for n in config["policies"] if n not in ("full", ORACLE)}
    return [bench.build(name, 512 if has_budget(recipe) else None, settings) for name, recipe in recipes.items()]


@pytest.mark.parametrize("path", [*EXPERIMENTS, *REAL], **ids([*EXPERIMENTS, *REAL]))
def test_every_experiment_names_policies_that_there_are(path, in_folder):
    config = read_config(path)
    built = policies_of(config)
    formats = [config["settings"].get(policy.name, {}).get("kv_dtype") for policy in built]
    differing = {(dataclasses.replace(policy, name=""), kv_dtype) for policy, kv_dtype in zip(built, formats, strict=True)}
    assert len(set(built)) == len(built) == len(differing)
    assert set(config) <= {*command.DEFAULTS, "policies"}
    assert {"extends", "train"}.isdisjoint(config)
    check_contrasts(config.get("contrasts", []), config["policies"])
    if path in EXPERIMENTS and path.stem not in ("tiny-2", "tiny-2-prompt", "tiny-2-recent", "gpu-plan"):
        assert config["page_size"] == {"share-page-1": 1, "share-page-2": 2, "sealed": 16}.get(path.stem, 4)  # of tiny.toml
        assert config["settings"]["r_kv"] == {"interval": 16, "window": 16 if path.stem == "all" else 4}


@pytest.mark.parametrize("path", REAL, **ids(REAL))
def test_policies_of_real_models_protect_the_same(path, in_folder):
    built = {policy.name: policy.evict for policy in policies_of(read_config(path)) if policy.evict}
    of_score, all_recent = built.pop("vase"), built.pop("streaming_llm")  # VaSE's sinks are protected by its score
    assert {(of_score.recent, of_score.score.sinks), (all_recent.score.needs.keeps_window, all_recent.sinks)} == {
        (64, 4),
        (True, 4),
    }
    assert len(built) >= 9
    assert {(evict.sinks, evict.recent, evict.protect_prompt) for evict in built.values()} == {(4, 64, True)}


def test_an_experiment_for_real_models_runs(monkeypatch, tmp_path, capsys):
    """Three policies of it, on the small model and two problems in place of the large model and the data set."""
    monkeypatch.chdir(tmp_path)
    problems = [{"problem": p.prompt, "answer": p.answer.removeprefix(p.prompt[-1] + "=")} for p in held_out(2, seed=3)]
    Path("MATH-500").mkdir()
    Path("MATH-500/test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    model = checkpoint.load("tiny-reasoner")
    random_statistics(model).save("queries.safetensors")
    random_networks(model).save("foresight.safetensors")
    pairs = 'contrasts = [["foresight", "r_kv"], ["r_kv", "redundancy"]]\n'
    own = (FOLDER / "real-math-500.toml").read_text().replace('"real.toml"', json.dumps(str(FOLDER / "real.toml"))) + pairs
    Path("own.toml").write_text(own)
    arguments = [
        "--model",
        "tiny-reasoner",
        "--no-chat-template",
        "--policies",
        "foresight,r_kv,redundancy",
        "--budgets",
        "192",
    ]
    few = ["--samples", "2", "--seeds", "1", "--max-new-tokens", "300", "--template", "{question}"]
    assert cli.main(["eval", "--config", "own.toml", *few, *arguments, "--out", "out"]) == 0
    record = json.loads(Path("out/own-tiny-reasoner.json").read_text())
    assert [one["policy"] for one in record["outcomes"]] == ["full", "foresight", "r_kv", "redundancy"]
    assert (record["about"]["grader"], record["about"]["problems"], record["about"]["samples"]) == ("math", 2, 2)
    assert "| foresight - r_kv |" in capsys.readouterr().out


class Words:
    """A tokenizer whose tokens are words, of about as many tokens as a chat model's."""

    def encode(self, text, add_special_tokens=True):
        return text.split()


@pytest.mark.parametrize("path", PROBES, **ids(PROBES))
def test_every_probe_names_policies_and_texts_that_there_are(path, in_folder):
    config = defaults_of(probe_command.OPTIONS) | read_config(path)
    assert set(config) == set(defaults_of(probe_command.OPTIONS))
    check_contrasts(config["contrasts"], config["policies"])
    named = [name for name in config["policies"] if name != ORACLE]
    settings = command.with_protection(config["settings"], named, config["protection"])
    for texts in text_sets(config["texts"]):
        small = dataclasses.replace(texts, options=texts.options | {"count": 1})
        runs = runs_of(texts, named, small.probes(Words()), settings, config["seeds"])
        built = [
            (dataclasses.replace(bench.build(name, slots, settings, seed), name=""), bench.kv_dtype_of(name, settings, {}))
            for name, slots, seed in runs
        ]
        assert len(set(built)) == len(built) >= len(named)
