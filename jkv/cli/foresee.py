"""`jkv foresee` trains the networks of the policy foresight."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.checks import words
from jkv.cli.inputs import LOOKS, check_target, passages


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "foresee",
        help="train the networks of the policy foresight",
        description="Trains small networks that expect which slots a model will read, for the policy foresight.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--model", default="tiny-reasoner", help="a shipped model, a checkpoint folder, a GGUF file, or a hub name"
    )
    command.add_argument(
        "--text", type=Path, help="plain text like what the model will read; default: its own traces of unseen chains"
    )
    command.add_argument("--passages", type=int, default=400, help="how many texts (default %(default)s)")
    command.add_argument(
        "--length",
        type=int,
        help="tokens of each passage of --text: as many as the model will write; older slots than those of a passage are not "
        "told apart (default: the model's positions, at most 4096, or fewer if memory does not hold them)",
    )
    command.add_argument("--hidden", type=int, default=32, help="hidden units of each network (default %(default)s)")
    command.add_argument("--steps", type=int, default=2_000, help="steps of training (default %(default)s)")
    command.add_argument(
        "--seed", type=int, default=0, help="of the first weights and of the order of texts (default %(default)s)"
    )
    command.add_argument(
        "--without", type=words, default=[], help="inputs to leave out, of key, value and age, comma-separated"
    )
    command.add_argument(
        "--power", type=int, default=2, help="to which attention is raised; 2 counts sharp look-ups (default %(default)s)"
    )
    command.add_argument("--out", type=Path, required=True, help="the safetensors file to write")


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
