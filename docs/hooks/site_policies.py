"""One page for each policy, made of its docstring, its entry in the table of policies, its settings and its recorded figures.

A new policy gets its page with its line in `jkv/policies/table.py`; nothing here names one.
"""

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from site_links import ROOT

from jkv.eviction import Policy
from jkv.eviction.recipe import entry_of
from jkv.policies import POLICIES, needs_no_file

RESULTS = ROOT / "results"
EXPERIMENTS = ROOT / "configs" / "experiments"
SECTION = re.compile(r"^(Rule|Departures|Raises)(?: \(([^)\n]*)\))?:\n((?:(?:  .*)?\n)+)", flags=re.MULTILINE)
TABLE = re.compile(r"^(\|.*\|)\n\|[-|: ]+\|\n((?:\|.*\|\n?)+)", flags=re.MULTILINE)
METHODS = ("policy", "method", "arm", "sampler")  # columns that name a policy
COMMAND = re.compile(r"^(`[^`]+`), (\S+),", flags=re.MULTILINE)
LETTERS = (
    "Scores are of the slots of one layer and KV head, and the slots with the highest scores stay. q is a query, H the head "
    "size, K the number of KV heads of a layer."
)


class Description(NamedTuple):
    """A policy's docstring, taken apart."""

    text: str
    rule: str
    equations: str  # where the paper has the rule
    departures: str


def description_of(recipe: Callable[..., Policy]) -> Description:
    """What the docstring of a recipe says: text first, then the sections "Rule:" and "Departures:"."""
    doc = inspect.cleandoc(recipe.__doc__ or "").partition("\n>>> ")[0] + "\n"
    sections = {title: (where or "", inspect.cleandoc(f"\n{body}")) for title, where, body in SECTION.findall(doc)}
    (equations, rule), (_, departures) = sections.get("Rule", ("", "")), sections.get("Departures", ("", ""))
    return Description(SECTION.sub("", doc).strip(), rule, equations, departures)


def page_of(name: str) -> str:
    """The Markdown of a policy's page; its links are relative to a folder of `docs`."""
    recipe = POLICIES[name]
    entry, said = entry_of(recipe), description_of(recipe)
    file = entry.module.replace(".", "/") + ".py"
    paper = f"[arXiv {entry.arxiv}](https://arxiv.org/abs/{entry.arxiv})" if entry.arxiv else "none"
    parts = [
        f"# {name}",
        f"**{entry.title[:1].upper()}{entry.title[1:]}**: {entry.idea}.",
        f"Paper: {paper} · Source: [{file}](../../{file}) · At the terminal: `jkv policies {name}`",
        said.text,
    ]
    if said.rule:
        where = f" ({said.equations} of the paper)" if said.equations else ""
        parts += [f"## Rule{where}", f"```text\n{said.rule}\n```", LETTERS if "softmax" in said.rule else ""]
    if said.departures:
        parts += ["## Departures from the paper", said.departures]
    parts += ["## Settings", settings_of(name), facts_of(name)]
    figures = list(figures_of(name))
    parts += ["## Measured", *(figures or ["No recorded run has this policy. `jkv eval` measures it on your own problems."])]
    return "\n\n".join(part for part in parts if part) + "\n"


def with_pages(table: str) -> str:
    """The table of policies, with links from the names to their pages.

    >>> with_pages("| `tova` | evicts |")
    '| [`tova`](policies/tova.md) | evicts |'
    """
    return re.sub(rf"^\| `({'|'.join(POLICIES)})` \|", r"| [`\1`](policies/\1.md) |", table, flags=re.MULTILINE)


def settings_of(name: str) -> str:
    """The table of a recipe's settings."""
    fields = inspect.signature(POLICIES[name]).parameters.values()
    if not fields:
        return f"`jkv.{name}()` has no settings."
    rows = [f"| `{field.name}` | `{type_of(field)}` | {default_of(field)} |" for field in fields]
    call = ", ".join(field.name + "=..." for field in fields if field.default is field.empty)
    lines = [f"`jkv.{name}({call})`", "", "| setting | type | default |", "|---|---|---|", *rows]
    if own := entry_of(POLICIES[name]).published:
        values = ", ".join(f"`{field}={value!r}`" for field, value in own.items())
        lines += ["", f'As published, `jkv.published("{name}", {call})`: {values}.']
    return "\n".join(lines)


