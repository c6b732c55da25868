"""`jkv policies` lists the policies and their settings."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser("policies", help="list the policies and their settings")
    command.add_argument("--markdown", action="store_true", help="print the table of the documentation: name, paper, file")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints each policy with its settings, paper and what it keeps; or the table in Markdown."""
    import inspect

    from jkv.policies import POLICIES
    from jkv.policies.recipe import entry_of, markdown

    if options.markdown:
        print(markdown(POLICIES))
        return 0
    for name, recipe in POLICIES.items():
        entry = entry_of(recipe)
        paper = f"{entry.title}, arXiv {entry.arxiv}" if entry.arxiv else entry.title
        print(f"{name}{inspect.signature(recipe).replace(return_annotation=inspect.Signature.empty)}")
        print(f"    {paper}: keeps {entry.keeps}")
    return 0
