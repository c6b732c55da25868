"""Engines, replays and trainers compute the log-probabilities of the draws; a full cache does not, where slots were evicted."""

from research.bench import ledger
from tests.research.bench.test_benchmarks import bench

FEW = "engine, the same batch", "replay in a trainer's batch", "replay in a packed batch", "full cache"


def test_every_way_but_the_full_cache_has_the_numbers_of_the_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "WAYS", {name: ledger.WAYS[name] for name in FEW})
    monkeypatch.setattr(ledger, "ROWS", 2)
    records = bench(capsys, tmp_path, "ledger", "--policies", "r_kv")["records"]
    assert [one["way"] for one in records] == [*FEW]
    assert {one["tokens"] for one in records} == {48}
    assert records[0]["equal_bits"] == 1
    assert all(one["p99"] <= 1e-5 for one in records[:3])
    assert records[3]["largest"] > 0.1
