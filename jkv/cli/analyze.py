"""`jkv analyze` counts how much of a set of traces repeats itself, right and wrong ones separately."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jkv.checks import need_tokenizer, words
from jkv.cli.inputs import LOOKS, can_draw, make_folder
from jkv.cli.options import MAX_RUNNING, MODEL, PAGE_SIZE, SETTINGS, Option, defaults_of, read_options
from jkv.errors import refused

OPTIONS = (
    dataclasses.replace(
        MODEL, help="with files: whose tokens to count (default: words); else: who makes traces (default: tiny-reasoner)"
    ),
    Option("problems", int, 100, "how many unseen chains"),
    Option("policies", list, ["full"], "comma-separated", words),
    Option("budgets", list, [], "comma-separated, in slots, for policies that have one", words),
    SETTINGS,
    Option("max_new_tokens", int, None, "default: what the model's positions leave, up to 32768"),
    MAX_RUNNING,
    PAGE_SIZE,
)
Traces: TypeAlias = dict[str, tuple[list[str], list[bool | None]]]  # completions and marks, by the name of a group


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "analyze",
        help="count the redundancy of traces, right and wrong ones separately",
        description="Similar steps, repeated sentences, n-grams and non-execution thoughts of traces, right and wrong ones.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help='traces: JSON lines with a "text", "right" or "answer" if known, and a "policy" to group them by (else by file); '
        "or folders of such files, as `jkv eval` writes them; default: traces of a model, made now",
    )
    command.add_argument(
        "--encoder", default="tokens", help="what is compared: tokens (default), or sentence:<model> of sentence-transformers"
    )
    command.add_argument("--config", type=Path, help="a TOML file with any of the options below and [settings.<policy>]")
    for option in OPTIONS:
        option.add(command)
    command.add_argument("--out", type=Path, help="a folder for the tables, the JSON and, with matplotlib, the picture")


def run(options: argparse.Namespace) -> int:
    """Reads or makes traces and prints a table for each group."""
    if options.out:
        make_folder(options.out)
    given = [name for name in ("config", *defaults_of(OPTIONS)) if name != "model" and getattr(options, name, None) is not None]
    if options.files and given:
        option = f"--{given[0].replace('_', '-')}"
        rule = f"{option} is for traces that are made now; got files of traces too. Leave one out."
        raise refused(rule, **{given[0]: "conflict"})
    from jkv.analysis.analysis import analyze
    from jkv.analysis.redundancy import check_encoder
    from jkv.reports import cell

    check_encoder(options.encoder)
    if options.files:
        files = [file for path in options.files for file in files_of(path)]
        traces, tokenizer = read_traces(files), read_tokenizer(options.model)
        about = {"files": list(map(str, options.files)), "model": options.model}
    else:
        about = read_options(options, OPTIONS)
        traces, tokenizer = make_traces(about)
    tables = [headline(about["model"], options.encoder)]
    print(tables[0])
    if not any(mark is not None for _, right in traces.values() for mark in right):
        print('No trace is marked right or wrong: give "right" or "answer" to compare right and wrong ones.', file=sys.stderr)
    analyses = {}
    for name, (texts, right) in traces.items():
        analyses[name] = analyze(texts, right, tokenizer, options.encoder)
        tables.append(f"## {cell(name)}\n\n{analyses[name]}\n")
        print(tables[-1], flush=True)
    if options.out:
        source = options.files[0].stem if options.files else Path(str(about["model"])).name
        stem = f"{options.config.stem if options.config else 'redundancy'}-{source}"
        write(analyses, "\n".join(tables), options.out, stem, {"encoder": options.encoder} | about)
    return 0


def files_of(path: Path) -> list[Path]:
    """A file, or all files of traces in a folder."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        rule = f"A folder of traces must hold files that end in .jsonl; {path} has none. Name another."
        raise refused(rule, files="not_found")
    return files


