"""Accuracy against the memory really held: a line for each policy, an interval at each point, the full cache as a band."""

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jkv.errors import refused
from jkv.text_files import read_json
from jkv.viz.look import QUIET, name_lines, plain, style, subplots, title_axes

FIELDS = ("policy", "problems", "accuracy", "low", "high", "kv_share")


def frontier(outcomes: Sequence[Any] | str | Path, title: str | None = None) -> Any:
    """Accuracy with its 95 % interval against the mean KV bytes held, in percent of the full cache's.

    `outcomes` come from `jkv.evaluation.compare.compare`, or are their records, or the JSON file that `jkv eval --out` writes.
    One of them is `full`. Returns a figure of matplotlib.

    Raises:
      ValueError: records of another kind, or no full cache to compare with.
      ImportError: no matplotlib.
    """
    points = points_of(outcomes)
    if isinstance(outcomes, str | Path):
        title = title or Path(outcomes).stem
    base = next(point for point in points if point.policy == "full")
    names = list(dict.fromkeys(point.policy for point in points if point.policy != "full"))
    figure, axes = subplots(size=(8.0, 5.2 if len(names) > 6 else 4.5))
    axes.axhspan(100 * base.low, 100 * base.high, color="#e4e6ea", zorder=0, linewidth=0)
    axes.axhline(100 * base.accuracy, color=QUIET, linewidth=1.2, zorder=1)
    ends = []
    for i, name in enumerate(names):
        mine = sorted((point for point in points if point.policy == name), key=lambda point: point.kv_share)
        share, accuracy = [100 * point.kv_share for point in mine], [100 * point.accuracy for point in mine]
        below, above = [point.accuracy - point.low for point in mine], [point.high - point.accuracy for point in mine]
        error = [[100 * length for length in lengths] for lengths in (below, above)]
        axes.errorbar(share, accuracy, error, label=plain(name), elinewidth=0.9, capsize=1.5, **style(i))
        ends.append((name, share[-1], accuracy[-1], style(i)["color"]))
    axes.set(xlabel="mean KV bytes held, % of the full cache's", ylabel="accuracy, % (95 % interval)")
    shares = [100 * point.kv_share for point in points]
    axes.set(xlim=(0 if min(shares) < max(shares) / 2 else None, None), ylim=(0, 102))
    title_axes(axes, title or f"{base.problems} problems")
    axes.annotate(
        "full cache", (0, 100 * base.low), (4, -3), axes.get_yaxis_transform(), "offset points", va="top", color=QUIET
    )
    name_lines(axes, ends)
    return figure


def points_of(outcomes: Sequence[Any] | str | Path) -> list[Any]:
    """Outcomes, their records or the file of them as objects with `FIELDS`.

    Raises:
      ValueError: records of another kind, or no full cache to compare with.
    """
    records = read_outcomes(Path(outcomes)) if isinstance(outcomes, str | Path) else outcomes
    points: list[Any] = [types.SimpleNamespace(**one) if isinstance(one, dict) else one for one in records]
    check(points)
    return points


def read_outcomes(path: Path) -> list[Any]:
    """The outcomes in a file of `jkv eval`."""
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("outcomes"), list):
        raise refused(f'{path} must be what `jkv eval --out` writes, an object with "outcomes"; it is not.', path="invalid")
    return record["outcomes"]


def check(points: Sequence[Any]) -> None:
    """Refuses what has no accuracy or bytes."""
    if missing := sorted({field for field in FIELDS for point in points if not hasattr(point, field)}):
        raise refused(f"An outcome has {', '.join(FIELDS)}; some have no {', '.join(missing)}.", points="missing")
    if not any(point.policy == "full" for point in points):
        raise refused("Outcomes hold one of the policy full, which the others are compared with; got none.", points="missing")
