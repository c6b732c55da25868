"""The recorder of random mixes: equal runs have equal digests, and whatever differs is named."""

import json

import numpy as np
import pytest

from jkv.engine.samples import Sample
from tests.support import recorded_mixes
from tests.support.played_mixes import play
from tests.support.recorded_mixes import compare, plan, record

KIND, SEED, TICKET = "common", 3, 4


@pytest.fixture(scope="module")
def played():
    return play(KIND, SEED)


def test_equal_runs_have_equal_digests(played):
    assert play(KIND, SEED).digests == played.digests
    assert played.counts["tokens"] > 100


def test_a_log_probability_that_differs_in_its_last_bit_is_seen(played, monkeypatch):
    advance = Sample.advance

    def changed(sample, row):
        advance(sample, row)
        if sample.ticket == TICKET:
            row.log_probs[:] = np.nextafter(np.array(row.log_probs, np.float32), np.float32(-9)).tolist()

    monkeypatch.setattr(Sample, "advance", changed)
    digests = play(KIND, SEED).digests
    differing = {
        (name, part) for name in digests for part in digests[name] if digests[name][part] != played.digests[name][part]
    }
    assert differing == {(str(TICKET), "log-probabilities"), ("events", "all")}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A record of two mixes, which `play` does not have to play."""
    monkeypatch.setattr(recorded_mixes, "play", lambda name, seed: Played(name, seed))
    monkeypatch.setattr(recorded_mixes.jax, "clear_caches", lambda: None)
    path = tmp_path / "before.json"
    record(path, 2)
    return path


class Played:
    """What a mix leaves."""

    def __init__(self, name, seed):
        self.digests = {"0": {"tokens": f"{name} {seed}", "texts": "1f"}, "events": {"all": "2e"}}
        self.counts = {"tokens": 7}


def changed(path, change):
    """A copy of a record after a change."""
    content = json.loads(path.read_text())
    change(content)
    other = path.with_name("after.json")
    other.write_text(json.dumps(content))
    return other


def test_what_differs_is_named(written, capsys):
    assert compare(written, written) == 0
    names = [name for name, _ in plan(2)]
    assert compare(written, changed(written, lambda content: content["mixes"][1]["digests"]["0"].update(texts="0"))) == 1
    assert f"{names[1]}, seed 0:\n  0: texts\n1 of 2 mixes differ." in capsys.readouterr().out
    assert compare(written, changed(written, lambda content: content["mixes"].pop(0))) == 1
    assert f"{names[0]}, seed 0:\n  only in the first record\n" in capsys.readouterr().out


def test_records_of_other_versions_and_machines_are_not_compared(written):
    for name in ("jax", "cpu"):
        with pytest.raises(SystemExit, match=f"on one machine with the same versions; got {name} "):
            compare(written, changed(written, lambda content, name=name: content["machine"].update({name: "another"})))


def test_a_record_that_was_broken_off_goes_on(written, monkeypatch):
    other = changed(written, lambda content: content["mixes"].pop())
    record(other, 2)
    assert other.read_text() == written.read_text()
    monkeypatch.setattr(recorded_mixes, "source", lambda: {"library": "another", "player": "another"})
    with pytest.raises(SystemExit, match="A record goes on with its own source"):
        record(other, 2)


def test_a_record_that_lacks_what_is_promised_fails(tmp_path, written, monkeypatch, capsys):
    monkeypatch.setattr(recorded_mixes, "NUM_MIXES", 2)
    with pytest.raises(SystemExit, match="lack what a record promises"):
        record(tmp_path / "all.json", 2)
    assert "Not covered: compactions, evicted" in capsys.readouterr().out
