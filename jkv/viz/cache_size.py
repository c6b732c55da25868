"""How large the cache is while a completion grows (RPC, Fig. 5): a line for each policy, beside the full cache."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.engine.results import Result
from jkv.errors import refused
from jkv.viz.held import held_by, slots
from jkv.viz.look import QUIET, name_lines, plain, style, subplots, title_axes

MAX_RANGES = 3  # of more policies, only lines are readable


def cache_size(outs: Result | Mapping[str, Result], sample: int = 0, title: str = "Cache size") -> Any:
    """Slots held when each generated token's query reads the cache, mean over layers and KV heads, the peak marked.

    `outs` is one result, or several by name; each needs `return_trace=True`. Where heads hold different numbers, the range is
    shaded, of up to three results. The dashed line is a full cache. Where a policy chooses what to read
    (Quest), slots read are shown.

    Returns a figure of matplotlib.

    Raises:
      ValueError: no trace, no result, or no such sample.
      ImportError: no matplotlib.
    """
    named = {"": outs} if isinstance(outs, Result) else dict(outs)
    if not named:
        raise refused("A picture needs at least one result; got none.", outs="missing")
    every = {name: held_by(out, sample) for name, out in named.items()}
    figure, axes = subplots(size=(8.0, 4.2))
    for length in sorted({held.num_prompt for held in every.values()}):
        longest = max(held.num_tokens for held in every.values() if held.num_prompt == length)
        axes.plot([1, longest - length], [length + 1, longest], color=QUIET, linestyle="--", linewidth=1.2, label="full cache")
    ends = []
    for i, (name, held) in enumerate(every.items()):
        size = slots(held)[..., held.num_prompt :]
        mean, time = size.mean(axis=(0, 1)), np.arange(1, size.shape[-1] + 1)
        colour, label = style(i)["color"], name + (" (read)" if held.comes_back else "")
        axes.plot(time, mean, color=colour, linestyle=style(i)["linestyle"], label=plain(label or "slots held"))
        if len(every) <= MAX_RANGES:
            axes.fill_between(time, size.min(axis=(0, 1)), size.max(axis=(0, 1)), color=colour, alpha=0.15, linewidth=0)
        peak = int(np.argmax(mean))
        axes.plot(time[peak], mean[peak], marker=style(i)["marker"], color=colour, linestyle="none")
        ends.append((f"{label + ', ' if label else ''}peak {mean[peak]:.4g}", float(time[-1]), float(mean[-1]), colour))
    axes.set(xlabel="generated tokens", ylabel="slots (mean over layers and heads)", xlim=(0, None), ylim=(0, None))
    title_axes(axes, title)
    last = max(every.values(), key=lambda held: held.num_tokens)
    where = 0.9 * (last.num_tokens - last.num_prompt), 0.9 * last.num_tokens + 0.1 * last.num_prompt
    axes.annotate("full cache", where, (-6, 2), textcoords="offset points", ha="right", color=QUIET)
    name_lines(axes, ends)
    return figure
