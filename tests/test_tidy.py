"""Results as tables: a record for each policy and budget or each text, as CSV and for pandas."""

import csv
import dataclasses
import io
import math
import sys
import types

import numpy as np
import pytest

import jkv
from jkv.analysis.recall import Recall
from jkv.cache.slot_size import slot_size
from jkv.evaluation.choose import Choice, Row
from jkv.evaluation.probe import Reading
from jkv.testing import TINY
from jkv.tidy import csv_of, records_of
from tests.evaluation.test_contrasts import outcome

RECALL = Recall("r,kv", 24, np.arange(8.0).reshape(2, 2, 2), np.array([0.5, 0.25]))
READING = Reading("facts", "r_kv", "Policy()", 24, 1, ["near", "far"], [-1.5, -2.0], 10.0, 0.5, "{}")


def parsed(results):
    """What a reader of the CSV sees."""
    return list(csv.DictReader(io.StringIO(csv_of(records_of(results)))))


def test_a_text_is_a_record():
    assert records_of([RECALL]) == [
        {"policy": "r,kv", "budget": 24, "text": 0, "recall": 1.0, "sharp_recall": 2.0, "loss": 0.5, "identical": None},
        {"policy": "r,kv", "budget": 24, "text": 1, "recall": 5.0, "sharp_recall": 6.0, "loss": 0.25, "identical": None},
    ]
    assert [(one["text"], one["group"], one["log_prob"], one["seed"]) for one in parsed([READING])] == [
        ("0", "near", "-1.5", "1"),
        ("1", "far", "-2.0", "1"),
    ]
    rows = [Row("mine", jkv.r_kv(budget), budget, np.array([0.5, 0.25]), budget == 24) for budget in (24, 12)]
    slot = slot_size(TINY, np.float32, None)
    choice = Choice("tiny", slot, [40, 60], 1.0, 0.05, rows, [])
    assert [(one["budget"], one["kv_bytes"], one["text"], one["loss"], one["is_tied"]) for one in records_of(choice)] == [
        (budget, budget * slot.whole, i, loss, budget == 24) for budget in (24, 12) for i, loss in enumerate((0.5, 0.25))
    ]


def test_an_outcome_is_a_record_of_its_figures_with_their_intervals():
    one = dataclasses.replace(
        outcome("r_kv", "1010"),
        accuracy=0.5,
        touched_each="1000",
        pass_at={"1": [0.5, 0.25, 0.75], "4": [1.0, 0.5, 1.0]},
        touched_change=[-0.5, -1.0, 0.0],
        seed_accuracy=[0.5, 0.75],
        sharing={"shared": 1},
        lengths=[1, 2, 3, 4],
    )
    (record,) = records_of([one])
    assert {"right", "touched_each", "lengths", "sharing", "pass_at"}.isdisjoint(record)
    expected = {"policy": "r_kv", "accuracy": 0.5, "touched": 0.25, "seeds": 2, "pass_at_4": 1.0, "pass_at_4_low": 0.5}
    assert {name: record[name] for name in expected} == expected
    assert [record[f"touched_change{end}"] for end in ("", "_low", "_high")] == [-0.5, -1.0, 0.0]
    assert math.isnan(record["touched_accuracy_low"])
    assert parsed([one])[0]["budget"] == str(one.budget or "")


def test_a_data_frame_is_made_of_the_records(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=tuple))
    assert jkv.to_pandas([RECALL, RECALL]) == tuple(records_of(RECALL) * 2)
    monkeypatch.setitem(sys.modules, "pandas", None)  # not installed
    with pytest.raises(jkv.InputError, match=r'not installed. Run: pip install "jkv-cache\[eval\]"'):
        jkv.to_pandas([RECALL])


@pytest.mark.parametrize("results", [3, "text", [3], [RECALL, "text"], None], ids=repr)
def test_what_is_no_result_is_refused(results):
    with pytest.raises(jkv.InputError, match="A table is made of what"):
        jkv.to_pandas(results)
