"""Text can be read: a contrast of at least 4.5 (WCAG 2, level AA) on the page in both schemes, and in each figure."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.viz import look
from jkv.viz.look import READABLE, contrast

pytest.importorskip("matplotlib")
FOLDER = Path(jkv.viz.__file__).parent
CSS = (FOLDER / "kept.css").read_text()
VISIBLE = 3  # of lines, borders and marks
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def scheme(name):
    """The colours of a scheme, by name."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    colours = {}
    for part in [light] if name == "light" else [light, dark]:
        colours |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
    return colours


def rules():
    """Selector and declarations of each rule, those in media queries too."""
    plain = re.sub(r":root \{.*?\}", "", re.sub(r"@media[^{]*\{", "", CSS), flags=re.DOTALL)
    return [
        (selector.strip(), dict(re.findall(r"(?:^|;)\s*([\w-]+):\s*([^;]+)", body)))
        for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", plain)
    ]


def named(value):
    """The one colour that a declaration names."""
    (name,) = re.fullmatch(r"(?:[\w.#]+ )*var\(--([\w-]+)\)", value).groups()
    return name


def mix(low, high, share):
    """color-mix(in oklab, low, high share) in sRGB (https://www.w3.org/TR/css-color-4/#color-conversion-code)."""
    from matplotlib.colors import to_rgb

    ends = [TO_LAB @ np.cbrt(TO_LMS @ [look.linear(part) for part in to_rgb(colour)]) for colour in (low, high)]
    linear = np.linalg.inv(TO_LMS) @ (np.linalg.inv(TO_LAB) @ ((1 - share) * ends[0] + share * ends[1])) ** 3
    return np.clip(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * np.abs(linear) ** (1 / 2.4) - 0.055), 0, 1)


both = pytest.mark.parametrize("name", ["light", "dark"])


def test_contrast_is_that_of_the_standard():
    assert contrast("black", "white") == pytest.approx(21)
    assert contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.005)
    np.testing.assert_allclose(mix("#ff0000", "#0000ff", 0.5), [0x8C / 255, 0x53 / 255, 0xA2 / 255], atol=0.003)
    for share, end in ((0, "#fde2c8"), (1, "#e8701a")):
        assert contrast(mix("#fde2c8", "#e8701a", share), end) == pytest.approx(1, abs=1e-3)


@both
def test_all_text_of_the_page_can_be_read(name):
    colours = scheme(name)
    assert set(scheme("dark")) == set(scheme("light"))
    seen = set()
    for selector, declared in rules():
        if "color" not in declared or declared["color"] == "inherit":
            continue
        text, ground = named(declared["color"]), declared.get("background")
        if ground and "color-mix" in ground:  # a kept token
            continue
        grounds = [named(ground)] if ground else ["page", "raised"]
        seen.add(selector)
        for one in grounds:
            found = contrast(colours[text], colours[one])
            assert found >= READABLE, f"{selector}: --{text} on --{one} has a contrast of {found:.2f} in the {name} scheme"
    assert {"body", "label", ".gone", ".unread", ".shared", ".future", "#tip", "#note", ".state", "select, button"} <= seen | {
        "#tip"
    }


@both
def test_a_kept_token_can_be_read_at_every_shade(name):
    (kept,) = [declared for selector, declared in rules() if selector == ".kept"]
    assert kept["background"] == "color-mix(in oklab, var(--low), var(--high) var(--strength))"
    colours = scheme(name)
    found = [
        contrast(mix(colours["low"], colours["high"], share), colours[named(kept["color"])]) for share in np.linspace(0, 1, 201)
    ]
    assert min(found) >= READABLE


@both
def test_lines_borders_and_marks_can_be_seen(name):
    colours = scheme(name)
    drawn = {named(declared["stroke"]) for _, declared in rules() if declared.get("stroke", "none") != "none"}
    assert {"accent", "share", "faint", "ink"} == drawn
    for one in (*drawn, "edge"):
        for ground in ("page", "raised"):
            assert contrast(colours[one], colours[ground]) >= VISIBLE, (one, ground)


def test_no_text_is_faded_and_no_script_colours():
    assert [selector for selector, declared in rules() if "opacity" in declared] == ["#lines .area"]
    for script in FOLDER.glob("*.js"):
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl|\.style\.color|opacity", script.read_text()), script.name


def figures(out):
    """One of each figure, with as many colours as there are."""
    runs = [{"step": [0, 1], "reward": [0.0, 1.0]}]
    names = [f"p{i}" for i in range(len(look.COLOURS))]
    results = FOLDER.parent.parent / "results"
    pools = [{"policy": name, "pool_bytes": 10, "tokens_per_second": 3.0, "concurrency": 2} for name in [*names, "full"]]
    return {
        "cache_size": jkv.viz.cache_size(dict.fromkeys(names, out)),
        "distances": jkv.viz.distances({"raw": np.eye(3)}),
        "frontier": jkv.viz.frontier(json.loads((results / "all-tiny-reasoner.json").read_text())["outcomes"]),
        "learning": jkv.viz.learning(dict.fromkeys([*names, "full"], runs)),
        "ranking": jkv.viz.ranking(results / "all-tiny-reasoner.json", 0.25, "A quarter", ["foresight"]),
        "redundancy": jkv.viz.redundancy({"a": jkv.analyze(["a b c\n\na b c"])}),
        "throughput": jkv.viz.throughput(pools),
    }


@pytest.mark.filterwarnings("ignore:.*layout")
def test_text_of_figures_can_be_read(evicting):
    from matplotlib.text import Text

    drawn = figures(evicting)
    assert set(drawn) == set(jkv.viz.__all__) - {"Kept", "kept"}
    for name, figure in drawn.items():
        figure.canvas.draw()  # which makes the labels of its ticks
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert len(texts) > 5, name
        for text in texts:
            assert (text.get_alpha() or 1) == 1
            for ground in ("white", "#e4e6ea"):  # and the band of `frontier`
                if ground == "white" or text.get_text() == "full cache":
                    assert contrast(text.get_color(), ground) >= READABLE, (name, text.get_text(), text.get_color())
