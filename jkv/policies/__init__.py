"""Policies: what a method is made of, and the table of those that are published here (`jkv.policies.table`)."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jkv.checks import did_you_mean
from jkv.policies import table
from jkv.policies.chain import chain
from jkv.policies.evict import Evict
from jkv.policies.needs import Needs
from jkv.policies.policy import Policy, evict_by
from jkv.policies.read import Read
from jkv.policies.recipe import entry_of, recipes_in
from jkv.policies.schedules import AfterPrompt, EachStep, Every, Growing, Threshold
from jkv.policies.table import *  # noqa: F403 -- the recipes
from jkv.policies.view import CacheView

# The full cache comes first: every other policy is compared with it.
POLICIES: dict[str, Callable[..., Policy]] = {"full": table.full} | recipes_in(vars(table))

__all__ = [
    "POLICIES",
    "AfterPrompt",
    "CacheView",
    "EachStep",
    "Every",
    "Evict",
    "Growing",
    "Needs",
    "Policy",
    "Read",
    "Threshold",
    "chain",
    "evict_by",
    "make",
    "published",
    *POLICIES,
]


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
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}.{did_you_mean(name, POLICIES)}")
    if "published" in settings:
        own = {field: value for field, value in settings.items() if field != "published"}
        settings = (entry_of(POLICIES[name]).published if settings["published"] else {}) | own
    fields = inspect.signature(POLICIES[name]).parameters
    if settings and not fields:
        raise ValueError(f"{name} has no settings; got {', '.join(settings)}. Name a policy that has, such as r_kv.")
    known = ", ".join(fields) or "none"
    for field in settings:
        if field not in fields:
            raise ValueError(f"{name} has these settings: {known}; got {field!r}.{did_you_mean(field, fields)}")
    for field, parameter in fields.items():
        if parameter.default is parameter.empty and field not in settings:
            raise ValueError(f"{name} needs {field}=; its settings are: {known}.")
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
