"""`jkv policies` lists the policies and their settings."""

import argparse
import os
from pathlib import Path
from typing import Any

from jkv.checks import did_you_mean, shown
from jkv.cli.inputs import LOOKS
from jkv.cli.options import ENGINE
from jkv.errors import refused


def add(commands: Any) -> None:
    """Adds the command and its options."""
    command = commands.add_parser(
        "policies", help="list the policies and their settings", description="Lists the policies, or explains one.", **LOOKS
    )
    command.add_argument("name", nargs="?", help="a policy, to be explained")
    command.add_argument(
        "--markdown", action="store_true", help="print the table of the documentation: name, idea, paper, file"
    )
    command.add_argument(
        "--page", type=Path, metavar="FILE", help="write the table between the marks of a page, such as docs/methods.md"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints each policy with its settings, paper and idea; or prints or writes the table in Markdown."""
    import inspect

    from jkv.eviction.recipe import entry_of, markdown, page_with_table
    from jkv.policies import POLICIES, is_known
    from jkv.reports import write_text
    from jkv.text_files import read_text

    if options.name is not None:
        if not is_known(options.name):
            rule = f"There is no policy {shown(options.name)}.{did_you_mean(options.name, POLICIES)} See `jkv policies`."
            raise refused(rule, name="unknown_name")
        print(explain(options.name))
        return 0
    if options.page:
        folder = os.path.relpath(Path.cwd(), options.page.parent)
        page = read_text(options.page)
        write_text(options.page, page_with_table(page, POLICIES, "" if folder == "." else f"{folder}/"))
        return 0
    if options.markdown:
        print(markdown(POLICIES))
        return 0
    for name, recipe in POLICIES.items():
        entry = entry_of(recipe)
        paper = f"{entry.title}, arXiv {entry.arxiv}" if entry.arxiv else entry.title
        fields = inspect.signature(recipe).parameters.values()
        print(f"{name}({', '.join(str(field.replace(annotation=field.empty)) for field in fields)})")
        print(f"    {paper}: {entry.idea}")
    return 0


def explain(name: str) -> str:
    """A policy's idea, paper, settings with their defaults, and all that its docstring says."""
    import inspect

    from jkv.policies import recipe_of
    from jkv.policies.own import fields_of, is_own

    recipe = recipe_of(name)
    entry, fields = vars(recipe).get("entry"), fields_of(recipe).values()
    paper = f" (arXiv {entry.arxiv})" if entry and entry.arxiv else ""
    head = f"{entry.title}{paper}: {entry.idea}" if entry else name
    taken = {option.name for option in ENGINE} - {"budget"}  # of the command itself, such as --seed
    said = {
        f"set {field.name}=" if field.name in taken or is_own(name) else field.name.replace("_", "-"): "must be given"
        if field.default is field.empty
        else f"default: {field.default!r}"
        for field in fields
    }
    flags = "".join(f"\n  --{flag:<18}{words}" for flag, words in said.items())
    text = inspect.getdoc(recipe) or ""
    own = ", ".join(f"{field}={value!r}" for field, value in entry.published.items()) if entry else ""
    flags += f"\n\nAs published (`jkv.published`, or --set published=true): {own}" if own else ""
    return f"{head}\n\n{text}\n\nSettings, as options of `jkv generate`:{flags or ' none'}"