def read_traces(files: Sequence[Path]) -> Traces:
    """The traces of files, by their policy, or by the file where they name none."""
    from jkv.evaluation.chains import read_answer
    from jkv.reports import read_json_lines

    traces: Traces = {}
    for file in files:
        records = read_json_lines(file, ("text",))
        if not records:
            raise refused(f"{file} must hold at least one trace, a JSON object a line; it is empty.", files="missing")
        for number, record in enumerate(records, 1):
            text, right, name = record["text"], record.get("right"), record.get("policy") or file.stem
            if not isinstance(text, str) or not isinstance(right, bool | None) or not isinstance(name, str):
                raise refused(
                    f'"text" and "policy" are strings and "right" is true or false; trace {number} of {file} has {text!r:.40}, '
                    f"{name!r:.40} and {right!r:.40}.",
                    files="wrong_type",
                )
            if right is None and record.get("answer") is not None:
                right = read_answer(text) == str(record["answer"])
            group = traces.setdefault(name, ([], []))
            group[0].append(text)
            group[1].append(right)
    return traces


def read_tokenizer(name: str | None) -> Any:
    """A model's tokenizer; None, to count words, where no model is named."""
    from jkv.checkpoints import loading as checkpoint

    tokenizer = None if name is None else checkpoint.load_tokenizer(name)
    if name is not None and tokenizer is None:
        rule = f"--model must have a tokenizer, whose tokens are counted; {name} has none. Leave it out to count words."
        raise refused(rule, model="unsupported")
    return tokenizer


def make_traces(chosen: dict[str, Any]) -> tuple[Traces, Any]:
    """A model's greedy traces of unseen chains under each policy and budget, and its tokenizer."""
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts
    from jkv.evaluation.budgets import parse_budget
    from jkv.evaluation.held_out import held_out, solve
    from jkv.evaluation.variants import build, takes_budget

    if shares := [budget for budget in chosen["budgets"] if parse_budget(budget).slots is None]:
        raise refused(f"analyze takes budgets in slots, such as 192; got {', '.join(map(str, shares))}.", budgets="wrong_type")
    if not chosen["policies"]:
        raise refused("--policies takes at least one policy, such as full,r_kv; got none.", policies="missing")
    policies = {}
    for name in chosen["policies"]:
        is_open = takes_budget(name, chosen["settings"])
        for budget in chosen["budgets"] if chosen["budgets"] and is_open else [None]:
            label = name if budget is None else f"{name} {budget}"
            policies[label] = build(name, None if budget is None else int(budget), chosen["settings"])
    check_counts(problems=chosen["problems"])
    model = checkpoint.load(str(chosen["model"]))
    problems = held_out(chosen["problems"])
    need_tokenizer(model.tokenizer, "Traces are analyzed as text")
    options = {name: chosen[name] for name in ("max_new_tokens", "max_running", "page_size")}
    traces: Traces = {}
    for label, policy in policies.items():
        out, right = solve(model, problems, policy, **options)
        traces[label] = list(out.text or ()), list(right)
    return traces, model.tokenizer


def headline(model: str | None, encoder: str) -> str:
    """What was counted, and how."""
    counted = "Words and signs" if model is None else f"Tokens of {model}"
    return f"{counted}; steps and sentences compared as {encoder}. Means over samples, with 95 % bootstrap intervals.\n"


def write(analyses: dict[str, Any], tables: str, folder: Path, name: str, about: dict[str, Any]) -> None:
    """The tables, the figures and the picture, as `name`.md, .json and .png."""
    from jkv.reports import write_figure, write_text
    from jkv.viz import redundancy

    write_text(folder / f"{name}.md", tables)
    record = {"about": about, "groups": {group: analysis.record() for group, analysis in analyses.items()}}
    write_text(folder / f"{name}.json", json.dumps(record, default=str) + "\n")
    print(f"wrote {name}.md and .json to {folder}", file=sys.stderr)
    if can_draw():
        write_figure(folder / f"{name}.png", redundancy(analyses))
        print(f"wrote {name}.png to {folder}", file=sys.stderr)
