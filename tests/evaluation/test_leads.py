"""The log of what was tried: its command at sizes of a test, and its scores by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.cache.pool import EMPTY
from jkv.evaluation import leads
from jkv.eviction.view import CacheView


@pytest.fixture
def view():
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(1, 2, 12, 4)), jnp.float32) for _ in range(2))
    position = np.arange(12)
    position[10:] = EMPTY
    query = jnp.asarray(rng.normal(size=(1, 2, leads.WINDOW, 4)), jnp.float32)
    carried = jnp.zeros((1, 2, 12)).at[0, 0, 3].set(0.9)
    return CacheView(
        key, value, jnp.broadcast_to(jnp.asarray(position, jnp.int32), (1, 2, 12)), query, carried=carried, layer=0
    )


@pytest.mark.slow
def test_the_command_has_a_line_for_each_score_and_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leads, "PARTS", {name: leads.PARTS[name] for name in ("whole", "without age", "4 hidden units")})
    sizes = ("--texts", "2", "--training", "2", "--steps", "2")
    leads.main([*sizes, "--leads", "foresight;foresight, drawn, temperature 1;random", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert (tmp_path / "leads.md").read_text() == said
    lines = [line.split(" | ") for line in said.splitlines() if line.startswith("| ")]
    names = [line[0].removeprefix("| ") for line in lines]
    tried = ["score", "oracle", "foresight", "foresight, drawn, temperature 1", "random"]
    assert names == [*tried, "score", *leads.PARTS]
    losses = {name: float(line[3]) for name, line in zip(names, lines, strict=True) if name not in ("score", "whole")}
    assert losses["oracle"] < losses["foresight"] < losses["random"]
    assert lines[3][5].startswith("foresight")  # beside which it stands
    assert lines[4][4] == ""


def test_stratified_ranks_keep_a_slot_of_each_block_before_a_second_of_any(view):
    score = np.asarray(leads.Stratified(4)(view))[0, 0, :10]
    best = np.argsort(-score)
    assert sorted(best[:3] // 4) == [0, 1, 2]
    assert sorted(best[3:6] // 4) == [0, 1, 2]


def test_a_memory_keeps_the_largest_attention_or_its_fading_sum(view):
    now = np.asarray(leads.largest_attention(view, leads.WINDOW))
    largest, carried = (np.asarray(x) for x in leads.Remembered(1.0)(view))
    np.testing.assert_array_equal(largest, carried)
    assert largest[0, 0, 3] == pytest.approx(max(0.9, now[0, 0, 3]))
    np.testing.assert_allclose(np.delete(largest[0, 0], 3), np.delete(now[0, 0], 3))
    added = np.asarray(leads.Remembered(0.5, is_sum=True)(view)[0])
    assert added[0, 0, 3] == pytest.approx(now[0, 0, 3] + 0.45)


def test_drawn_scores_are_drawn_in_proportion_to_their_weights(view):
    """The noise of each position is that of a Gumbel distribution: the mean of the largest of many is ln n + 0.577."""
    position = jnp.arange(40_000, dtype=jnp.int32)[None, None]
    noise = np.asarray(leads.gumbel(view._replace(position=position)))
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.std() == pytest.approx(np.pi / 6**0.5, abs=0.02)
