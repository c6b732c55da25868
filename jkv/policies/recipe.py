"""Recipes: functions that build a method's policy from its settings, with what the table of policies says of the method."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from jkv.checks import typed
from jkv.policies.policy import Policy

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the table of policies.

    Attributes:
      title: the method's name, as its paper writes it.
      keeps: in a few words, what it keeps.
      arxiv: its paper's identifier at arXiv, if it has one.
      module: the module that the recipe is in.
    """

    title: str
    keeps: str
    arxiv: str | None
    module: str


def recipe(title: str, *, keeps: str, arxiv: str | None = None) -> Callable[[Callable[P, Policy]], Callable[P, Policy]]:
    """Makes a function a recipe: settings of the wrong type are refused by name, and NumPy's numbers become Python's.

    >>> @recipe("Mine", keeps="everything")
    ... def mine(budget: int) -> Policy:
    ...     return Policy("mine")
    >>> mine(budget=2.5)
    Traceback (most recent call last):
    ValueError: mine's budget must be a whole number; got 2.5.
    """

    def decorate(build: Callable[P, Policy]) -> Callable[P, Policy]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Policy:
            given = signature.bind(*args, **kwargs)
            for field, value in given.arguments.items():
                given.arguments[field] = typed(f"{build.__name__}'s {field}", value, signature.parameters[field].annotation)
            return build(*given.args, **given.kwargs)

        vars(checked)["entry"] = Entry(title, keeps, arxiv, build.__module__)
        return checked

    return decorate


def entry_of(build: Callable[..., Policy]) -> Entry:
    """What the table says of a recipe."""
    return vars(build)["entry"]


def recipes_in(names: Mapping[str, Any]) -> dict[str, Callable[..., Policy]]:
    """The recipes among a module's names.

    Raises:
      ValueError: a public name that is no recipe.
    """
    found = {name: value for name, value in names.items() if not name.startswith("_")}
    for name, value in found.items():
        if not inspect.isfunction(value) or not isinstance(vars(value).get("entry"), Entry):
            raise ValueError(
                f"The table of policies holds recipes only; {name} is none. Write @recipe(...) above its function."
            )
    return found


def markdown(recipes: Mapping[str, Callable[..., Policy]], folder: str = "") -> str:
    """The table of policies as Markdown: name, what it keeps, paper and file; `folder` comes before the paths of files."""
    lines = ["| name | keeps | paper | file |", "|---|---|---|---|"]
    for name, build in recipes.items():
        entry = entry_of(build)
        paper = f"{entry.title}, [{entry.arxiv}](https://arxiv.org/abs/{entry.arxiv})" if entry.arxiv else entry.title
        file = entry.module.replace(".", "/") + ".py"
        lines.append(f"| `{name}` | {entry.keeps} | {paper} | [{file.rpartition('/')[2]}]({folder}{file}) |")
    return "\n".join(lines)
