"""The tables of `docs/results.md`: of real models alone, each from one record, with a link to the whole of it.

`python -m research.bench tables` writes them between their marks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jkv.evaluation.probe import Reading, rows_of
from jkv.reports import markdown
from jkv.statistics import with_interval
from research.bench import peers

CHAT_MODEL = "smollm2-135m"


def stress_of_a_gpu(record: Mapping[str, Any]) -> str:
    """R-KV's stress test on a device: tokens a second, and times the full cache's."""
    rows = [row for row in record["rows"] if row["part"] == "stress"]
    full = next(row["tokens_per_second"] for row in rows if row["name"] == "full")
    cells = (
        (
            f"`{row['name']}`",
            row["batch"],
            f"{row['slots']:,}",
            f"{row['milliseconds']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / full:.1f}",
            f"{row['times_roofline']:.2f}",
        )
        for row in rows
    )
    columns = ["policy", "rows", "slots a row, mean", "ms a step", "tokens/s", "times the full cache", "times the roofline"]
    return markdown(columns, cells)


def speed_of_a_chat_model(record: Mapping[str, Any]) -> str:
    """The lines of other libraries with SmolLM2."""
    return peers.table({**record, "records": [one for one in record["records"] if one["model"] == CHAT_MODEL], "trials": []})


def losses_of_a_chat_model(record: Mapping[str, Any]) -> str:
    """Nats that a token is less likely than with the full cache, by policy and budget."""
    rows = rows_of([Reading(**one) for one in record["readings"]], "stream")
    budgets = sorted({row.budget for row in rows if row.budget})
    cells = {(row.policy, row.budget): with_interval(row.loss) for row in rows}
    ordered = [row.policy for row in rows if row.budget == budgets[0]]
    lines = [(f"`{policy}`", *(cells[policy, budget] for budget in budgets)) for policy in ordered]
    return markdown(["policy", *(f"{budget} slots" for budget in budgets)], lines)


EXCERPTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "gpu-stress": ("device-nvidia-h200", stress_of_a_gpu),
    "chat-model-speed": ("peers", speed_of_a_chat_model),
    "chat-model-losses": ("probe-smollm2", losses_of_a_chat_model),
}
