"""What `jkv.bench.device` writes: rows of figures by model and part, those of earlier runs among them, and their tables."""

import json
from pathlib import Path
from typing import Any

from jkv.reports import markdown

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


def earlier_rows(path: Path, version: str) -> list[dict[str, Any]]:
    """The rows of a record that is there already, if it was made with this version of JAX."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    return record["rows"] if not record["rows"] or record["machine"]["jax"] == version else []


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
