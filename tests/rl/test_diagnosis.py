"""A trainer's mistakes are named by its numbers alone."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cli import main
from jkv.rl.diagnosis import BARE_FULL, BARE_REPLAY, FULL, REPLAYED, SAMPLED


def replayed(model, out):
    return np.array(jkv.score(model, out, trace=out.trace).logprobs)


def late(values):
    return np.concatenate([np.full((len(values), 1), -1.5), values[:, :-1]], axis=1)


def early(values):
    """Theirs at the end of each row is the padding's."""
    return np.where(values == 0, 0, np.concatenate([values[:, 1:], np.zeros((len(values), 1))], axis=1) - 1e-9)


MISTAKES = {
    "none": (lambda model, out: out.logprobs, (SAMPLED, ""), r"within 0.0e\+00 nats"),
    "a replay": (replayed, (REPLAYED, ""), "match the replay of the compressed cache"),
    "no evictions": (lambda model, out: jkv.score(model, out).logprobs, (FULL, ""), r"make_batch\(..., replay=True\)"),
    "no temperature": (
        lambda model, out: jkv.score(model, out, trace=out.trace, sampling=jkv.Sampling()).logprobs,
        (BARE_REPLAY, ""),
        "leaves out the temperature",
    ),
    "neither": (
        lambda model, out: jkv.score(model, out, sampling=jkv.Sampling()).logprobs,
        (BARE_FULL, ""),
        "leaves out the temperature.*and the evictions",
    ),
    "one token late": (lambda model, out: late(out.logprobs), (SAMPLED, "one token late"), "shift theirs left"),
    "one token early": (
        lambda model, out: early(out.logprobs),
        (SAMPLED, "one token early"),
        "shift theirs right",
    ),
    "a loss": (lambda model, out: -jkv.score(model, out).logprobs, (FULL, "negated"), "return them negated"),
    "probabilities": (lambda model, out: np.exp(out.logprobs), (SAMPLED, "as probabilities"), "Take the logarithm"),
    "other weights": (
        lambda model, out: out.logprobs + np.random.default_rng(0).normal(size=out.logprobs.shape),
        None,
        "none that we know",
    ),
    "bfloat16": (
        lambda model, out: replayed(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params), out),
        None,
        "but for .* nats, as weights and sums in bfloat16 differ",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(model, squeezed, name):
    make, expected, said = MISTAKES[name]
    found = jkv.rl.diagnose(model, squeezed, make(model, squeezed))
    assert expected in (None, (found.nearest, found.change)), found
    assert found.is_right == (name in ("none", "a replay"))
    assert re.search(said, found.text)
    assert len(found.left_out) == 0
    assert repr(found).count("\n| ") == 1 + len(found.distances)


def test_rows_that_are_wrong_and_tokens_that_are_left_out_are_named(model, squeezed):
    theirs, mask = np.array(squeezed.logprobs), np.arange(squeezed.tokens.shape[1]) < squeezed.lengths[:, None]
    theirs[1] += 3 * np.sin(np.arange(theirs.shape[1]))
    found = jkv.rl.diagnose(model, squeezed, theirs)
    assert found.rows == tuple(row for row in range(len(theirs)) if row != 1)
    assert "rows [1] do not" in found.text
    ends = squeezed.lengths - 1
    theirs = np.where(mask, squeezed.logprobs, 0)
    theirs[np.arange(len(theirs)), ends] = 0
    found = jkv.rl.diagnose(model, squeezed, theirs)
    assert found.is_right
    assert found.left_out.tolist() == [[row, end] for row, end in enumerate(ends)]
    assert f"for {len(theirs)} drawn tokens, {len(theirs)} of them at the end of a completion" in found.text


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        (lambda values: values[:, 1:], "theirs", "must have the shape of out.tokens"),
        (lambda values: "no numbers", "theirs", "must be an array of numbers"),
        (np.zeros_like, "theirs", "must have numbers for drawn tokens"),
        (lambda values: values * np.nan, "theirs", "must have numbers for drawn tokens"),
    ],
)
def test_what_is_no_answer_is_refused(model, squeezed, change, field, said):
    with pytest.raises(jkv.InputError, match=said) as error:
        jkv.rl.diagnose(model, squeezed, change(squeezed.logprobs))
    assert error.value.field == field


def test_a_rollout_comes_before_a_trainers_numbers(model, squeezed):
    with pytest.raises(jkv.InputError, match="takes a model, a rollout"):
        jkv.rl.diagnose(model, squeezed.logprobs, squeezed)


def test_without_evictions_a_full_cache_is_right(model, squeezed):
    """A full cache and a replay of nothing are the same, and which is nearer is rounding."""
    whole = dataclasses.replace(squeezed, trace=None, logprobs=np.asarray(jkv.score(model, squeezed).logprobs))
    assert jkv.rl.diagnose(model, whole, whole.logprobs + 1e-7).is_right


TRAINER = """
import jkv
def right(model, out): return jkv.score(model, out, trace=out.trace).logprobs
def late(model, out): return out.logprobs[:, :-1]
def dense(model, out): return jkv.score(model, out).logprobs
def fails(model, out): return out.nothing
number = 3
"""


def test_a_command_asks_a_function(tmp_path, capsys):
    file = tmp_path / "trainer.py"
    file.write_text(TRAINER)
    given = ["--policy", "lag_kv", "--budget", "32", "--interval", "8", "--max-new-tokens", "48", "--seed", "0"]
    status = {name: main(["diagnose", f"{file}:{name}", *given]) for name in ("right", "dense")}
    out = capsys.readouterr().out
    assert status == {"right": 0, "dense": 1}
    assert "within" in out.splitlines()[0]
    assert "match the full cache" in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:late", "must have the shape of out.tokens"),
        ("{file}:fails", "failed: AttributeError.*trainer.py:6"),
        ("{file}:number", "must have a function 'number'"),
        ("{file}:nothing", "must have a function 'nothing'"),
        ("{file}", "must be module:name or file.py:name"),
        ("nowhere.py:f", "function='nowhere.py:f' names the file nowhere.py"),
    ],
)
def test_a_function_that_is_none_is_refused(tmp_path, capsys, monkeypatch, squeezed, name, said):
    file = tmp_path / "trainer.py"
    file.write_text(TRAINER)
    monkeypatch.setattr(sys.modules["jkv.generate"], "generate", lambda *args, **settings: squeezed)
    assert main(["diagnose", name.format(file=file)]) == 2
    assert re.search(said, capsys.readouterr().err)
