"""Recipes: functions that build the policy of a method from its settings, each with its entry in the table of policies; and
`chain`, which joins several.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, cast

from jkv.checks import check_length, did_you_mean, shown, typed
from jkv.errors import Code, InputError, refused
from jkv.eviction.byte_budget import ByteBudget, in_bytes
from jkv.eviction.policy import Policy, noted
from jkv.limits import MOST_SIZE

P = ParamSpec("P")
LARGEST = 1e30  # of a fraction, with room for what it is multiplied by in float32
MOST_WORDS = 4_096  # elements of a list, such as keywords; characters of a text, such as a path
# Where a page has the table. The search for an end stops at another beginning, so that its time is linear.
MARKED = re.compile(r"(?<=<!-- policies -->\n)(?:(?!<!-- policies -->).)*?(?=<!-- /policies -->)", flags=re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the table of policies.

    Attributes:
      title: the name of the method in its paper.
      idea: what the method keeps, shares or changes, in a line of Markdown that starts with a verb.
      arxiv: the arXiv id of the paper, if there is one.
      module: the module of the recipe.
      published: the settings of the paper or its authors' code where they are not the defaults (`published`).
    """

    title: str
    idea: str
    arxiv: str | None
    module: str
    published: dict[str, Any]


def recipe(
    title: str, *, idea: str, arxiv: str | None = None, published: Mapping[str, Any] | None = None
) -> Callable[[Callable[P, Policy]], Callable[P, Policy]]:
    """Makes a function a recipe: settings of the wrong type are refused by name, and NumPy numbers become Python numbers.

    A `budget` may be a text of bytes (`jkv.eviction.byte_budget`). The arguments are the fields of `Entry`.

    >>> @recipe("Mine", idea="keeps every token")
    ... def mine(budget: int) -> Policy:
    ...     return Policy("mine")
    >>> mine(budget=2.5)
    Traceback (most recent call last):
    jkv.errors.InputError: mine's budget must be a whole number; got 2.5.
    """

    def decorate(build: Callable[P, Policy]) -> Callable[P, Policy]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Policy:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(describe_call(build.__name__, list(signature.parameters), list(kwargs), error)) from None
            budget = given.arguments.get("budget")
            for field, value in given.arguments.items():
                whose = f"{build.__name__}'s "
                if field == "budget" and isinstance(value, str):
                    continue
                given.arguments[field] = typed(field, value, signature.parameters[field].annotation, whose)
                check_size(field, given.arguments[field], whose)
            if isinstance(budget, str):
                return cast(Policy, in_bytes(build.__name__, build, given.arguments))
            return noted(build(*given.args, **given.kwargs), build.__name__, (), given.arguments)

        vars(checked)["entry"] = Entry(title, idea, arxiv, build.__module__, dict(published or {}))
        return checked

    return decorate


def describe_call(name: str, fields: Sequence[str], given: Sequence[str], error: TypeError) -> str:
    """What is wrong with a call of a recipe: a setting that it has not, or what Python says.

    >>> describe_call("mine", ["budget"], ["buget"], TypeError("missing a required argument: 'budget'"))
    "mine has these settings: budget; got 'buget'. Did you mean budget?"
    """
    known = f"{name} has these settings: {', '.join(fields)}" if fields else f"{name} has no settings"
    for field in given:
        if field not in fields:
            return f"{known}; got {field!r}.{did_you_mean(field, fields)}"
    return f"{known}; got a call with {error}."


