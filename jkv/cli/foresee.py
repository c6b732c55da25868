"""`jkv foresee` trains the networks of the policy foresight."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.checks import words
from jkv.cli.inputs import LOOKS, check_target, passages
from jkv.cli.options import LEARNT_FILE, MODEL, Option, add_options

OPTIONS = (
    MODEL,
    Option("text", str, None, "plain text like what the model will read; default: its own traces of unseen chains", Path),
    Option("passages", int, 400, "how many texts"),
    Option(
        "length",
        int,
        None,
        "tokens of each passage of --text: as many as the model will write; slots older than a passage are not told "
        "apart; default: the model's positions, at most 4096, or fewer if memory does not hold them",
    ),
    Option("hidden", int, 32, "hidden units of each network"),
    Option("steps", int, 2_000, "steps of training"),
    Option("seed", int, 0, "of the first weights and of the order of texts"),
    Option("without", list, [], "inputs to leave out, of key, value and age, comma-separated", words),
    Option("power", int, 2, "to which attention is raised; 2 counts sharp look-ups"),
    LEARNT_FILE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "foresee",
        help="train the networks of the policy foresight",
        description="Trains small networks that expect which slots a model will read, for the policy foresight.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Trains and saves."""
    from jkv.analysis.foresee import default_length, foresee
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts

    check_counts(**{name: getattr(options, name) for name in ("passages", "hidden", "steps", "power")})
    if options.length is not None:
        check_counts(length=options.length)
    check_target(options.out)
    model = checkpoint.load(options.model)
    length = default_length(model.config, options.passages) if options.length is None else options.length
    texts = [[*prompt, *rest] for prompt, rest in passages(model, options.text, options.passages, length, 1)]

    def report(figures: dict[str, Any]) -> None:
        print(f"step {figures['step']:,} of {options.steps:,}: loss {figures['loss']:.3f} nats", file=sys.stderr, flush=True)

    chosen = {name: getattr(options, name) for name in ("hidden", "steps", "seed", "without", "power")}
    network = foresee(model, texts, **chosen, report=report)
    network.save(options.out)
    ages = f"slots older than {network.arrays.longest_age[0]:,.0f} tokens are not told apart"
    print(f"wrote {options.out}: {network}; {ages}", file=sys.stderr)
    return 0
