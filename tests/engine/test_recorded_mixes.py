"""The record of random mixes: equal where nothing has changed; whatever changes is seen."""

import copy
import dataclasses
import functools
import json
import re

import numpy as np
import pytest

import jkv
from jkv.policies import POLICIES
from tests.support import recorded_mixes
from tests.support.recorded_mixes import KINDS, PROMISED, compare, covered, differences, main, plan, record

MIXES = [("common", 0), ("service", 0)]


@pytest.fixture
def two_mixes(monkeypatch):
    """A record has a mix of two kinds."""
    monkeypatch.setattr(recorded_mixes, "plan", lambda num_mixes: MIXES[:num_mixes])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Such a record, made in two pieces."""
    path = tmp_path_factory.mktemp("records") / "before.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_mixes, "plan", lambda num_mixes: MIXES[:num_mixes])
        assert len(record(path, 1)["mixes"]) == 1
        return record(path, 2)


@pytest.fixture
def changed(tmp_path, written):
    """Compares the record with a changed copy."""

    def compare_with(change):
        paths, other = [tmp_path / "before.json", tmp_path / "after.json"], copy.deepcopy(written)
        change(other)
        for path, content in zip(paths, (written, other), strict=True):
            path.write_text(json.dumps(content))
        return compare(*paths)

    return compare_with


def differing_parts(written, name):
    """What differs when the first mix of a kind is played again."""
    before = next(mix["digests"] for mix in written["mixes"] if mix["kind"] == name)
    lines = differences(before, recorded_mixes.play(name, 0).digests)
    return {part for line in lines for part in line.partition(": ")[2].split(", ")}


def test_the_same_mixes_have_the_same_record(tmp_path, written, two_mixes, capsys):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    paths[0].write_text(json.dumps(written))
    main(["record", str(paths[1]), "--mixes", "2"])
    assert "2 mixes of 2 kinds:" in capsys.readouterr().out
    assert compare(*paths) == 0
    assert "0 of 2 mixes differ." in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, paths)])
    assert ended.value.code == 0


def test_a_record_that_was_broken_off_goes_on(tmp_path, written, two_mixes, monkeypatch):
    path, played = tmp_path / "record.json", []
    path.write_text(json.dumps(written | {"mixes": written["mixes"][1:]}))
    play = recorded_mixes.play
    monkeypatch.setattr(recorded_mixes, "play", lambda *names: played.append(names) or play(*names))
    record(path, 2)
    assert played == MIXES[:1]
    assert json.loads(path.read_text()) == written


def test_no_record_goes_on_with_another_tree(tmp_path, written, two_mixes):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(written | {"source": written["source"] | {"library": "another"}}))
    with pytest.raises(SystemExit, match="its own source"):
        record(path, 2)


def test_a_record_fails_where_it_lacks_what_it_promises(tmp_path, written, two_mixes, monkeypatch, capsys):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(written))
    monkeypatch.setattr(recorded_mixes, "NUM_MIXES", 2)
    with pytest.raises(SystemExit, match="lack what a record promises"):
        record(path, 2)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("Not covered: ")
    assert "steered tokens" in told
    assert "compactions" not in told


def test_all_kinds_and_policies_are_promised():
    names = [name for name, _ in plan(recorded_mixes.NUM_MIXES)]
    assert len(set(plan(recorded_mixes.NUM_MIXES))) == recorded_mixes.NUM_MIXES
    assert set(names) == set(KINDS)
    assert {f"tokens of {name}" for name in POLICIES} < set(PROMISED)


def test_a_planted_difference_is_reported(changed, capsys):
    def change(other):
        parts = other["mixes"][1]["digests"]
        name = next(name for name, digests in parts.items() if "log-probabilities" in digests)
        parts[name]["log-probabilities"] = "0"

    assert changed(change) == 1
    told = capsys.readouterr().out
    assert re.search(r"\nservice, seed 0:\n  [\d, ]+: log-probabilities\n1 of 2 mixes differ.\n$", told)


def test_a_mix_or_result_that_is_missing_is_reported(changed, capsys):
    assert changed(lambda other: other["mixes"].pop(0)) == 1
    assert "common, seed 0:\n  only in the first record" in capsys.readouterr().out
    assert changed(lambda other: other["mixes"][0]["digests"].pop("events")) == 1
    assert "common, seed 0:\n  events: all" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cpu", "jax"])
def test_records_of_two_machines_are_not_compared(changed, name):
    with pytest.raises(SystemExit, match=f"on one machine with the same versions; got {name} '.+' and 'another'"):
        changed(lambda other: other["machine"].update({name: "another"}))


def test_a_log_probability_of_the_next_number_is_seen(written, monkeypatch):
    result, is_first = jkv.Engine.result, [True]

    def another(engine, ticket):
        out = result(engine, ticket)
        if is_first and out.lengths[0]:
            is_first.clear()
            out.logprobs[0, 0] = np.nextafter(out.logprobs[0, 0], np.float32(1))
        return out

    monkeypatch.setattr(jkv.Engine, "result", another)
    assert differing_parts(written, "common") == {"log-probabilities"}


def test_the_eviction_of_another_slot_is_seen(written, monkeypatch):
    make = POLICIES["streaming_llm"]

    @functools.wraps(make)
    def with_one_more_sink(*arguments, **settings):
        policy = make(*arguments, **settings)
        return dataclasses.replace(policy, evict=dataclasses.replace(policy.evict, sinks=policy.evict.sinks + 1))

    monkeypatch.setitem(POLICIES, "streaming_llm", with_one_more_sink)
    assert covered(written["mixes"])["changed by streaming_llm"]
    assert {"trace", "log-probabilities"} <= differing_parts(written, "common")
