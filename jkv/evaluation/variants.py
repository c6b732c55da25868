"""The policies of a comparison by name; a name may be a variant's, a policy with other settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jkv.cache.slot_size import SlotSize
from jkv.checks import check_list, shown
from jkv.errors import refused
from jkv.evaluation.budgets import Budget
from jkv.evaluation.oracles import ORACLE
from jkv.eviction import Policy
from jkv.eviction.byte_budget import in_slots, parse_bytes
from jkv.policies import Recipe, has_budget, has_setting, make, name_of


def by_name(
    policies: Sequence[Recipe], settings: Mapping[str, dict[str, Any]] | None
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The names of policies, and their settings with each policy, or function that returns one, as a variant of its name.

    Raises:
      ValueError: something else, or two policies of one name.
    """
    names, known, policies = [], dict(settings or {}), check_list("policies", policies)
    for recipe in policies:
        name = name_of(recipe)
        if not isinstance(recipe, str):
            if not callable(recipe) and not isinstance(recipe, Policy):
                rule = f"A policy is a name, a jkv.Policy, or a function that returns one; got {shown(recipe)}."
                raise refused(rule, policies="wrong_type")
            if name in policies or name in names or name in ("full", ORACLE) or "policy" in known.get(name, {}):
                raise refused(
                    f"Each policy of a comparison needs a name of its own; {name} is taken. Name it: "
                    f'settings={{"mine": {{"policy": ...}}}} with policies=["mine"].',
                    policies="conflict",
                )
            known[name] = known.get(name, {}) | {"policy": recipe}
        names.append(name)
    return names, known


def build(name: str, slots: int | None, settings: dict[str, dict[str, Any]], seed: int | None = None) -> Policy:
    """The policy, or the variant of one, by its name. `slots` are for one that is given a budget (`takes_budget`)."""
    recipe, chosen = settings_of(name, settings)
    budget = {} if slots is None or not takes_budget(name, settings) else {"budget": slots}
    policy = make(recipe, budget | chosen | ({} if seed is None else {"seed": seed}))
    return dataclasses.replace(policy, name=name)


def takes_budget(name: str, settings: dict[str, dict[str, Any]]) -> bool:
    """Whether a policy or variant is given budgets: not if it has none, or if its settings are complete without one."""
    if not has_budget(settings_of(name, settings)[0]):
        return False
    try:
        build(name, None, settings)
    except ValueError:
        return True
    return False


def settings_of(name: str, settings: dict[str, dict[str, Any]]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe of a policy or variant, by its name or as it is, and its settings."""
    own = settings.get(name, {})
    recipe = own.get("policy", name)
    return recipe, {
        field: value for field, value in (settings.get(recipe, {}) | own).items() if field not in ("policy", "kv_dtype")
    }


def seeds_of(name: str, settings: dict[str, dict[str, Any]], count: int) -> list[int | None]:
    """The seeds that a policy runs with; `[None]` where it draws nothing, or one seed is enough."""
    recipe, chosen = settings_of(name, settings)
    if count == 1 or recipe == ORACLE or not has_setting(recipe, "seed"):
        return [None]
    return [chosen.get("seed", 0) + i for i in range(count)]


def kv_dtype_of(name: str, settings: dict[str, dict[str, Any]], options: dict[str, Any]) -> str | None:
    """The format in which a policy or variant keeps its pages: its own, or the engine's."""
    return settings.get(name, {}).get("kv_dtype", options.get("kv_dtype"))


def size_in_slots(name: str, size: Budget, slot: SlotSize, settings: dict[str, dict[str, Any]]) -> Budget:
    """A budget with the slots that its bytes hold; one without bytes as it is.

    Raises:
      ValueError: fewer slots than the policy takes, with the arithmetic.
    """
    if size.num_bytes is None:
        return size
    if name == ORACLE:
        return dataclasses.replace(size, slots=parse_bytes(size.num_bytes) // slot.whole)
    recipe, chosen = settings_of(name, settings)
    return dataclasses.replace(size, slots=in_slots(make(recipe, {"budget": size.num_bytes} | chosen), slot).budget)
