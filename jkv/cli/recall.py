"""`jkv recall` measures how much of the attention each policy keeps, and by how much tokens become less likely."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.checks import words
from jkv.cli.evaluate import check_policies
from jkv.cli.inputs import LOOKS, make_folder, passages
from jkv.cli.options import MAX_RUNNING, MODEL, PAGE_SIZE, SETTINGS, Option, read_options
from jkv.errors import refused

OPTIONS = (
    MODEL,
    Option("text", str, None, "any plain text; default: the model's own traces of unseen chains", Path),
    Option("passages", int, 20, "how many texts"),
    Option("length", int, 1024, "tokens of each passage of --text"),
    Option("prompt", int, 64, "tokens of it that are prefilled"),
    Option("policies", list, ["r_kv", "snap_kv", "h2o", "cur", "streaming_llm", "random"], "comma-separated", words),
    SETTINGS,
    Option("budgets", list, ["25%"], "comma-separated: slots, or shares of the mean length", words),
    Option("interval", int, 16, "tokens between two evictions of the oracle"),
    Option("recent", int, 4, "last tokens that the oracle keeps"),
    MAX_RUNNING,
    PAGE_SIZE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "recall",
        help="measure how much of the attention policies keep, against an oracle",
        description="Decodes texts as they stand under each policy, and compares what it keeps with what the full cache reads. "
        "The table has the share of the full cache's attention that goes to kept keys (recall; of look-ups, for squared "
        "attention), and by how many nats a token is less likely (loss), with 95 % intervals over texts.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument("--config", type=Path, help="a TOML file with any of these options and [settings.<policy>]")
    for option in OPTIONS:
        option.add(command)
    command.add_argument("--out", type=Path, help="a folder for the table and the JSON")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table and writes it."""
    from jkv.analysis.recall import recall, table
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts, check_least, counted, typed
    from jkv.evaluation.budgets import parse_mean_budget
    from jkv.evaluation.variants import build, takes_budget
    from jkv.reports import about, write
    from jkv.tidy import csv_of, records_of

    chosen = read_options(options, OPTIONS)
    check_counts(**{name: chosen[name] for name in ("passages", "length", "prompt", "interval", "max_running", "page_size")})
    check_least(0, recent=typed("recent", chosen["recent"], int))
    for name in ("policies", "budgets"):
        if not chosen[name]:
            rule = f"{name} must be a list of at least one; got none. Leave it out for the default."
            raise refused(rule, **{name: "missing"})
    budgets = [parse_mean_budget(budget) for budget in chosen["budgets"]]
    check_policies(chosen)
    if options.out:
        make_folder(options.out)
    record = {"about": about("jkv recall"), "chosen": {name: str(value) for name, value in chosen.items()}}
    model = checkpoint.load(str(chosen["model"]))
    text = None if chosen["text"] is None else Path(chosen["text"])
    texts = passages(model, text, chosen["passages"], chosen["length"], chosen["prompt"])
    lengths = [len(prompt) + len(rest) for prompt, rest in texts]
    policies = []
    for name in chosen["policies"]:
        is_open = takes_budget(name, chosen["settings"])
        slots = [budget.slots_for(lengths)[0] for budget in budgets] if is_open else [None]
        policies += [build(name, count, chosen["settings"]) for count in slots]
    settings = {name: chosen[name] for name in ("max_running", "page_size")}
    figures = recall(model, texts, policies, interval=chosen["interval"], recent=chosen["recent"], **settings)
    lines = (
        f"{counted(len(texts), 'text')} of {sum(lengths) / len(lengths):.0f} tokens on average, {model!r}.\n\n{table(figures)}"
    )
    print(lines)
    if options.out:
        stem = f"{options.config.stem if options.config else 'recall'}-{Path(str(chosen['model'])).name}"
        each = [{name: getattr(value, "tolist", lambda v=value: v)() for name, value in vars(one).items()} for one in figures]
        write(stem, record | {"policies": each}, lines, options.out, csv_of(records_of(figures)))
        print(f"wrote {stem}.md, .json and .csv to {options.out}", file=sys.stderr)
    return 0
