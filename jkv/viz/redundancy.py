"""The redundancy of traces as a picture: right and wrong ones side by side, as the papers of the measures draw them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.analysis.analysis import Analysis
from jkv.analysis.redundancy import MEASURES, PREFIXES
from jkv.viz.look import COLOURS, MARKERS, QUIET, plain, subplots, title_axes

BARS = {
    "similar_steps_0.8": "steps like an earlier one (cosine > 0.8), %",
    "repeated_sentences_1": "sentences with > 1 others alike, %",
    "keyword_thoughts": "thoughts with a keyword of doubt, %",
    "frequency_1": "1-gram frequency",
    "frequency_2": "2-gram frequency",
}
OF_CLASS = {"right": COLOURS[0], "wrong": COLOURS[1], "all": QUIET}


def redundancy(analyses: Mapping[str, Analysis]) -> Any:
    """Means and 95 % intervals of five measures, and 3-gram entropy by length (RPC, Fig. 3), for each group of traces.

    Returns a figure of matplotlib.

    Raises:
      ImportError: no matplotlib.
    """
    width = max(13.0, 3 * (1 + 0.7 * len(analyses)))
    figure, every = subplots(2, 3, size=(width, 7.0))
    for axes, (name, title) in zip(every.flat, BARS.items(), strict=False):
        draw_bars(axes, analyses, name)
        title_axes(axes, title)
    marks = [every[0, 0].bar(np.nan, np.nan, color=OF_CLASS[kind], alpha=0.75, label=kind) for kind in classes_of(analyses)]
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False)
    draw_entropy(every.flat[-1], analyses)
    return figure


def classes_of(analyses: Mapping[str, Analysis]) -> tuple[str, ...]:
    """Right and wrong, or all where no trace is marked."""
    return ("right", "wrong") if any(one.count("right") + one.count("wrong") for one in analyses.values()) else ("all",)


def draw_bars(axes: Any, analyses: Mapping[str, Analysis], name: str) -> None:
    """One measure: a pair of bars for each group, its samples counted below."""
    scale, classes = (100 if MEASURES[name].unit == "share" else 1), classes_of(analyses)
    width = 0.8 / len(classes)
    for i, kind in enumerate(classes):
        for place, analysis in enumerate(analyses.values()):
            found = analysis.estimates[name][kind]
            if found.mean is None:
                continue
            centre, at = scale * found.mean, place + (i - (len(classes) - 1) / 2) * width
            axes.bar(at, centre, width, color=OF_CLASS[kind], alpha=0.75)
            if found.low is not None and found.high is not None:
                axes.errorbar(at, centre, [[centre - scale * found.low], [scale * found.high - centre]], color="0.2", capsize=3)
    counts = [" / ".join(str(analysis.count(kind)) for kind in classes) for analysis in analyses.values()]
    labels = [f"{plain(group)}\n{count}" for group, count in zip(analyses, counts, strict=True)]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.grid(visible=False, axis="x")


def draw_entropy(axes: Any, analyses: Mapping[str, Analysis]) -> None:
    """3-gram entropy of the first tokens, against how many; what no text can exceed in grey."""
    for i, (group, analysis) in enumerate(analyses.items()):
        for kind in classes_of(analyses):
            found = [(size, analysis.estimates[f"entropy_3_first_{size}"][kind]) for size in PREFIXES]
            known = [(size, one.mean) for size, one in found if one.mean is not None]
            points: Any = tuple(zip(*known, strict=True)) or ((), ())
            axes.plot(*points, color=OF_CLASS[kind], marker=MARKERS[i % len(MARKERS)], markersize=5, alpha=0.8)
        axes.plot([], [], color="0.3", marker=MARKERS[i % len(MARKERS)], markersize=5, label=plain(group))
    sizes = np.array([size for size in PREFIXES if any(f"entropy_3_first_{size}" in one.known for one in analyses.values())])
    axes.plot(sizes, np.log2(sizes - 2), color=QUIET, linestyle=":", label="no 3-gram twice", zorder=0)
    unit = next(iter(analyses.values())).counted_in
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes.tolist()])
    axes.set_xlabel(f"first {unit}")
    title_axes(axes, "3-gram entropy, bits")
    axes.legend(frameon=False, fontsize=8)
