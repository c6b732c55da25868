"""The command line, one file a command: `jkv generate`, `jkv eval`, and those that `jkv --help` lists.

Bad input ends with one line (the rule, the value, what to do) and exit status 2.
"""

import argparse
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from jkv.checks import DISTRIBUTION, did_you_mean
from jkv.cli import (
    analyze,
    bench,
    calibrate,
    chat,
    choose,
    diagnose,
    evaluate,
    foresee,
    generate,
    models,
    plan,
    policies,
    probe,
    recall,
    serve,
    steer,
)
from jkv.cli.errors import run_safely
from jkv.cli.inputs import LOOKS, examples_of, expand_flags
from jkv.limits import check_numbers

COMMANDS = (
    *(generate, chat, serve, choose, evaluate, analyze, recall, probe),
    *(plan, bench, diagnose, steer, calibrate, foresee, policies, models),
)


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one line, not with a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. See `{self.prog} --help`.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser, given = make_parser(), list(sys.argv[1:] if arguments is None else arguments)
    command: argparse.ArgumentParser = parser
    if "" not in sys.path:  # the working folder, for modules of your own, after all that is installed
        sys.path.append("")
    if given and not given[0].startswith("-"):
        commands = commands_of(parser)
        if given[0] not in commands:
            parser.error(f"there is no command {given[0]!r}.{did_you_mean(given[0], commands)}")
        command, rest = commands[given[0]], given[1:]
        command = commands_of(command).get(rest[0], command) if rest else command  # `jkv bench throughput`
        given = [given[0], *expand_flags(command, rest)]
    options, surplus = parser.parse_known_args(given)
    if surplus:
        takes_name = "--model" in command._option_string_actions and not surplus[0].startswith("-")
        hint = " The model is named by --model." if takes_name else ""
        command.error(f"unrecognized arguments: {' '.join(surplus)}.{hint}")
    if vars(options).pop("version"):
        print("jkv", importlib.metadata.version(DISTRIBUTION))
        return 0
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    if arguments is None:
        warnings.showwarning = show_warning
    if vars(options).pop("verbose", False):
        logging.basicConfig(format="jkv: %(message)s")
        logging.getLogger("jkv").setLevel(logging.INFO)
    resumes = "resume" in options and options.out
    interrupted = "jkv: interrupted" + (f"; --resume --out {options.out} goes on" if resumes else "")
    returns_early = options.run in (generate.run, chat.run, serve.run)  # they print what there is
    return run_safely(
        lambda: start(options), "jkv: error:", interrupted, returns_early=returns_early, is_program=arguments is None
    )


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning in one line, without the place in the program."""
    print(f"jkv: warning: {message}", file=sys.stderr)


def start(options: argparse.Namespace) -> int:
    """Runs a command, if its numbers are within their limits."""
    check_numbers(vars(options))
    status: int = options.run(options)
    return status


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command; none where there are no commands."""
    if parser._subparsers is None:
        return {}
    choices: Any = parser._subparsers._group_actions[0].choices
    return dict(choices)


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = Parser("jkv", description="Reasoning models with a compressed, paged KV cache.", **LOOKS)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(metavar="command")
    for command in COMMANDS:
        command.add(commands)
    for name, subparser in commands.choices.items():
        subparser.epilog, subparser.formatter_class = examples_of(name), LOOKS["formatter_class"]
        for benchmark, inner in commands_of(subparser).items():
            inner.epilog = examples_of(f"{name} {benchmark}")
    return parser
