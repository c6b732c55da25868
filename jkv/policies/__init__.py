"""The table of policies: each name's recipe. A new policy is its own file and one line here."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jkv.policies.ada_kv import ada_kv
from jkv.policies.base import CacheView, Evict, Policy, Read, evict_by
from jkv.policies.chain import chain
from jkv.policies.full import full
from jkv.policies.h2o import h2o
from jkv.policies.mem_share import mem_share
from jkv.policies.pyramid_kv import pyramid_kv
from jkv.policies.quest import quest
from jkv.policies.r_kv import r_kv
from jkv.policies.random import random
from jkv.policies.random_share import random_share
from jkv.policies.reason_cache import reason_cache
from jkv.policies.rpc import rpc
from jkv.policies.schedules import AfterPrompt, EachStep, Every, Growing
from jkv.policies.seal import seal
from jkv.policies.skip_kv import skip_kv
from jkv.policies.snap_kv import snap_kv
from jkv.policies.streaming_llm import streaming_llm
from jkv.policies.tova import tova

POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "ada_kv": ada_kv,
    "h2o": h2o,
    "mem_share": mem_share,
    "pyramid_kv": pyramid_kv,
    "quest": quest,
    "r_kv": r_kv,
    "random": random,
    "random_share": random_share,
    "reason_cache": reason_cache,
    "rpc": rpc,
    "seal": seal,
    "skip_kv": skip_kv,
    "snap_kv": snap_kv,
    "streaming_llm": streaming_llm,
    "tova": tova,
}

__all__ = [
    "POLICIES",
    "AfterPrompt",
    "CacheView",
    "EachStep",
    "Every",
    "Evict",
    "Growing",
    "Policy",
    "Read",
    "ada_kv",
    "chain",
    "evict_by",
    "full",
    "h2o",
    "make",
    "mem_share",
    "pyramid_kv",
    "quest",
    "r_kv",
    "random",
    "random_share",
    "reason_cache",
    "rpc",
    "seal",
    "skip_kv",
    "snap_kv",
    "streaming_llm",
    "tova",
]


def has_budget(name: str) -> bool:
    """Whether a policy takes a budget; an unknown name does, so that `make` can refuse it."""
    return name not in POLICIES or "budget" in inspect.signature(POLICIES[name]).parameters


def needs_no_file(name: str) -> bool:
    """Whether a policy is complete with nothing but a budget."""
    fields = inspect.signature(POLICIES[name]).parameters.values()
    return all(field.name == "budget" or field.default is not field.empty for field in fields)


def make(name: str, settings: Mapping[str, Any]) -> Policy:
    """The policy that a name and its settings, as a user types them, stand for.

    Raises:
      ValueError: an unknown name or setting, a missing one, or one of the wrong type; the known ones are listed.

    >>> make("streaming_llm", {"budget": 64}).budget
    64
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}.")
    fields = inspect.signature(POLICIES[name]).parameters
    known = ", ".join(fields) or "none"
    for field in settings:
        if field not in fields:
            raise ValueError(f"{name} has these settings: {known}; got {field!r}.")
    for field, parameter in fields.items():
        if parameter.default is parameter.empty and field not in settings:
            raise ValueError(f"{name} needs {field}=; its settings are: {known}.")
    return POLICIES[name](**settings)