def check_size(field: str, value: Any, whose: str) -> None:
    """Refuses what no program can hold: integers of more than 32 bits, fractions that float32 cannot hold, long lists."""
    rule = ""
    if isinstance(value, int) and not -MOST_SIZE < value < MOST_SIZE:
        rule = "must lie below 2**31, as slots and tokens are counted in 32 bits"
    elif isinstance(value, float) and not abs(value) <= LARGEST:
        rule = f"must lie in [-{LARGEST}, {LARGEST}]"
    elif isinstance(value, str) and len(value) > MOST_WORDS:
        rule = f"must have at most {MOST_WORDS:,} characters"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        check_length(field, value, MOST_WORDS, "elements", whose)
    if rule:
        code: Code = "too_long" if isinstance(value, str) else "out_of_range"
        raise InputError("{whose}{field} " + rule + "; got {got}.", field=field, code=code, whose=whose, got=shown(value))


def entry_of(build: Callable[..., Policy]) -> Entry:
    """The entry of a recipe in the table."""
    return vars(build)["entry"]


def recipes_in(names: Mapping[str, Any]) -> dict[str, Callable[..., Policy]]:
    """The recipes among the names of a module.

    Raises:
      ValueError: a public name is not a recipe.
    """
    found = {name: value for name, value in names.items() if not name.startswith("_")}
    for name, value in found.items():
        if not inspect.isfunction(value) or not isinstance(vars(value).get("entry"), Entry):
            raise ValueError(
                f"The table of policies must have recipes only; {name} is not one. Write @recipe(...) above its function."
            )
    return found


def markdown(recipes: Mapping[str, Callable[..., Policy]], folder: str = "") -> str:
    """The table of policies in Markdown: name, idea, paper and file. `folder` is a prefix of the paths."""
    lines = ["| name | idea | paper | file |", "|---|---|---|---|"]
    for name, build in recipes.items():
        entry = entry_of(build)
        paper = f"{entry.title}, [{entry.arxiv}](https://arxiv.org/abs/{entry.arxiv})" if entry.arxiv else entry.title
        file = entry.module.replace(".", "/") + ".py"
        lines.append(f"| `{name}` | {entry.idea} | {paper} | [{file.rpartition('/')[2]}]({folder}{file}) |")
    return "\n".join(lines)


def page_with_table(page: str, recipes: Mapping[str, Callable[..., Policy]], folder: str = "") -> str:
    """A Markdown page with the table of policies between its marks `<!-- policies -->` and `<!-- /policies -->`.

    Raises:
      ValueError: the page does not have the marks once.
    """
    if len(MARKED.findall(page)) != 1:
        raise ValueError("The page must have the marks <!-- policies --> and <!-- /policies --> once. Add them.")
    return MARKED.sub(lambda _: markdown(recipes, folder) + "\n", page)


def chain(*policies: Any) -> Policy:
    """One policy with the parts of all: `chain(reason_cache(), r_kv(budget=1024))` shares pages, then evicts.

    A row shares pages until its first compaction; the score then sees each slot's multiplicity (`CacheView.log_weight`).

    Raises:
      ValueError: two policies that have the same part, or parts that exclude each other.

    >>> from jkv.policies import r_kv, seal, reason_cache
    >>> chain(reason_cache(), r_kv(budget=64)).name
    'reason_cache+r_kv'
    """
    if any(isinstance(policy, ByteBudget) for policy in policies):
        rule = f"chain takes policies with budgets in slots; got {policies!r}. Give slots, such as budget=1024."
        raise refused(rule, policies="unsupported")
    if not policies or not all(isinstance(policy, Policy) for policy in policies):
        rule = f"chain takes policies, such as jkv.reason_cache() and jkv.r_kv(budget=1024); got {policies!r}."
        raise refused(rule, policies="wrong_type")
    fields: dict[str, Any] = {}
    for policy in policies:
        for field in dataclasses.fields(Policy):
            value = getattr(policy, field.name)
            if field.name in ("name", "source") or not field.init or value == field.default:
                continue
            if field.name in fields:
                rule = f"chain takes one policy for each part; two have {field.name!r}: {policies!r}."
                raise refused(rule, policies="conflict")
            fields[field.name] = value
    return noted(Policy("+".join(policy.name for policy in policies), **fields), "chain", policies, {})
