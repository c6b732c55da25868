"""A training run: batches made ahead are the same ones, a run's length follows its time, and its validation counts tokens."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jkv.model.params import ModelConfig
from jkv.model.weight_shapes import init_params
from research.tasks import trail_vocabulary
from research.tasks import train as training
from research.tasks.batches import Stage
from research.tasks.feed import Feed
from research.tasks.train import main, pick
from research.tasks.train_config import TrainConfig, check_can_stretch, read_config
from research.tasks.validation import Validation

STAGES = (Stage(3, 2, 64, 1, 2, passes=(1, 2), drills=0.5), Stage(20, 2, 64, 2, 4, passes=(1, 2), live=0.5))
RUN = TrainConfig("none", 7, ((0, 0.0), (3, 1.0), (13, 1.0), (23, 0.0)), 0.01, 100, STAGES, task="trails")
TINY = ModelConfig("qwen2", trail_vocabulary.SIZE, 16, 1, 2, 1, 8, 32, 256, qkv_bias=True, tie_embeddings=True)
TOML = """
model = "tiny"
start = "a model that does not exist"
task = "trails"
seed = 7
learning_rate = [[0, 0.0], [3, 1e-3], [13, 1e-3], [23, 0.0]]
weight_decay = 0.01
checkpoint_every = 100
validate_every = 20
"""
SHAPE = """
family = "qwen2"
vocab_size = 240
width = 16
num_layers = 2
num_query_heads = 2
num_kv_heads = 1
head_size = 8
mlp_width = 32
max_positions = 256
rope_theta = 10000.0
qkv_bias = true
tie_embeddings = true
"""


@pytest.fixture
def standard_promotion():
    """Training code runs as users run it: optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def first_batches(workers, start=1, count=5):
    feed = Feed(RUN, start, workers)
    try:
        return list(itertools.islice(feed, count))
    finally:
        feed.close()


def test_batches_made_ahead_are_those_made_in_place():
    for ours, theirs in zip(first_batches(0), first_batches(2), strict=True):
        assert ours.keys() == theirs.keys()
        for name, field in ours.items():
            np.testing.assert_array_equal(field, theirs[name])


def test_the_batch_of_a_step_is_that_of_its_stage_even_after_the_last_step():
    assert [RUN.stage(step) is STAGES[1] for step in (0, 2, 3, 22, 500)] == [False, False, True, True, True]


def test_another_number_of_steps_stretches_the_last_stage_and_its_rates():
    longer = RUN.with_steps(43)
    assert longer.num_steps == 43
    assert longer.last_start == 3
    assert longer.learning_rate == ((0, 0.0), (3, 1.0), (23, 1.0), (43, 0.0))
    assert RUN.with_steps(23) == RUN
    with pytest.raises(ValueError, match="more steps than the 3 before its last stage; got 3"):
        RUN.with_steps(3)


@pytest.mark.parametrize("seconds", [0.5, 4.0, 40.0])
def test_a_run_fills_its_time_and_is_the_run_of_its_final_number_of_steps(seconds):
    """A device whose speed changes: the rates of the steps taken are those of a run with that many steps from the start."""
    config, rates, step, clock = RUN, [], 0, 0.0
    while step < config.num_steps:
        rates.append(config.rate(step))
        pace = 0.1 if step < 8 else 0.05
        step, clock = step + 1, clock + pace
        config = RUN.fill(config, step, seconds - clock, pace)
    assert rates == [RUN.with_steps(len(rates)).rate(step) for step in range(len(rates))]
    if seconds > 2:
        assert 0.7 * seconds < clock < 1.1 * seconds
    assert rates[-1] <= 0.5  # decayed, though there be two steps for it


def test_a_run_whose_past_rates_would_change_is_refused():
    check_can_stretch(RUN)
    for rates in (((0, 0.0), (3, 1.0), (23, 0.0)), ((0, 0.0), (3, 1.0), (8, 0.5), (13, 1.0), (23, 0.0)), ((0, 1.0), (23, 0.0))):
        with pytest.raises(ValueError, match="must keep one learning rate from the start of its last stage"):
            check_can_stretch(dataclasses.replace(RUN, learning_rate=rates))


