"""Contrasts of a comparison: which there are, their difference and p, and what is refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
from scipy import stats

from jkv import cli
from jkv.evaluation.compare import Outcome
from jkv.evaluation.contrasts import check_contrasts, find_contrasts, section


def outcome(policy, right, budget=None, share=None, is_each=False):
    """An outcome of which only the name, the size and the answers matter."""
    said = {"policy": policy, "right": right, "budget": budget, "share": share, "problems": 40, "is_each": is_each}
    required = [field for field in dataclasses.fields(Outcome) if field.default is field.default_factory]  # both missing
    return Outcome(**{field.name: field.type() for field in required if field.name not in said}, **said)


def drawn(share, seed, samples=1):
    return "".join("01"[int(x < share)] for x in np.random.default_rng(seed).random(40 * samples))


@pytest.fixture
def outcomes():
    return [
        outcome("full", drawn(0.99, 0)),
        outcome("a", drawn(0.9, 1), 40, 0.25),
        outcome("a", drawn(0.95, 2), 80, 0.5),
        outcome("b", drawn(0.3, 3), 40, 0.25),
        outcome("b", drawn(0.8, 4), 80, 0.5),
        outcome("b", drawn(0.8, 7), 80, 0.5, is_each=True),
        outcome("c", drawn(0.6, 5)),
    ]


def test_policies_are_compared_at_each_budget_that_both_have(outcomes):
    found = find_contrasts(outcomes, [["a", "b"], ["c", "a"], ["full", "c"]])
    sizes = [(one.this.policy, one.other.policy, one.this.share, one.other.share) for one in found]
    assert sizes == [
        ("a", "b", 0.25, 0.25),
        ("a", "b", 0.5, 0.5),
        ("c", "a", None, 0.25),
        ("c", "a", None, 0.5),
        ("full", "c", None, None),
    ]


def test_policies_of_equal_bytes_are_compared_whatever_their_slots():
    this, other, less = (
        dataclasses.replace(outcome(name, drawn(share, seed), slots), num_bytes=num_bytes)
        for name, share, seed, slots, num_bytes in (
            ("a", 0.9, 1, 40, "64kB"),
            ("b", 0.5, 2, 80, "64kB"),
            ("b", 0.5, 3, 40, "32kB"),
        )
    )
    (found,) = find_contrasts([this, other, less], [["a", "b"]])
    assert (found.this, found.other) == (this, other)
    assert "| a - b | 64kB |" in section([found])


def test_figures_are_those_of_the_pairs_and_corrected_for_all(outcomes):
    found = find_contrasts(outcomes, [["a", "b"], ["c", "a"]])
    ps = []
    for one in found:
        better = sum(x > y for x, y in zip(one.this.right, one.other.right, strict=True))
        worse = sum(x < y for x, y in zip(one.this.right, one.other.right, strict=True))
        assert one.difference[0] == pytest.approx((better - worse) / 40)
        assert one.difference[1] < one.difference[0] < one.difference[2]
        ps.append(stats.binomtest(better, better + worse).pvalue)
        assert one.p == pytest.approx(ps[-1])
    largest = 0.0
    for rank, i in enumerate(sorted(range(4), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (4 - rank) * ps[i]))
        assert found[i].corrected == pytest.approx(largest)


def test_several_seeds_are_compared_with_one_run(outcomes):
    several = outcome("r", drawn(0.3, 6, samples=5), 40, 0.25)
    (one,) = find_contrasts([*outcomes, several], [["a", "r"]])
    means = [several.right[5 * i : 5 * i + 5].count("1") / 5 for i in range(40)]
    assert one.difference[0] == pytest.approx(np.mean([int(x) - y for x, y in zip(one.this.right, means, strict=True)]))
    assert one.p < 0.01


def test_the_section_says_how_many_contrasts_there_are(outcomes):
    text = section(find_contrasts(outcomes, [["a", "b"], ["c", "a"]]))
    assert text.startswith("4 contrasts, named before the run.")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert rows[2].startswith("| a - b | 40 (25%) | +")
    assert "| c - a | 80 (50%) |" in text
    assert "< 0.001" in rows[2]


@pytest.mark.parametrize(
    ("contrasts", "words"),
    [
        ([["a"]], "a pair of different policies"),
        (["ab"], "a pair of different policies"),
        ([["a", 3]], "a pair of different policies"),
        ([["a", "a"]], "a pair of different policies"),
        ([["a", "x"]], "between policies that run, a, b; got x"),
    ],
)
def test_what_names_no_two_policies_is_refused(contrasts, words):
    check_contrasts([["a", "b"], ["full", "b"]], ["a", "b"])
    with pytest.raises(ValueError, match=words):
        check_contrasts(contrasts, ["a", "b"])


def test_contrasts_of_a_file_stand_below_its_table(tmp_path, capsys):
    file, out = tmp_path / "some.toml", tmp_path / "out"
    text = 'problems = 2\nmax_new_tokens = 16\npolicies = ["streaming_llm", "random"]\nbudgets = [32, 48]\nseeds = 2\n'
    file.write_text(text + 'contrasts = [["streaming_llm", "random"]]\n[protection]\nsinks = 4\nrecent = 8\n')
    assert cli.main(["eval", "--config", str(file), "--out", str(out)]) == 0
    page, printed = (out / "some-tiny-reasoner.md").read_text(), capsys.readouterr().out
    record = json.loads((out / "some-tiny-reasoner.json").read_text())
    assert record["about"]["contrasts"] == [["streaming_llm", "random"]]
    assert page.count("| streaming_llm - random |") == printed.count("| streaming_llm - random |") == 2
    for words in (
        "2 contrasts, named before the run.",
        "Every policy that evicts protects 4 sinks and 8 recent slots. By rules of their own: streaming_llm.",
    ):
        assert words in page
        assert words in printed
    assert record["about"]["settings"] == {"streaming_llm": {"sinks": 4}, "random": {"sinks": 4, "recent": 8}}
    names = {path.name for path in (out / "some-tiny-reasoner-generations").iterdir()}
    assert names >= {"random-32-seed0.jsonl", "random-32-seed1.jsonl", "streaming_llm-32.jsonl"}
    file.write_text(text)
    assert cli.main(["eval", "--config", str(file), "--out", str(out), "--resume"]) == 2
    (names,) = re.findall(r"holds another comparison, by (.*?) \(", capsys.readouterr().err)
    assert {"contrasts", "protection"} <= set(names.split(", "))
