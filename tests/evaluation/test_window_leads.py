"""Windows by head: the score against single windows, the choice, and the command at sizes of a test."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.evaluation import window_leads
from jkv.evaluation.window_leads import ByHead, counted_heads
from jkv.eviction.scores import AttentionMass
from jkv.eviction.view import CacheView
from jkv.policies.r_kv import redundancy_of


@pytest.fixture
def view():
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(2, 2, 12, 4)), jnp.float32) for _ in range(2))
    position = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 2, 12))
    query = jnp.asarray(rng.normal(size=(2, 4, 8, 4)), jnp.float32)
    return CacheView(key, value, position, query, layer=jnp.arange(2, dtype=jnp.int32))


@pytest.mark.parametrize("importance", [1.0, 0.1])
def test_each_layer_and_head_is_scored_by_its_own_window(view, importance):
    windows = ((2, 8), (4, 2))
    got = np.asarray(ByHead(windows, importance)(view))
    redundancy = np.asarray(redundancy_of(view, 0.5))
    for layer, head in np.ndindex(2, 2):
        mass = np.asarray(AttentionMass(windows[layer][head], candidates="all")(view))
        expected = importance * mass[layer, head] - (1 - importance) * redundancy[layer, head]
        np.testing.assert_allclose(got[layer, head], expected, rtol=1e-6)


def test_the_score_needs_the_longest_window():
    assert ByHead(((2, 8), (4, 2))).needs.window == 8


def test_heads_are_counted_by_window():
    assert counted_heads([[1, 4], [4, 64]]) == [(1, 1), (4, 2), (64, 1)]


@pytest.mark.slow
def test_the_command_compares_own_windows_with_the_best_single_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(window_leads, "WINDOWS", (1, 16))
    monkeypatch.setattr(window_leads, "FAMILIES", window_leads.FAMILIES[:1])
    window_leads.main(["--texts", "2", "--calibration", "2", "--out", str(tmp_path)])
    assert (tmp_path / "leads-windows.md").read_text() == capsys.readouterr().out
    lines = [line.split(" | ") for line in (tmp_path / "leads-windows.md").read_text().splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines[1:]] == [
        "| snap_kv, window 1",
        "| snap_kv, window 16",
        "| snap_kv, a window for each head",
    ]
    assert lines[-1][5].startswith("snap_kv, window")
