"""The comparison of blocks, repairs and budgets by head: what is compared with what, and the report."""

import json

import numpy as np
import pytest

import jkv
from jkv.statistics import bootstrap
from jkv.testing import tiny_model
from research.evaluation import rules

TEXTS = [([1, 2, 3, 4, 5, 6], [*range(4, 30)] * 3), ([3] * 20, [5, 6, 7, 8] * 14)]


def test_each_variant_is_compared_with_the_policy_that_it_changes():
    model = tiny_model()
    policies = rules.variants(model, TEXTS[:1], budget=48)
    lines = {line["name"]: line for line in rules.measure(model, TEXTS, policies)}
    assert len(lines) == len(policies) == 5 + 2 * 3 + 3 + 3
    for (name, beside), policy in policies.items():
        assert policy.budget == 48
        assert policy.protected == 19
        assert lines[name].get("beside") == beside
    assert np.sum(lines["cur, budgets by head"]["slots"]) == 48 * 2 * 2
    plain, own = jkv.recall(model, TEXTS, [policies["cur", None], policies["cur, blocks of 4", "cur"]], interval=16)[1:]
    line = lines["cur, blocks of 4"]
    assert line["change"] == pytest.approx((own.loss - plain.loss).mean(), rel=6e-3)
    assert line["interval"] == pytest.approx(bootstrap(own.loss - plain.loss), rel=6e-3)
    record = {"model": "tiny", "texts": 2, "calibration": 1, "budget": 48, "lines": [*lines.values()]}
    record["about"] = json.loads((rules.Path("results") / "choose-tiny-reasoner.json").read_text())["about"]
    page = rules.table(record)
    assert page.count("| cur |\n") == 4
    assert f"| cur, blocks of 4 | {line['recall']:.3f} |" in page
