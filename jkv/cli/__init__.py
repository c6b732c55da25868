"""The command line, one file a command: `jkv generate`, `jkv eval`, and those that `jkv --help` lists.

Bad input ends with one line (the rule, the value, what to do) and exit status 2.
"""

import argparse
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from jkv.cli import analyze, bench, evaluate, generate, plan, policies, steer
from jkv.cli.inputs import LOOKS, examples_of
from jkv.engine.interrupts import ending_at_interrupt, ignore_interrupts

COMMANDS = (generate, evaluate, analyze, plan, bench, steer, policies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if vars(options).pop("version"):
        print("jkv", importlib.metadata.version("jkv"))
        return 0
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    try:
        with contextlib.nullcontext() if options.run is generate.run else ending_at_interrupt():
            return options.run(options)
    except BrokenPipeError:  # `jkv generate ... | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- for the interpreter's last flush
        return 0
    except (ValueError, OSError) as error:
        print("jkv: error:", " ".join(str(error).split()), file=sys.stderr)  # one line, whatever a library raises
        return 2
    except KeyboardInterrupt:
        if arguments is None:
            ignore_interrupts()
        resumes = "resume" in options and options.out
        print("jkv: interrupted" + (f"; --resume --out {options.out} goes on" if resumes else ""), file=sys.stderr)
        return 130


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
