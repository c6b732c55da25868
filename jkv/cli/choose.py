"""`jkv choose` finds the policy and the budget for a model and the user's own text."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.checks import words
from jkv.cli.evaluate import PROBLEMS, read_questions, settle_chat, with_settings
from jkv.cli.inputs import LOOKS, make_folder
from jkv.cli.options import (
    KV_DTYPE,
    MAX_RUNNING,
    PAGE_SIZE,
    SET,
    SETTINGS,
    Option,
    add_options,
    defaults_of,
    read_options,
    read_settings,
)

ASKED = ("preset", "question", "answer", "template", "chat_template", "grader")  # options of problems, as `jkv eval` has them
OPTIONS = (
    Option("model", str),
    Option("texts", str, None, "any plain text like what the model will read and write", Path),
    Option("problems", str, None, "in place of texts: a JSONL, parquet or CSV file, as `jkv eval --dataset` takes it", Path),
    *(option for option in PROBLEMS if option.name in ASKED),
    Option(
        "policies", list, None, "comma-separated; default: all that a budget makes small, without those that need a file", words
    ),
    SETTINGS,
    Option("budgets", list, ["50%", "25%", "12.5%"], "comma-separated: slots, or shares of the mean length", words),
    Option("memory", str, None, "bytes of a row, such as 64MB: the only budget then; default: none"),
    Option("tolerance", float, 0.05, "the most that a token may become less likely, in nats"),
    Option("interval", int, 16, "tokens between two compactions"),
    Option("count", int, 16, "passages of the text, or problems"),
    Option("length", int, 512, "tokens of each passage"),
    Option("prompt", int, 32, "tokens of it that are prefilled"),
    Option("max_new_tokens", int, None, "of an answer; default: 1024, or what the model's positions leave"),
    MAX_RUNNING,
    PAGE_SIZE,
    KV_DTYPE,
)
OF_CHOOSE = ("budgets", "memory", "tolerance", "interval", "length", "prompt", "max_new_tokens")
OF_ENGINE = ("max_running", "page_size", "kv_dtype")


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "choose",
        help="find the policy and the budget for a model and your own text",
        description="Decodes your text under every policy at a few budgets, and ranks them by how much less likely its tokens "
        "become than with the full cache (loss, nats a token, with 95 % intervals over passages). Prints the smallest budget "
        "at which the best policy loses at most the tolerance, and the line of code to use it. With problems, the texts are "
        "the model's own answers, and the chosen policy then answers the problems itself.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument("model", help="a name of `jkv models`, a checkpoint folder, a GGUF file, or a hub name")
    command.add_argument("--config", type=Path, help="a TOML file with any of these options and [settings.<policy>]")
    for option in OPTIONS:
        option.add(command)
    add_options(command, [SET])
    command.add_argument("--out", type=Path, help="a folder for the table and the JSON")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the ranking and what follows from it, and writes it."""
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts
    from jkv.evaluation.choose import check_names, check_sources, choose, ranked_names
    from jkv.evaluation.problems import put
    from jkv.reports import about, write
    from jkv.text_files import read_text
    from jkv.tidy import csv_of, records_of

    chosen = read_options(options, OPTIONS)
    check_counts(count=chosen["count"])
    names = chosen["policies"] or ranked_names(chosen["settings"])
    settings = with_settings(chosen["settings"], names, read_settings(None, options.set))
    check_names(names, settings)
    text = None if chosen["texts"] is None else read_text(Path(chosen["texts"]))
    questions = None
    asked = {name: chosen[name] for name in ASKED} | {"dataset": chosen["problems"], "problems": chosen["count"]}
    asked = defaults_of(PROBLEMS) | asked
    if chosen["problems"] is not None:
        questions = read_questions(asked)
    check_sources(text, questions)
    if options.out:
        make_folder(options.out)
    source = next(f" --{name} {Path(chosen[name]).name}" for name in ("texts", "problems") if chosen[name] is not None)
    command = f"jkv choose {Path(str(chosen['model'])).name}{source}"
    record = {"about": about(command), "chosen": {name: str(value) for name, value in chosen.items()}}
    model = checkpoint.load(str(chosen["model"]))
    problems = None
    if questions is not None:
        settle_chat(asked, model.tokenizer)
        problems = put(model.tokenizer, questions, asked["template"], asked["chat_template"])
    found = choose(
        model,
        text,
        problems,
        policies=names,
        settings=settings,
        count=chosen["count"],
        grader=asked["grader"] or "boxed",
        **{name: chosen[name] for name in OF_CHOOSE},
        **{name: chosen[name] for name in OF_ENGINE},
    )
    print(found)
    if options.out:
        stem = f"{options.config.stem if options.config else 'choose'}-{Path(str(chosen['model'])).name}"
        write(stem, record | found.record, str(found), options.out, csv_of(records_of(found)))
        print(f"wrote {stem}.md, .json and .csv to {options.out}", file=sys.stderr)
    return 0
