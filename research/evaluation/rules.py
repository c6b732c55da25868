"""How blocks, repairs and budgets by head change a policy: `python -m research.evaluation.rules --out results`.

Given traces of tiny-reasoner are decoded under each policy (`jkv.recall`). The loss is the drop of a token's log-probability
from the full cache, in nats. Each variant is compared with the policy that it changes, paired by trace, and intervals are
bootstrapped over traces. Budgets by head come from the losses on other traces.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jkv
from jkv.analysis.recall import Text
from jkv.checkpoints import loading as checkpoint
from jkv.cli.inputs import own_traces
from jkv.limits import parse
from jkv.model.params import Model
from jkv.reports import about, digits, footnote, markdown, write
from jkv.statistics import bootstrap

SHARE, INTERVAL, BLOCKS, FLOOR = 0.15, 16, (4, 16), 0.4
PROTECTED: dict[str, Any] = {"sinks": 4, "recent": 15, "interval": INTERVAL}
NAMES = "random", "cur", "key_diff", "snap_kv", "r_kv"
BY_BLOCKS, REPAIRED, BY_HEAD = ("random", "cur", "key_diff"), ("cur", "snap_kv", "r_kv"), ("cur", "snap_kv", "r_kv")


def variants(model: Model, calibration: Sequence[Text], budget: int) -> dict[tuple[str, str | None], jkv.Policy]:
    """Each policy, by its name and, for a variant, the name of the policy that it changes."""
    found: dict[tuple[str, str | None], jkv.Policy] = {}
    for name in NAMES:
        found[name, None] = plain = jkv.policies.make(name, {"budget": budget} | PROTECTED)
        for block in BLOCKS if name in BY_BLOCKS else ():
            found[f"{name}, blocks of {block}", name] = jkv.policies.make(name, {"budget": budget, "block": block} | PROTECTED)
        if name in REPAIRED:
            found[f"{name}, repaired by twin_kv", name] = jkv.twin_kv(budget, around=plain, **PROTECTED)
        if name in BY_HEAD:
            slots = jkv.head_budgets(jkv.head_losses(model, calibration, plain), budget, floor=FLOOR)
            found[f"{name}, budgets by head", name] = plain.with_budgets(slots)
    return found


def measure(model: Model, texts: Sequence[Text], policies: dict[tuple[str, str | None], jkv.Policy]) -> list[dict[str, Any]]:
    """A line for each policy."""
    runs = jkv.recall(model, texts, list(policies.values()), interval=INTERVAL)[-len(policies) :]
    losses = {name: run.loss for (name, _), run in zip(policies, runs, strict=True)}
    lines = []
    for ((name, beside), policy), run in zip(policies.items(), runs, strict=True):
        figures = {"recall": run.recall, "sharp_recall": run.sharp_recall, "loss": run.loss}
        line: dict[str, Any] = {"name": name, "budget": policy.budget}
        line |= {field: digits(float(values.mean()), 3) for field, values in figures.items()}
        if beside is not None:
            change = losses[name] - losses[beside]
            interval = [digits(end, 3) for end in bootstrap(change)]
            line |= {"beside": beside, "change": digits(float(change.mean()), 3), "interval": interval}
        if policy.slots is not None:
            line["slots"] = policy.slots
        lines.append(line)
    return lines


def table(record: dict[str, Any]) -> str:
    """The figures in Markdown."""

    def change(line: dict[str, Any]) -> tuple[str, str]:
        if "change" not in line:
            return "", ""
        low, high = line["interval"]
        return f"{line['change']:+.3f} [{low:+.3f}, {high:+.3f}]", line["beside"]

    rows = [
        (line["name"], *(f"{line[field]:.3f}" for field in ("recall", "sharp_recall", "loss")), *change(line))
        for line in record["lines"]
    ]
    head = "policy", "recall", "of look-ups", "loss, nats", "change (95 %)", "beside"
    what = (
        f"{record['texts']} traces of {record['model']}, {record['budget']} slots ({SHARE:.0%} of the mean length), "
        f"compacted every {INTERVAL} tokens; {PROTECTED['sinks']} sinks and {PROTECTED['recent']} recent tokens stay. Budgets "
        f"by head come from {record['calibration']} other traces."
    )
    slots = [f"`{line['name']}`: {line['slots']}, slots of each layer's heads." for line in record["lines"] if "slots" in line]
    return "\n\n".join([what, markdown(head, rows), *slots, footnote(record)])


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20, help="traces that are compared (default %(default)s)")
    parser.add_argument("--calibration", type=int, default=12, help="traces for budgets by head (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for rules-tiny-reasoner.json and .md")
    options = parse(parser, argv)
    record: dict[str, Any] = {"about": about("python -m research.evaluation.rules"), "model": "tiny-reasoner"}
    model = checkpoint.load(record["model"])
    traces = own_traces(model, options.calibration + options.texts)
    calibration, texts = traces[: options.calibration], traces[options.calibration :]
    budget = round(SHARE * sum(len(prompt) + len(rest) for prompt, rest in texts) / len(texts))
    lines = measure(model, texts, variants(model, calibration, budget))
    record |= {"texts": len(texts), "calibration": len(calibration), "budget": budget, "lines": lines}
    if options.out:
        write("rules-tiny-reasoner", record, table(record), options.out)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
