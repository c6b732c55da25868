"""What `research.bench.device` writes: rows of figures by model and part, with those of earlier runs, and their tables."""

import sys
from pathlib import Path
from typing import Any

from jkv.reports import markdown
from jkv.resuming import check_same
from jkv.text_files import read_json

COLUMNS = {
    "name": "what",
    "batch": "rows",
    "slots": "slots",
    "compiling_seconds": "compiling, s",
    "milliseconds": "ms",
    "tokens_per_second": "tokens/s",
    "roofline_milliseconds": "roofline, ms",
    "times_roofline": "times roofline",
    "times_our_options": "times our options",
    "share_of_copy_rate": "of copy rate",
    "compaction_share": "compaction",
    "host_share": "host",
    "launches_a_step": "launches a step",
    "share": "share",
    "largest_difference": "difference",
    "not_timed": "not timed",
}


def part_of(row: dict[str, Any]) -> tuple[str, str]:
    """What a row is a figure of."""
    return row["model"], row["part"]


def earlier(path: Path, version: str, made_of: dict[str, Any]) -> dict[str, Any]:
    """The rows of a record that is there already, and what they are of, by model.

    Rows of another version of JAX are left out. Rows of an older version of this benchmark, which do not show their shape and
    budget, are kept. A line on stderr says either.

    Raises:
      ValueError: rows of a model that had another shape, budget or interval then (`made_of`).
    """
    empty: dict[str, Any] = {"rows": [], "made_of": {}}
    if not path.exists():
        return empty
    record = read_json(path, ("machine", "rows"))
    rows = record["rows"]
    if rows and record["machine"]["jax"] != version:
        print(f"jkv: {path}: left out {len(rows)} rows, which are of jax {record['machine']['jax']}", file=sys.stderr)
        return empty
    before, kept = record.get("made_of", {}), {row["model"] for row in rows}
    if unknown := sorted(kept - set(before)):
        print(f"jkv: {path}: kept rows of {', '.join(unknown)}, which have no record of shape and budget", file=sys.stderr)
    for model in sorted(kept & set(before) & set(made_of)):
        check_same(
            f"{path} holds other rows of {model}", before[model], made_of[model], "Give another --out, or the same options."
        )
    return {"rows": rows, "made_of": {model: before[model] for model in sorted(kept & set(before))}}


def table(record: dict[str, Any]) -> str:
    """A table for each model and part, with the columns that it has."""
    machine = record["machine"]
    lines = [
        f"{machine['device']}, jax {machine['jax']}: copies at {record['copy_bytes_per_second'] / 1e9:.0f} GB/s, read and "
        "written. Random weights. A step's roofline is at that rate."
    ]
    for model, part in dict.fromkeys(map(part_of, record["rows"])):
        rows = [row for row in record["rows"] if part_of(row) == (model, part)]
        columns = [name for name in COLUMNS if any(name in row for row in rows)]
        cells = [[row.get(name, "") for name in columns] for row in rows]
        lines += ["", f"## {model}: {part}, {rows[0]['date']}", "", markdown([COLUMNS[name] for name in columns], cells)]
    return "\n".join(lines)
