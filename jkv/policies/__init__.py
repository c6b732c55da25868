"""Policies by name: those that are published here (`jkv.policies.table`), and your own (`jkv.policies.own`).

`jkv.eviction` has what they are made of.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jkv.checks import check_known, did_you_mean, shown
from jkv.errors import InputError
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import entry_of, recipes_in
from jkv.policies import table
from jkv.policies.own import fields_of, is_own, own_recipe, recipe_from, takes_any
from jkv.policies.table import *  # noqa: F403 -- the recipes

# The full cache comes first: every other policy is compared with it.
POLICIES: dict[str, Callable[..., Policy]] = {"full": table.full} | recipes_in(vars(table))

__all__ = ["POLICIES", "make", "published", *POLICIES]


Recipe: TypeAlias = str | Policy | Callable[..., Policy]  # a name, or what it may name


def is_known(recipe: Recipe) -> bool:
    """Whether a name is of a policy that is published here, or has the form of a name of your own; True for a policy itself."""
    return not isinstance(recipe, str) or recipe in POLICIES or is_own(recipe)


def recipe_of(recipe: Recipe) -> Callable[..., Policy]:
    """The function that builds a policy from its settings, by its name; of a policy itself, one without settings.

    Raises:
      ValueError: an unknown name; the known ones are listed.
    """
    if isinstance(recipe, Policy):
        return lambda: recipe
    if not isinstance(recipe, str):
        return recipe if "entry" in vars(recipe) else recipe_from(recipe, name_of(recipe), name_of(recipe))
    if is_own(recipe):
        return own_recipe(recipe)
    if recipe not in POLICIES and "." in recipe:
        rule = "{field} must be a name of `jkv policies`, or module:name of your own; got {got}. Write {own}."
        last = recipe.rpartition(".")[2]
        own = last if last in POLICIES else f"{recipe}:NAME" if last == "py" else ":".join(recipe.rsplit(".", 1))
        raise InputError(rule, field="policy", code="unknown_name", got=shown(recipe), own=own)
    check_known(POLICIES, policy=recipe)
    return POLICIES[recipe]


def name_of(recipe: Recipe) -> str:
    """The name of a policy, of a function that makes policies, or the name itself."""
    return recipe if isinstance(recipe, str) else str(getattr(recipe, "name", getattr(recipe, "__name__", repr(recipe))))


def has_setting(recipe: Recipe, setting: str) -> bool:
    """Whether a policy has a setting; True for an unknown name, so that `make` refuses it."""
    return not is_known(recipe) or setting in fields_of(recipe_of(recipe))


def has_budget(recipe: Recipe) -> bool:
    """Whether a policy takes a budget; True for an unknown name."""
    return has_setting(recipe, "budget")


def accepts(recipe: Recipe, setting: str) -> bool:
    """Whether a setting may be given to a policy; False for an unknown name."""
    if not is_known(recipe):
        return False
    build = recipe_of(recipe)
    return setting in fields_of(build) or takes_any(build) or (setting == "published" and "entry" in vars(build))


def needs_no_file(name: str) -> bool:
    """Whether a policy needs no setting but a budget."""
    fields = fields_of(POLICIES[name]).values()
    return all(field.name == "budget" or field.default is not field.empty for field in fields)


def make(recipe: Recipe, settings: Mapping[str, Any]) -> Policy:
    """The policy with a name and settings, as a user types them; `published=True` is the same as `published(name)`.

    The name is one of `jkv.POLICIES`, or `module:name` of your own. What it names may stand in its place: a policy, or a
    function that returns one.

    Raises:
      ValueError: an unknown name or setting, a missing setting, or one of the wrong type; the known ones are listed.

    >>> make("streaming_llm", {"budget": 64}).budget
    64
    """
    name, build = name_of(recipe), recipe_of(recipe)
    if "published" in settings and "entry" in vars(build):
        own = {field: value for field, value in settings.items() if field != "published"}
        settings = (entry_of(build).published if settings["published"] else {}) | own
    fields = fields_of(build)
    about: dict[str, Any] = {"name": name, "known": ", ".join(fields)}
    for field in () if takes_any(build) else settings:
        if not fields:
            rule = "{name} has no settings; got {field}. Name a policy that has, such as r_kv."
            raise InputError(rule, field=field, code="unknown_name", **about)
        if field not in fields:
            rule, near = "{name} has these settings: {known}; got {got}.{near}", did_you_mean(field, fields)
            if list(fields) == ["view"]:
                near = " It is a score: name a function of budget= that returns jkv.evict_by(score, budget)."
            raise InputError(rule, field=field, code="unknown_name", got=shown(field), near=near, **about)
    for field, parameter in fields.items():
        if parameter.default is parameter.empty and field not in settings:
            raise InputError("{name} needs {field}=; its settings are: {known}.", field=field, code="missing", **about)
    return build(**settings)


def published(name: str, **settings: Any) -> Policy:
    """The policy of a paper as its authors run it, where the default departs from that; `settings` go before.

    `jkv policies NAME` shows which settings these are. What no setting can change is listed there as a departure.

    Raises:
      ValueError: as `make`.

    >>> published("snap_kv", budget=512)
    snap_kv(budget=512, when='prefill', window=32, pool=5)
    """
    return make(name, {"published": True, **settings})
