"""The tables of `docs/results.md`, of real models alone, and of `docs/choosing.md`, each from one or several records.

`python -m research.bench tables` writes them between their marks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jkv.evaluation.choose import BASELINE
from jkv.evaluation.oracles import ORACLE
from jkv.evaluation.probe import Reading, rows_of
from jkv.policies import POLICIES
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


def policies_by_task(*records: Mapping[str, Any]) -> str:
    """Policies in lines, and in columns what they were measured on: accuracies of three records, then losses of two."""
    columns: dict[str, dict[str, str]] = {}
    for record, share, column in zip([records[0], *records[:3]], (0.5, 0.25, 0.34, 0.34), ACCURACIES, strict=True):
        of_share = [one for one in record["outcomes"] if one["share"] in (share, None) and one["policy"] in (*POLICIES, ORACLE)]
        columns[column] = {
            one["policy"]: f"{one['accuracy']:.1%} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"
            for one in of_share
            if one["share"] or one["policy"] == "full"
        }
    for record, texts, budget, column in zip(records[3:], ("stream", "chains"), (96, 64), LOSSES, strict=True):
        rows = rows_of([Reading(**one) for one in record["readings"]], texts)
        columns[column] = {row.policy: with_interval(row.loss) for row in rows if row.budget == budget}
    measured = dict.fromkeys(name for cells in columns.values() for name in cells if name in (*POLICIES, ORACLE))
    lines = [(f"`{name}`", *(cells.get(name, "") for cells in columns.values())) for name in measured if name != "quest"]
    return markdown(("policy", *columns), lines)


def choices(*records: Mapping[str, Any]) -> str:
    """What `jkv choose` found in each record at each budget: the best policy, those that are not worse, and random slots."""
    lines = []
    for record in records:
        for budget in dict.fromkeys(row["budget"] for row in record["rows"]):
            rows = [row for row in record["rows"] if row["budget"] == budget]
            (base,) = (row for row in rows if row["name"] == BASELINE)
            first, *tied = (f"`{row['name']}`" for row in rows if row["is_tied"])
            losses = [with_interval(np.array(row["loss"])) for row in (rows[0], base)]
            lines.append((record["model"], budget, first, ", ".join(tied), *losses))
    return markdown(("model", "slots", "best", "not worse", "its loss, nats a token", "random slots"), lines)


ACCURACIES = (
    "chains, tiny-reasoner, half of the slots",
    "the same, a quarter",
    "trails, tiny-reasoner-2, 34 %",
    "the same, prompt protected",
)
LOSSES = ("manual, SmolLM2-135M, 96 of 768 tokens", "word problems, SmolLM2-135M, 64 slots")
EXCERPTS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {  # the names of the records, and the table made of them
    "gpu-stress": (("device-nvidia-h200",), stress_of_a_gpu),
    "chat-model-speed": (("peers",), speed_of_a_chat_model),
    "chat-model-losses": (("probe-smollm2",), losses_of_a_chat_model),
    "choices": (("choose-tiny-reasoner", "choose-smollm2-135m"), choices),
    "policies-by-task": (
        (
            "all-tiny-reasoner",
            "tiny-2-tiny-reasoner-2",
            "tiny-2-prompt-tiny-reasoner-2",
            "probe-smollm2",
            "probe-smollm2-facts",
        ),
        policies_by_task,
    ),
}
