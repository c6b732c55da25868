"""Distances between the pages of a sequence, as heat maps (MemShare, Fig. 3)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jkv.errors import refused
from jkv.viz.look import subplots, title_axes

TITLES = {"rotated": "rotated keys and values", "raw": "raw keys and values", "values": "values"}


def distances(found: Mapping[str, np.ndarray], is_same: np.ndarray | None = None) -> Any:
    """A heat map for each way to compare pages: its name -> distances `[P, P]`; dark is near.

    Circles mark pairs whose tokens are the same (`is_same`, `[P, P]`). `python -m jkv.bench.distances` measures them.
    Returns a figure of matplotlib.

    Raises:
      ValueError: matrices that are not square, or not of one size.
      ImportError: no matplotlib.
    """
    shapes = {name: np.shape(distance) for name, distance in found.items()} | (
        {} if is_same is None else {"is_same": is_same.shape}
    )
    sizes = set(shapes.values())
    if not found or len(sizes) != 1 or any(len(shape) != 2 or shape[0] != shape[1] for shape in sizes):
        raise refused(f"Distances are matrices of one size, pages by pages; got {shapes}.", found="does_not_fit")
    figure, every = subplots(1, len(found), (3.6 * len(found), 3.5), squeeze=False)
    for axes, (name, distance) in zip(every[0], found.items(), strict=True):
        off = np.array(distance, float)
        np.fill_diagonal(off, np.nan)  # a page is no distance from itself, and would take the darkest shade
        image = axes.imshow(off, cmap="Blues_r", interpolation="nearest")
        if is_same is not None:
            row, column = np.nonzero(is_same)
            axes.scatter(column, row, s=9, facecolors="none", edgecolors="#d55e00", linewidths=0.8)
        axes.grid(visible=False)
        axes.set_facecolor("#c9cdd3")
        title_axes(axes, TITLES.get(name, name))
        axes.set(xlabel="page")
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
    every[0][0].set(ylabel="page")
    bar.set_label("distance")
    return figure
