"""Weights of survivors: by hand, and without an effect against the engine."""

import numpy as np
import pytest

from jkv.analysis.recall import decode
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation import weight_leads
from jkv.evaluation.leads import traces
from jkv.evaluation.weight_leads import BASES, CONTRASTS, InverseProbability, Moment, ToNearest, Weights, weighted, weights_read


def test_a_replay_without_weights_has_the_log_probabilities_of_the_engine():
    model = checkpoint.load("tiny-reasoner")
    (text,) = traces(model, 1)
    random = BASES[-1].policy(48, None)
    kept = decode(model, [text], random, {"max_running": 1, "page_size": 4})
    plain = weighted(model.params, text, kept.traces[0].end[0], Weights("none", lambda moment: moment.weight))
    np.testing.assert_allclose(plain, kept.log_probs[0], atol=1e-3)


def test_a_dropped_slot_gives_its_weight_to_the_nearest_and_passes_on_what_it_was_given():
    key = np.array([[0.0], [1.0], [10.0], [11.5], [30.0]])
    end = np.array([9, 3, 9, 4, 9])  # the query at 3 no longer reads token 1, that at 4 no longer token 3
    read = weights_read(end, key, ToNearest())
    np.testing.assert_array_equal(read[2], [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(read[3], [2, 0, 1, 1, 0])
    np.testing.assert_array_equal(read[4], [2, 0, 2, 0, 1])
    again = weights_read(np.array([4, 3, 9, 9, 9]), key, ToNearest())
    np.testing.assert_array_equal(again[4], [0, 0, 3, 1, 1])


def test_only_the_closest_share_gives():
    moment = Moment(
        np.ones(4),
        np.array([False, True, True, False]),
        np.array([True, False, False, True]),
        4,
        np.array([[0.0], [1.0], [5.0], [9.0]]),
    )
    np.testing.assert_array_equal(ToNearest(0.5)(moment), [2, 1, 1, 1])


def test_inverse_probabilities_keep_the_total_and_leave_out_what_is_protected(monkeypatch):
    monkeypatch.setattr(weight_leads, "SINKS", 1)
    monkeypatch.setattr(weight_leads, "RECENT", 2)
    dropped = np.array([False, True, False, True, False, True, False, False])
    weight = InverseProbability()(Moment(np.ones(8), dropped, ~dropped, 8, np.zeros((8, 1))))
    np.testing.assert_allclose(weight[~dropped], [1, 2.5, 2.5, 1, 1])
    assert weight[~dropped].sum() == pytest.approx(8)


def test_inverse_probabilities_are_for_uniform_draws_only():
    assert {base.name for base, weights in CONTRASTS if isinstance(weights.rule, InverseProbability)} == {"random"}


@pytest.mark.slow
def test_the_command_has_a_line_for_each_contrast(tmp_path, capsys, monkeypatch):
    random = BASES[-1]
    monkeypatch.setattr(weight_leads, "BASES", (random,))
    monkeypatch.setattr(weight_leads, "CONTRASTS", tuple(pair for pair in CONTRASTS if pair[0] == random)[::4])
    weight_leads.main(["--texts", "2", "--out", str(tmp_path)])
    assert (tmp_path / "leads-weights.md").read_text() == capsys.readouterr().out
    lines = [line.split(" | ") for line in (tmp_path / "leads-weights.md").read_text().splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[2:]] == ["| random, nearest", "| random, inverse probability, to the power 0.25"]
    assert all(line[3].startswith("random") for line in lines[2:])
