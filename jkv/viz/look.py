"""One look for figures: colours that colour-blind readers can separate (Okabe and Ito), a marker and a name for each line."""

import functools
import io
from collections.abc import Sequence
from typing import Any

from jkv.checks import install
from jkv.reports import cut_text, visible

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#000000")
MARKERS = "osD^vPX*<>hp"
QUIET = "#5c626b"
FONT = 10.5  # points: a picture of 8 inches is read at some 880 pixels, the width of a README
LONGEST = 60  # characters of a name
READABLE = 4.5  # contrast of text
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue
RC: dict[Any, Any] = {
    "font.size": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": QUIET,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 6,
}


@functools.cache
def figure_class() -> Any:
    """A figure of matplotlib that also shows itself in a notebook where nothing else of matplotlib is set up.

    Raises:
      ImportError: no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"Figures are drawn by matplotlib, which is not installed. Run: {install('eval')}.") from error

    class Picture(Figure):
        """A figure of its own: none of pyplot's, so that no one has to close it."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png", dpi=110)
            return stream.getvalue()

    return Picture


def subplots(rows: int = 1, columns: int = 1, size: tuple[float, float] = (8.0, 4.5), **settings: Any) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes."""
    make = figure_class()
    import matplotlib

    with matplotlib.rc_context(RC):
        figure = make(figsize=size, dpi=150, layout="constrained")
        return figure, figure.subplots(rows, columns, **settings)


def plain(text: Any) -> str:
    r"""A name or title as a figure can draw it: short, visible, and no formula, which matplotlib would parse.

    >>> plain("a$x^{$\x00")
    'a\\$x^{\\$␀'
    """
    return visible(cut_text(str(text), LONGEST)).replace("$", r"\$")


def title_axes(axes: Any, title: str) -> None:
    """A title above the left end of the axes."""
    axes.set_title(plain(title), loc="left", fontsize=FONT + 1, fontweight="bold")


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the line with this index; no two of the first 96 are the same."""
    dashes = ("-", "--", "-.", ":")
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": dashes[index // len(COLOURS) % len(dashes)],
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def contrast(first: Any, second: Any) -> float:
    """The contrast ratio of two colours (WCAG 2), from 1 to 21; text needs at least 4.5."""
    from matplotlib.colors import to_rgb

    low, high = sorted(
        sum(share * linear(part) for share, part in zip(LUMINANCE, to_rgb(one), strict=True)) for one in (first, second)
    )
    return (high + 0.05) / (low + 0.05)


def linear(part: float) -> float:
    """The intensity of a part of an sRGB colour, both from 0 to 1."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def ink(colour: Any) -> tuple[float, ...]:
    """A line's colour, darkened until text in it can be read on white."""
    from matplotlib.colors import to_rgb

    shade = tuple(0.7 * part for part in to_rgb(colour))
    while contrast(shade, "white") < READABLE:
        shade = tuple(0.95 * part for part in shade)
    return shade


def name_lines(axes: Any, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names beside the right ends of lines (name, x, y, colour), moved apart where they would touch, each with a thin lead."""
    height = 1.25 * FONT / 72 / (axes.figure.get_size_inches()[1] * axes.get_position().height)  # of a line, in axes
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    wanted = [float(to_axes((x, y))[1]) for _, x, y, _ in ends]
    for (name, x, y, colour), place in zip(ends, spread(wanted, height), strict=True):
        axes.annotate(
            plain(name),
            (x, y),
            (1.02, place),
            textcoords=axes.transAxes,
            color=ink(colour),
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "alpha": 0.4,
                "linewidth": 0.7,
                "shrinkA": 2,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def spread(wanted: Sequence[float], height: float) -> list[float]:
    """Places in [0, 1] near those wanted, in their order, no two nearer than `height` where so many fit; ties as they came.

    >>> [round(place, 2) for place in spread([0.5, 0.5, 0.95, 1.2], 0.1)]
    [0.55, 0.45, 0.9, 1.0]
    """
    blocks: list[list[int]] = []  # that touch, from the lowest
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i], -i))
    height = min(height, 1 / max(len(wanted) - 1, 1))

    def low(block: list[int]) -> float:
        middle = sum(wanted[i] - height * k for k, i in enumerate(block)) / len(block)
        return max(0.0, min(middle, 1 - height * (len(block) - 1)))

    for i in order:
        blocks.append([i])
        while len(blocks) > 1 and low(blocks[-2]) + height * len(blocks[-2]) > low(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    places = dict.fromkeys(order, 0.0)
    for block in blocks:
        places |= {i: low(block) + height * k for k, i in enumerate(block)}
    return [places[i] for i in range(len(wanted))]
