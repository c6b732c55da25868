"""How fast each policy is in pools of different size, and how many samples it runs at once there."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jkv.errors import refused
from jkv.text_files import read_json
from jkv.viz.look import QUIET, name_lines, plain, style, subplots, title_axes

FIELDS = ("policy", "pool_bytes", "tokens_per_second", "concurrency")
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def throughput(records: Sequence[Mapping[str, Any]] | str | Path, title: str = "Throughput by pool") -> Any:
    """Generated tokens a second, and samples running at once, against the pool's bytes: a line for each policy.

    Each record has `policy`, `pool_bytes`, `tokens_per_second` and `concurrency`; a JSON file holds a list of them, or an
    object in which one is. The full cache is grey. Returns a figure of matplotlib.

    Raises:
      ValueError: no such records.
      ImportError: no matplotlib.
    """
    found = read_records(Path(records)) if isinstance(records, str | Path) else list(records)
    if not found or not all(is_record(one) for one in found):
        rule = f"Throughput is drawn from records with {', '.join(FIELDS)}; got {found[:1] or 'none'}."
        raise refused(rule, records="missing")
    size, unit = next(((size, unit) for size, unit in UNITS if max(one["pool_bytes"] for one in found) >= size), (1, "bytes"))
    names = sorted(dict.fromkeys(one["policy"] for one in found), key=lambda name: name != "full")
    looks = iter(range(len(names)))
    figure, (speed, running) = subplots(2, 1, (8.0, 5.4), sharex=True, height_ratios=(3, 2))
    ends: dict[str, list[Any]] = {"tokens_per_second": [], "concurrency": []}
    for name in names:
        own = sorted((one for one in found if one["policy"] == name), key=lambda one: one["pool_bytes"])
        look = style(0) | {"color": QUIET, "linestyle": "--"} if name == "full" else style(next(looks))
        pool = [one["pool_bytes"] / size for one in own]
        for axes, field in ((speed, "tokens_per_second"), (running, "concurrency")):
            values = [one[field] for one in own]
            axes.plot(pool, values, label=plain(name), **look)
            ends[field].append((name, pool[-1], values[-1], look["color"]))
    speed.set(ylabel="tokens / s", ylim=(0, None))
    title_axes(speed, title)
    running.set(ylabel="samples at once", xlabel=f"pool, {unit}", ylim=(0, None))
    if (spans := [one["pool_bytes"] for one in found]) and max(spans) > 8 * min(spans):
        running.set_xscale("log", base=2)
        running.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    name_lines(speed, ends["tokens_per_second"])
    name_lines(running, ends["concurrency"])
    return figure


def is_record(one: Any) -> bool:
    """Whether it is a record of a policy in a pool."""
    return isinstance(one, Mapping) and all(field in one for field in FIELDS) and math.isfinite(one["tokens_per_second"])


def read_records(path: Path) -> list[Any]:
    """The list of records in a JSON file: all of it, or the first that an object holds."""
    content = read_json(path)
    lists = [content, *content.values()] if isinstance(content, dict) else [content]
    found = next((one for one in lists if isinstance(one, list) and one and all(is_record(part) for part in one)), None)
    if found is None:
        raise refused(f"{path} must hold a list of records with {', '.join(FIELDS)}; none is there.", path="missing")
    return found