def test_the_run_of_the_second_task_can_be_stretched_and_has_one_shape():
    config = read_config(Path(__file__).parents[3] / "configs/experiments/train-tiny-reasoner-2.toml")
    check_can_stretch(config)
    assert len({(stage.rows, stage.length, stage.sink) for stage in config.stages}) == 1


def test_validation_counts_what_is_missed_and_which_problems_are_whole():
    tokenizer = trail_vocabulary.make_tokenizer()
    validation = Validation.draw(tokenizer, dataclasses.replace(STAGES[1], length=600), "trails")
    assert any((batch["end"] < 600).any() for batch in validation.batches["trimmed"])
    assert not any((batch["end"] < 600).any() for batch in validation.batches["full"])
    right = validation.measure(lambda batch: batch["token"][:, 1:])
    for figures in right.values():
        assert figures.pop("missed") == {}
        assert set(figures.values()) == {1.0}
    seven = tokenizer.convert_tokens_to_ids("7")
    wrong = validation.measure(lambda batch: np.where(batch["token"][:, 1:] == seven, 0, batch["token"][:, 1:]))["full"]
    assert wrong["missed"] == {"7": 1.0}
    assert wrong["name"] == 1.0
    assert 0.7 < wrong["value"] < 1.0
    assert wrong["whole"] < 0.8


def test_a_model_picks_what_it_finds_most_likely():
    params = init_params(TINY, jax.random.key(0))
    (batch,) = first_batches(0, count=1)
    picked = np.asarray(pick(params, batch))
    assert picked.shape == (2, 64)
    with_other_end = {**batch, "token": np.concatenate([batch["token"][:, :40], batch["token"][:, :25]], axis=1)}
    np.testing.assert_array_equal(np.asarray(pick(params, with_other_end))[:, :40], picked[:, :40])


@pytest.mark.usefixtures("standard_promotion")
def test_a_run_with_a_given_number_of_steps_writes_it_and_its_model(tmp_path, monkeypatch, capsys):
    stages = [
        f"[[stages]]\nsteps = {stage.steps}\nrows = 2\nlength = 64\nlow = 1\nhigh = 2\npasses = [1, 2]\n" for stage in STAGES
    ]
    for folder, name, text in (("experiments", "run", TOML + "".join(stages)), ("models", "tiny", SHAPE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.toml").write_text(text)
    command = [
        "train",
        str(tmp_path / "experiments/run.toml"),
        "--checkpoints",
        str(tmp_path / "c"),
        "--out",
        str(tmp_path / "o"),
    ]
    monkeypatch.setattr("sys.argv", [*command, "--steps", "30", "--start", "fresh"])
    monkeypatch.setattr(training, "REPORT_EVERY", 5)
    main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if "loss" in line] == [5, 10, 15, 20, 25, 30]
    assert [line["step"] for line in lines if "validation" in line] == [20, 30]
    record = json.loads((tmp_path / "o/training.json").read_text())
    assert (record["steps"], record["start"]) == (30, None)
    assert (tmp_path / "o/model.safetensors").stat().st_size > 0
    main()  # nothing is left to do
    for name, value in (("seed = 7", "seed = 8"), ("weight_decay = 0.01", "weight_decay = 0.02")):
        (tmp_path / "experiments/run.toml").write_text((TOML + "".join(stages)).replace(name, value))
        with pytest.raises(ValueError, match=rf"holds checkpoints of another run, by {name.split()[0]}"):
            main()
    (tmp_path / "experiments/run.toml").write_text(TOML + "".join(stages))
    monkeypatch.setattr("sys.argv", [*command, "--steps", "60", "--start", "fresh"])
    with pytest.raises(ValueError, match="another run, by the learning rates of the first 30 steps"):
        main()
    (tmp_path / "c/run.json").unlink()
    with pytest.raises(ValueError, match="an older version of jkv wrote it without model, seed"):
        main()
