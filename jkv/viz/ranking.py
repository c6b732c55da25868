"""One picture for a glance: how many problems each policy still solves at one budget, as sorted bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jkv.errors import refused
from jkv.viz.frontier import points_of
from jkv.viz.look import COLOURS, FONT, QUIET, plain, subplots

PALE = "#b9c4d0"  # of bars that are not marked
BAR = 0.27  # inches a bar


def ranking(
    outcomes: Sequence[Any] | str | Path, share: float, title: str, mark: Sequence[str] = (), leave_out: Sequence[str] = ()
) -> Any:
    """Accuracy of each policy at the budget that is this share of the mean length, best first, with 95 % intervals.

    `outcomes` are as in `frontier`. Bars of the policies in `mark` have a strong colour; a line is the full cache's accuracy.
    Returns a figure of matplotlib.

    Raises:
      ValueError: no policy has this budget, or a name that none has.
      ImportError: no matplotlib.
    """
    points = points_of(outcomes)
    base = next(point for point in points if point.policy == "full")
    shown = [point for point in points if getattr(point, "share", None) == share]
    if unknown := sorted({*mark, *leave_out} - {point.policy for point in shown}):
        rule = f"No policy has the budget {share:.0%} and the name {', '.join(unknown)}. Check share and the names."
        raise refused(rule, mark="unknown_name")
    shown = sorted((point for point in shown if point.policy not in leave_out), key=lambda point: point.accuracy)
    if not shown:
        rule = f"No policy has the budget {share:.0%}; there are {sorted({p.share for p in points if p.share})}."
        raise refused(rule, share="unknown_name")
    figure, axes = subplots(size=(8.0, 1.1 + BAR * len(shown)))
    values = [100 * point.accuracy for point in shown]
    error = [[100 * (p.accuracy - p.low) for p in shown], [100 * (p.high - p.accuracy) for p in shown]]
    colours = [COLOURS[0] if point.policy in mark else PALE for point in shown]
    names = [plain(point.policy) for point in shown]
    axes.barh(names, values, xerr=error, color=colours, error_kw={"elinewidth": 0.9, "ecolor": QUIET}, height=0.72)
    for place, (point, value) in enumerate(zip(shown, values, strict=True)):
        axes.text(100 * point.high + 1, place, f"{value:.0f} %", va="center", fontsize=FONT - 1)
    axes.axvline(100 * base.accuracy, color=QUIET, linewidth=1.2, label="full cache")
    axes.set(xlim=(0, 108), ylim=(-0.6, len(shown) - 0.4), xlabel="problems solved, % (95 % interval); the line: full cache")
    axes.grid(axis="y", visible=False)
    axes.set_title(plain(title), loc="left", fontsize=FONT + 2, fontweight="bold")
    return figure
