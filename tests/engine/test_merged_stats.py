"""The statistics of several engines as one: no counter is left out."""

import dataclasses

from jkv.engine.stats import ALIKE, MEANS, SIDE_BY_SIDE, RunStats, merged_stats


def test_counts_are_summed_seconds_are_the_longest_and_means_are_weighted():
    runs = [RunStats(), RunStats()]
    numbers = [field.name for field in dataclasses.fields(RunStats) if isinstance(getattr(runs[0], field.name), int | float)]
    for value, run in zip((2, 5), runs, strict=True):
        for name in numbers:
            setattr(run, name, value)
        run.first_token.add(0.1, value)
        run.idle.seconds = run.idle.between = value
        run.sharing.shared = value
    out = merged_stats(runs)
    for name in {*numbers} - {*ALIKE}:
        expected = 5 if name in SIDE_BY_SIDE else (2 * 2 + 5 * 5) / 7 if name in MEANS else 7
        assert getattr(out, name) == expected, name
    assert out.page_size == 2
    assert out.first_token.counts.sum() == 7
    assert (out.idle.seconds, out.idle.between, out.sharing.shared) == (5, 5, 7)
    assert (runs[0].sharing.shared, runs[0].first_token.counts.sum()) == (2, 2)  # the engines' own are as they were
    assert merged_stats([]).tokens == 0
