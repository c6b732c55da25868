"""Fine-tuning against the clock: what is learnt, what is written, and a second start."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.graders import grader_of
from research.tasks import tune as tuning
from research.tasks.batches import DRAWS, make_batch
from research.tasks.train import loss
from research.tasks.tune import STAGES, main, unseen_problems


def lines_of(folder):
    return [json.loads(line) for line in (folder / "tuned.jsonl").read_text().splitlines()]


@pytest.fixture
def standard_promotion():
    """Training code runs as users run it: optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Clock:
    """A second passes between any two questions, so any moment of a step may be the one at which time is up."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("seconds", [1, 2, 3, 4])
def test_whenever_time_is_up_the_last_step_is_saved(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(tuning, "time", Clock())
    steps = []
    monkeypatch.setattr(tuning, "train_step", lambda *_: (steps.append(1), (model.params, None, 0.0, 1.0))[1])
    model = checkpoint.load("tiny-reasoner")
    stage = dataclasses.replace(STAGES["chains"], rows=1, length=64)
    tuning.tune(model.params, model.tokenizer, "chains", stage, tmp_path, seconds=seconds)
    assert [line["step"] for line in lines_of(tmp_path)] == [len(steps)]


@pytest.mark.usefixtures("standard_promotion")
def test_a_tuned_model_is_saved_with_unseen_problems_and_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "REPORT_EVERY", 1)
    sizes = ["tiny-reasoner", "--task", "chains", "--rows", "1", "--length", "64", "--problems", "3", "--out", str(tmp_path)]
    main([*sizes, "--minutes", "0.01"])
    (first,) = lines_of(tmp_path)
    assert first["step"] >= 1
    before, after = checkpoint.load("tiny-reasoner"), checkpoint.load(str(tmp_path))
    assert after.digest != before.digest
    main([*sizes, "--minutes", "0.01"])  # no time is left
    assert lines_of(tmp_path) == [first]
    assert checkpoint.load(str(tmp_path)).digest == after.digest
    main([*sizes, "--minutes", str(first["seconds"] / 60 + 0.01)])
    assert lines_of(tmp_path)[-1]["step"] > first["step"]
    written = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert written == unseen_problems("chains", 3)


def refused(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().err


@pytest.mark.usefixtures("standard_promotion")
def test_tuning_goes_on_with_the_same_model_and_settings_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "REPORT_EVERY", 1)
    first, out = tmp_path / "first", tmp_path / "out"
    model = checkpoint.load("tiny-reasoner")
    checkpoint.export(model.params, model.tokenizer, first)
    words = [str(first), "--task", "chains", "--rows", "1", "--length", "64", "--problems", "1", "--out", str(out)]
    words += ["--minutes", "0.001"]
    main(words)
    assert "in another way, by rate (rate then 0.0001, now 0.1)" in refused([*words, "--rate", "0.1"], capsys)
    other = model.params.replace(final_norm=model.params.final_norm * 1.01)
    log = (out / "tuned.jsonl").read_text()
    checkpoint.export(other, model.tokenizer, out)
    assert "must be described by a line of tuned.jsonl; none has their digest" in refused(words, capsys)
    (out / "tuned.jsonl").write_text("".join(json.dumps(line | {"made_of": None}) + "\n" for line in lines_of(out)))
    assert "an older version of jkv wrote it without weights" in refused(words, capsys)
    (out / "tuned.jsonl").write_text(log)
    checkpoint.export(other, model.tokenizer, first)
    assert "in another way, by weights (" in refused(words, capsys)


@pytest.mark.parametrize("task", STAGES)
def test_every_task_has_problems_that_its_grader_can_mark(task):
    assert task in DRAWS
    for problem in unseen_problems(task, 4):
        assert grader_of("boxed")(f"\\boxed{{{problem['answer']}}}", problem["answer"])


def test_a_loss_of_a_batch_is_what_training_lowers():
    model, stage = checkpoint.load("tiny-reasoner"), STAGES["chains"]
    batch = make_batch(model.tokenizer, stage, (0, 0), "chains")
    value, right = loss(model.params, {name: jnp.asarray(field) for name, field in batch.items()})
    assert float(value) < 0.2
    assert float(right) > 0.9


def test_sizes_are_refused_before_a_model_is_loaded(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["no-such-model", "--rows", "0", "--out", str(tmp_path)])
    assert "rows" in capsys.readouterr().err
