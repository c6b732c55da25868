"""The command line, one file a command: `jkv generate`, `jkv eval`, and those that `jkv --help` lists.

Bad input ends with one line (the rule, the value, what to do) and exit status 2.
"""

import argparse
import importlib.metadata
from collections.abc import Sequence

from jkv.checks import DISTRIBUTION
from jkv.cli import analyze, bench, evaluate, generate, plan, policies, steer
from jkv.cli.inputs import LOOKS, examples_of
from jkv.cli_errors import run_safely

COMMANDS = (generate, evaluate, analyze, plan, bench, steer, policies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if vars(options).pop("version"):
        print("jkv", importlib.metadata.version(DISTRIBUTION))
        return 0
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    resumes = "resume" in options and options.out
    interrupted = "jkv: interrupted" + (f"; --resume --out {options.out} goes on" if resumes else "")
    returns_early = options.run is generate.run  # it prints what there is
    return run_safely(
        lambda: options.run(options), "jkv: error:", interrupted, returns_early=returns_early, is_program=arguments is None
    )


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser("jkv", description="Reasoning models with a compressed, paged KV cache.", **LOOKS)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(metavar="command")
    for command in COMMANDS:
        command.add(commands)
    for name, subparser in commands.choices.items():
        subparser.epilog, subparser.formatter_class = examples_of(name), LOOKS["formatter_class"]
    return parser
