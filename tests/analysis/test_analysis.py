"""Means, intervals and tables of a set of traces, and what `analyze` refuses."""

import json
import warnings

import numpy as np
import pytest

import jkv
from jkv.analysis import analysis
from jkv.analysis.redundancy import MEASURES, make_reader
from jkv.testing import TinyTokenizer

TEXTS = ["a b\n\na b\n\n", "a b\n\nc d\n\nwait\n\nf g", "x\n\nx\n\nx\n\nx y z", ""]
RIGHT = [True, False, False, None]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_means_are_over_the_samples_that_have_the_figure():
    found = jkv.analyze(TEXTS, RIGHT)
    reader = make_reader(TEXTS, None, "tokens")
    by_hand = [reader.read(text)["similar_steps_0.9"] for text in TEXTS]
    assert by_hand == [0.5, 0.0, 0.5, None]
    row = found.estimates["similar_steps_0.9"]
    assert [(row[name].count, row[name].mean) for name in ("all", "right", "wrong")] == [(3, 1 / 3), (1, 0.5), (2, 0.25)]
    assert (row["difference"].count, row["difference"].mean, row["difference"].low) == (1, -0.25, None)
    assert row["right"].low is None
    assert found.estimates["tokens"]["all"].count == 4


def test_intervals_are_those_of_the_mean_and_of_the_difference():
    rng = np.random.default_rng(1)
    values, marks = np.concatenate([rng.normal(5, 1, 400), rng.normal(7, 2, 100)]), (True,) * 400 + (False,) * 100
    row = analysis.estimate_classes(values, marks)
    right, wrong = values[:400], values[400:]
    errors = {"right": right.std() / 20, "wrong": wrong.std() / 10, "all": values.std() / np.sqrt(500)}
    errors["difference"] = np.hypot(errors["right"], errors["wrong"])
    for name, error in errors.items():
        assert (row[name].high - row[name].low) / 2 == pytest.approx(1.96 * error, rel=0.1), name
    assert row["difference"].mean == pytest.approx(wrong.mean() - right.mean())


def test_both_classes_are_drawn_on_their_own():
    row = analysis.estimate_classes(np.tile(np.arange(10.0), 2), (True,) * 10 + (False,) * 10)
    assert row["difference"].low < -1 < 0 == row["difference"].mean < 1 < row["difference"].high


def test_other_marks_turn_the_difference_round():
    one, other = (analysis.estimate_classes(np.array([1.0, 2.0, 4.0, 8.0]), (x, x, not x, not x)) for x in (True, False))
    assert one["right"].mean == other["wrong"].mean == 1.5
    assert one["difference"].mean == -other["difference"].mean == 4.5


def test_the_table_has_a_line_for_each_measure_that_any_trace_has_and_dashes_for_what_a_class_lacks():
    found = jkv.analyze(TEXTS[:1], [True])
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert lines[0] == "| measure | all (1) | right (1) | wrong (0) | wrong - right | source |"
    assert "| similar steps, cosine > 0.8 | 50.0% | 50.0% | - | - | MemShare Fig. 2 |" in lines
    assert "| words | 4.0 | 4.0 | - | - |  |" in lines
    assert len({line.count("|") for line in lines}) == 1
    assert not any("first 128" in line for line in lines)
    assert "nan" not in str(found).lower()


def test_a_cell_counts_the_samples_of_figures_that_not_all_have():
    assert "| 33.3% (0.0 to 50.0), n=3 | 50.0% | 25.0% (0.0 to 50.0) | -25.0 |" in str(jkv.analyze(TEXTS, RIGHT))


def test_texts_that_say_nothing_give_lengths_alone():
    assert set(jkv.analyze(["", " \n\n "]).known) == {"tokens", "steps", "sentences", "thoughts"}


def test_tokens_are_the_tokenizers():
    found = jkv.analyze(["AB\n\nAB.\n\n"], tokenizer=TinyTokenizer())
    assert found.counted_in == "tokens"
    assert found.figures[0]["tokens"] == 6
    assert jkv.analyze("AB").counted_in == "words"  # and one text may come alone


def test_a_record_is_json_and_holds_every_samples_figures(tmp_path):
    found = jkv.analyze(TEXTS, RIGHT)
    found.save(tmp_path / "a.json")
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["right"] == RIGHT
    assert record["figures"]["similar_steps_0.9"] == [0.5, 0.0, 0.5, None]
    assert set(record["figures"]) == set(record["estimates"]) == set(MEASURES)
    assert record["estimates"]["tokens"]["wrong"]["mean"] == found.estimates["tokens"]["wrong"].mean


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "at least one; got none"),
        (([None],), "number 0 is None. A model without a tokenizer"),
        ((["a", b"b"],), "number 1 is b'b'"),
        ((["a"], [True, False]), "got 2 for 1"),
        ((["a"], ["yes"]), "number 0 is 'yes'"),
        ((["a"], [1.0]), "number 0 is 1.0"),
        ((["a"], None, "gpt2"), "got str. Without one"),
        ((["a"], None, None, "embedding"), "a table of a model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_refused_in_words(arguments, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the words are looked for below
        analysis.analyze(*arguments)
    assert words in str(caught.value)
