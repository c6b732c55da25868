"""The policies that are published here (`jkv.policies.table`), by name. `jkv.eviction` has what they are made of."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jkv.checks import check_known, did_you_mean, shown
from jkv.errors import InputError
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import entry_of, recipes_in
from jkv.policies import table
from jkv.policies.table import *  # noqa: F403 -- the recipes

# The full cache comes first: every other policy is compared with it.
POLICIES: dict[str, Callable[..., Policy]] = {"full": table.full} | recipes_in(vars(table))

__all__ = ["POLICIES", "make", "published", *POLICIES]


def has_setting(name: str, setting: str) -> bool:
    """Whether a policy has a setting; True for an unknown name, so that `make` refuses it."""
    return name not in POLICIES or setting in inspect.signature(POLICIES[name]).parameters


def has_budget(name: str) -> bool:
    """Whether a policy takes a budget; True for an unknown name."""
    return has_setting(name, "budget")


def needs_no_file(name: str) -> bool:
    """Whether a policy needs no setting but a budget."""
    fields = inspect.signature(POLICIES[name]).parameters.values()
    return all(field.name == "budget" or field.default is not field.empty for field in fields)


def make(name: str, settings: Mapping[str, Any]) -> Policy:
    """The policy with a name and settings, as a user types them; `published=True` is the same as `published(name)`.

    Raises:
      ValueError: an unknown name or setting, a missing setting, or one of the wrong type; the known ones are listed.

    >>> make("streaming_llm", {"budget": 64}).budget
    64
    """
    check_known(POLICIES, policy=name)
    if "published" in settings:
        own = {field: value for field, value in settings.items() if field != "published"}
        settings = (entry_of(POLICIES[name]).published if settings["published"] else {}) | own
    fields = inspect.signature(POLICIES[name]).parameters
    about: dict[str, Any] = {"name": name, "known": ", ".join(fields)}
    for field in settings:
        if not fields:
            rule = "{name} has no settings; got {field}. Name a policy that has, such as r_kv."
            raise InputError(rule, field=field, code="unknown_name", **about)
        if field not in fields:
            rule, near = "{name} has these settings: {known}; got {got}.{near}", did_you_mean(field, fields)
            raise InputError(rule, field=field, code="unknown_name", got=shown(field), near=near, **about)
    for field, parameter in fields.items():
        if parameter.default is parameter.empty and field not in settings:
            raise InputError("{name} needs {field}=; its settings are: {known}.", field=field, code="missing", **about)
    return POLICIES[name](**settings)


def published(name: str, **settings: Any) -> Policy:
    """The policy of a paper as its authors run it, where the default departs from that; `settings` go before.

    `jkv policies NAME` shows which settings these are. What no setting can change is listed there as a departure.

    Raises:
      ValueError: as `make`.

    >>> published("snap_kv", budget=512)
    snap_kv(budget=512, when='prefill', window=32, pool=5)
    """
    return make(name, {"published": True, **settings})