def type_of(field: inspect.Parameter) -> str:
    """The type of a setting, without the modules of names."""
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(field.annotation))


def default_of(field: inspect.Parameter) -> str:
    """The default of a setting, as it is typed."""
    return "must be given" if field.default is field.empty else f"`{field.default!r}`"


def facts_of(name: str) -> str:
    """How much a row of the cache holds, and what the engine keeps for the policy."""
    if not needs_no_file(name):
        return ""
    recipe: Any = POLICIES[name]
    policy = recipe(budget=1024) if "budget" in inspect.signature(recipe).parameters else recipe()
    size = "has a largest size, whatever the length" if policy.is_bounded else "grows with the sequence"
    needs = f"`{policy.needs!r}` ([`jkv.Needs`](../your-own-policy.md#what-a-score-needs))"
    return f"The cache of a row {size}. The engine keeps for it: {needs}."


def figures_of(name: str) -> Iterator[str]:
    """The recorded rows of a policy: a heading, where they come from, and a table, for each file of results."""
    for file in sorted(RESULTS.glob("*.md"), key=rank_of):
        text, config = file.read_text(), config_of(file)
        aliases = aliases_in(config) if config else {}
        tables = [table for header, rows in TABLE.findall(text) if (table := rows_of(name, header, rows, aliases))]
        if tables:
            yield f"### {heading_of(file, config)}"
            yield source_of(file, text, config)
            yield "\n\n".join(tables)


def rank_of(file: Path) -> tuple[bool, bool, str]:
    """The order of files: the comparison of all policies, other experiments, benchmarks."""
    config = config_of(file)
    return file.stem.partition("-")[0] != "all", config is None, (config or file).stem


def config_of(file: Path) -> Path | None:
    """The experiment of `jkv eval` that wrote a file of results; None for the file of another command."""
    stem, is_of_model, _ = file.stem.partition("-tiny-reasoner")
    config = EXPERIMENTS / f"{stem}.toml"
    return config if is_of_model and config.exists() else None


def heading_of(file: Path, config: Path | None) -> str:
    """What was measured: the first sentence of an experiment, or the name of a benchmark."""
    if config is None:
        return f"Benchmark `{file.stem}`"
    return re.split(r"\.(?: (?=[A-Z])|$)", config.read_text().splitlines()[0].removeprefix("#").strip())[0]


def source_of(file: Path, text: str, config: Path | None) -> str:
    """The whole table, and the command that wrote it."""
    if config:
        command = f"`jkv eval --config configs/experiments/{config.name} --out results`"
    else:
        found = COMMAND.search(text)
        command = f"{found[1]} on {found[2]}" if found else "a benchmark"
    return f"From [results/{file.name}](../../results/{file.name}), by {command}."


def aliases_in(config: Path) -> dict[str, str]:
    """The names of an experiment's settings, with the policy of each."""
    settings = tomllib.loads(config.read_text())
    own = {alias: one.get("policy", alias) for alias, one in settings.get("settings", {}).items()}
    return (aliases_in(config.parent / settings["extends"]) if "extends" in settings else {}) | own


def rows_of(name: str, header: str, rows: str, aliases: dict[str, str]) -> str:
    """The part of a Markdown table that is about a policy, without columns that are empty there; "" if there is none."""
    titles, every = cells_of(header), [cells_of(row) for row in rows.splitlines()]
    column = next((titles.index(method) for method in METHODS if method in titles), None)
    if column is None:
        return ""
    chosen = [row for row in every if policy_in(row[column], aliases) == name]
    if not chosen:
        return ""
    full = [row for row in every if row[column] == "full"] if aliases and name != "full" else []  # what the change is from
    shown = [i for i in range(len(titles)) if any(row[i] for row in chosen)]
    lines = [titles, ["---"] * len(titles), *full, *chosen]
    return "\n".join("| " + " | ".join(line[i] for i in shown) + " |" for line in lines)


def policy_in(cell: str, aliases: dict[str, str]) -> str:
    """The policy that a cell names, as in "r_kv 128", "r_kv, replayed" and "jkv `r_kv`"."""
    words = cell.replace("`", "").replace(",", " ").split()
    word = next((word for word in words if word != "jkv"), "")
    return aliases.get(word, word)


def cells_of(line: str) -> list[str]:
    """The cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
