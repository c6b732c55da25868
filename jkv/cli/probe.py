"""`jkv probe` measures by how much policies make texts less likely."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.checks import words
from jkv.cli.evaluate import check_policies, protection_note, with_protection
from jkv.cli.inputs import LOOKS, make_folder
from jkv.cli.options import CONTRASTS, MAX_RUNNING, MODEL, PAGE_SIZE, PROTECTION, SEEDS, SETTINGS, Option, read_options
from jkv.errors import refused

OPTIONS = (
    MODEL,
    Option("texts", dict, {}),
    Option("policies", list, [], 'comma-separated; "oracle" is the best that a budget allows', words),
    CONTRASTS,
    SETTINGS,
    PROTECTION,
    SEEDS,
    MAX_RUNNING,
    PAGE_SIZE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "probe",
        help="measure by how much policies make texts less likely",
        description="Decodes texts as they stand under each policy and budget, and compares the log-probabilities of their "
        "tokens with the full cache's, pair by pair: passages, facts said several times, solutions that are verified.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--config",
        type=Path,
        required=True,
        help="a TOML file: model, policies, contrasts, [texts.<name>], [settings.<policy>]",
    )
    for option in OPTIONS:
        option.add(command)
    command.add_argument("--out", type=Path, help="a folder for the tables, the JSON and the readings")
    command.add_argument("--resume", action="store_true", help="go on with the readings in --out")


def run(options: argparse.Namespace) -> int:
    """Measures, prints each reading, then the tables, and writes them."""
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts
    from jkv.evaluation.contrasts import check_contrasts
    from jkv.evaluation.probe import Reading, contrasts_table, probe, table, text_sets
    from jkv.reports import about, write
    from jkv.tidy import csv_of, records_of

    chosen = read_options(options, OPTIONS)
    check_counts(**{name: chosen[name] for name in ("seeds", "max_running", "page_size")})
    sets = text_sets(chosen["texts"])
    check_contrasts(chosen["contrasts"], chosen["policies"])
    wanted = [name for name in chosen["policies"] if name != "full"]
    chosen["settings"] = with_protection(chosen["settings"], wanted, chosen["protection"])
    check_policies(chosen)
    stem, path = options.config.stem, None
    record = {"about": about(f"jkv probe --config {options.config.name}"), "chosen": chosen}
    if options.out:
        make_folder(options.out)
        path = options.out / f"{stem}-readings.jsonl"
        if path.exists() and not options.resume:
            raise refused(f"{path} holds readings. Go on with --resume, give another --out, or remove it.", out="conflict")
    elif options.resume:
        raise refused("--resume goes on with what is in --out; got none. Name the folder.", resume="conflict")
    model = checkpoint.load(str(chosen["model"]))

    def report(one: Reading) -> None:
        slots = "" if one.budget is None else f", {one.budget} slots"
        nats = -sum(one.log_prob) / len(one.log_prob)
        print(f"{one.texts}: {one.policy}{slots}: {nats:.4f} nats a token", file=sys.stderr, flush=True)

    settings = {name: chosen[name] for name in ("max_running", "page_size")}
    readings = probe(model, sets, wanted, chosen["settings"], seeds=chosen["seeds"], path=path, report=report, **settings)
    parts = [f"## {texts.name}\n\n{table(readings, texts.name)}" for texts in sets]
    if chosen["contrasts"]:
        parts.append(f"## Contrasts\n\n{contrasts_table(readings, chosen['contrasts'])}")
    if chosen["protection"]:
        parts.append(protection_note(chosen | {"policies": wanted}))
    lines = "\n\n".join(parts)
    print(lines)
    if options.out:
        write(stem, record | {"readings": [vars(one) for one in readings]}, lines, options.out, csv_of(records_of(readings)))
        print(f"wrote {stem}.md, .json and .csv to {options.out}", file=sys.stderr)
    return 0
