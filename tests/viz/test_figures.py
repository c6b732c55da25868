"""Static figures: their lines are the numbers, whatever they look like."""

import builtins
import json
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.viz import look
from tests.viz.pages import recount

RESULTS = Path(__file__).parent.parent.parent / "results"
RECORDS = [
    {"policy": policy, "pool_tokens": size // 100, "pool_bytes": size, "tokens_per_second": rate, "concurrency": rate / 50}
    for policy, size, rate in (("r_kv", 4_000_000, 300.0), ("full", 2_000_000, 100.0), ("r_kv", 2_000_000, 200.0))
]


def line(axes, name):
    """The points of the line with a name."""
    (found,) = [one for one in axes.lines if one.get_label() == name]
    return found.get_xydata()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_cache_size_draws_what_each_query_finds(evicting, choosing):
    figure = jkv.viz.cache_size({"r_kv": evicting, "quest": choosing})
    (axes,) = figure.axes
    for name, out in {"r_kv": evicting, "quest (read)": choosing}.items():
        points, prompt = line(axes, name), len(out.prompts[0])
        assert points[:, 0].tolist() == list(range(1, out.lengths[0] + 1))
        expected = [recount(out, prompt + t).mean(axis=0).sum() for t in range(out.lengths[0])]
        np.testing.assert_allclose(points[:, 1], expected)
    assert line(axes, "full cache").tolist() == [[1, 6], [44, 49]]
    assert "r_kv, peak 24" in texts(axes)  # the budget and an interval


def test_the_peak_is_what_the_pool_held(evicting):
    (axes,) = jkv.viz.cache_size(evicting, sample=1).axes
    slots, page = line(axes, "slots held")[:, 1].max(), 4 * (2 * 8 * 4 + 4)  # bytes: keys, values and position
    assert evicting.samples[1].peak_kv_bytes == 4 * np.ceil(slots / 4) * page


def test_a_token_read_twice_is_held_once(sharing):
    (axes,) = jkv.viz.cache_size(sharing).axes
    assert line(axes, "slots held")[:, 1].tolist() == [6, 7, 8, 9, 10, 11, 10, 11, 12, 13, 12, 12.75]


def test_frontier_draws_recorded_outcomes():
    path = RESULTS / "all-tiny-reasoner.json"
    outcomes = json.loads(path.read_text())["outcomes"]
    figure = jkv.viz.frontier(path)
    (axes,) = figure.axes
    drawn = {container.get_label(): container for container in axes.containers}
    assert set(drawn) == {one["policy"] for one in outcomes} - {"full"} == set(texts(axes)) - {"full cache"}
    for name, container in drawn.items():
        mine = sorted((one for one in outcomes if one["policy"] == name), key=lambda one: one["kv_share"])
        expected = [[100 * one["kv_share"], 100 * one["accuracy"]] for one in mine]
        np.testing.assert_allclose(container.lines[0].get_xydata(), expected)
        bars = [segment[:, 1].tolist() for segment in container.lines[2][0].get_segments()]
        np.testing.assert_allclose(bars, [[100 * one["low"], 100 * one["high"]] for one in mine], atol=1e-9)


def test_ranking_draws_a_bar_for_each_policy_of_a_budget_the_best_on_top():
    outcomes = json.loads((RESULTS / "all-tiny-reasoner.json").read_text())["outcomes"]
    figure = jkv.viz.ranking(outcomes, 0.25, "A quarter", mark=["foresight"], leave_out=["quest"])
    (axes,) = figure.axes
    wanted = {one["policy"]: 100 * one["accuracy"] for one in outcomes if one["share"] == 0.25 and one["policy"] != "quest"}
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert dict(zip(names, (bar.get_width() for bar in axes.patches), strict=True)) == wanted
    assert sorted(wanted.values()) == [bar.get_width() for bar in axes.patches]
    colours = {name: bar.get_facecolor() for name, bar in zip(names, axes.patches, strict=True)}
    assert [name for name, colour in colours.items() if colour != colours["h2o"]] == ["foresight"]
    assert line(axes, "full cache")[0, 0] == 100 * outcomes[0]["accuracy"]


def test_throughput_draws_a_line_for_each_policy(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({"machine": {"cores": 2}, "pools": RECORDS}))
    for records in (RECORDS, path):
        speed, running = jkv.viz.throughput(records).axes
        assert line(speed, "r_kv").tolist() == [[2, 200], [4, 300]]
        assert line(speed, "full").tolist() == [[2, 100]]
        assert line(running, "r_kv").tolist() == [[2, 4], [4, 6]]
        assert running.get_xlabel() == "pool, MB"


def test_distances_draw_each_matrix_and_pairs_of_the_same_tokens():
    near = np.arange(16.0).reshape(4, 4)
    is_same = np.zeros((4, 4), bool)
    is_same[1, 3] = True
    axes = jkv.viz.distances({"raw": near, "values": 2 * near}, is_same).axes
    off = ~np.eye(4, dtype=bool)
    for i, factor in enumerate((1, 2)):
        drawn = axes[i].images[0].get_array()
        assert (drawn[off] == factor * near[off]).all()
        assert axes[i].collections[0].get_offsets().tolist() == [[3, 1]]
    assert axes[1].get_title(loc="left") == "values"


def test_a_figure_is_its_own_and_shows_itself(tmp_path):
    from matplotlib import pyplot

    figure = jkv.viz.distances({"raw": np.eye(3)})
    assert not pyplot.get_fignums()  # none that somebody has to close
    assert figure._repr_png_()[:4] == b"\x89PNG"
    figure.savefig(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


def test_names_beside_lines_keep_apart_and_inside():
    for wanted in ([0.5] * 5, [0.97, 1.2, 1.0], [-1.0, 0.0, 0.02], np.linspace(0, 1, 30).tolist()):
        places = look.spread(wanted, 0.08)
        gaps = np.diff(sorted(places))
        assert gaps.min() > min(0.08, 1 / (len(wanted) - 1)) - 1e-9
        assert 0 <= min(places) <= max(places) <= 1 + 1e-9
        assert np.argsort(places)[0] == max(i for i, place in enumerate(wanted) if place == min(wanted))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda out: jkv.viz.cache_size({}), "at least one result"),
        (lambda out: jkv.viz.cache_size(out, sample=7), "got 7"),
        (lambda out: jkv.viz.frontier([{"policy": "full"}]), "some have no accuracy"),
        (lambda out: jkv.viz.frontier(RESULTS / "cost.json"), 'an object with "outcomes"'),
        (lambda out: jkv.viz.ranking(RESULTS / "all-tiny-reasoner.json", 0.2, "x"), "No policy has the budget 20%"),
        (lambda out: jkv.viz.ranking(RESULTS / "all-tiny-reasoner.json", 0.25, "x", ["me"]), "the name me"),
        (lambda out: jkv.viz.throughput([]), "got none"),
        (lambda out: jkv.viz.throughput([{"policy": "full"}]), "records with policy, pool_bytes"),
        (lambda out: jkv.viz.throughput(RESULTS / "cost.json"), "a list of records"),
        (lambda out: jkv.viz.distances({"raw": np.zeros((2, 3))}), "pages by pages"),
    ],
)
def test_what_cannot_be_drawn_is_refused(evicting, draw, words):
    with pytest.raises(ValueError, match=words):
        draw(evicting)


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **settings):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **settings)

    look.figure_class.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install .jkv-cache\[eval\]"):
        jkv.viz.distances({"raw": np.eye(3)})


def test_learning_draws_the_mean_of_each_arms_runs_and_their_span():
    runs = {
        "full": [{"step": [0, 10], "reward": [0.1, 0.5]}, {"step": [0, 10], "reward": [0.1, 0.7]}],
        "r_kv": [{"step": [0, 10], "reward": [0.1, 0.4]}],
    }
    (axes,) = jkv.viz.learning(runs).axes
    np.testing.assert_allclose(line(axes, "full"), [[0, 0.1], [10, 0.6]])
    np.testing.assert_allclose(line(axes, "r_kv"), [[0, 0.1], [10, 0.4]])
    spans = [band.get_paths()[0].get_extents().extents[[1, 3]].tolist() for band in axes.collections]
    assert spans == [[0.1, 0.7], [0.1, 0.4]]
    assert set(texts(axes)) == set(runs)
    with pytest.raises(ValueError, match="the runs of r_kv are not"):
        jkv.viz.learning({"r_kv": [runs["r_kv"][0], {"step": [0], "reward": [0.1]}]})
    with pytest.raises(ValueError, match="at least one run"):
        jkv.viz.learning({})
