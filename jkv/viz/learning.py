"""What models learnt by rollouts of different kinds: reward against updates."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.errors import refused
from jkv.viz.look import QUIET, name_lines, plain, style, subplots, title_axes


def learning(curves: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "Reward with the full cache") -> Any:
    """The mean reward over runs, a line for each arm, and the span of its runs behind it: a figure of matplotlib.

    `curves` has for each arm its runs, each with `step` and `reward`, the steps the same for all of an arm. The arm "full" is
    grey.

    Raises:
      ValueError: no run, or runs of an arm at different steps.
      ImportError: no matplotlib.
    """
    if not curves or not all(curves.values()):
        raise refused(f"Learning is drawn from at least one run for each arm; got {list(curves) or 'none'}.", curves="missing")
    figure, axes = subplots(size=(8.0, 4.2))
    ends, looks = [], iter(range(len(curves)))
    for name, runs in curves.items():
        if len({tuple(run["step"]) for run in runs}) > 1:
            rule = f"The runs of an arm must be evaluated after the same steps; the runs of {name} are not."
            raise refused(rule, curves="does_not_fit")
        steps, rewards = np.array(runs[0]["step"]), np.array([run["reward"] for run in runs])
        look = style(0) | {"color": QUIET, "linestyle": "--"} if name == "full" else style(next(looks))
        axes.fill_between(steps, rewards.min(axis=0), rewards.max(axis=0), color=look["color"], alpha=0.12, linewidth=0)
        axes.plot(steps, rewards.mean(axis=0), label=plain(name), **look)
        ends.append((name, float(steps[-1]), float(rewards.mean(axis=0)[-1]), look["color"]))
    count = max(len(runs) for runs in curves.values())
    axes.set(xlabel="updates", ylabel="reward" + (f", mean and span of {count} runs" if count > 1 else ""), ylim=(0, None))
    title_axes(axes, title)
    name_lines(axes, ends)
    return figure
