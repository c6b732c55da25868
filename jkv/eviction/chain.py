"""Several policies on one cache: one policy with the parts of all."""

import dataclasses
from typing import Any

from jkv.eviction.byte_budget import ByteBudget
from jkv.eviction.policy import Policy, noted


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
        raise ValueError(f"chain takes policies with budgets in slots; got {policies!r}. Give slots, such as budget=1024.")
    if not policies or not all(isinstance(policy, Policy) for policy in policies):
        raise ValueError(f"chain takes policies, such as jkv.reason_cache() and jkv.r_kv(budget=1024); got {policies!r}.")
    fields: dict[str, Any] = {}
    for policy in policies:
        for field in dataclasses.fields(Policy):
            value = getattr(policy, field.name)
            if field.name == "name" or not field.init or value == field.default:
                continue
            if field.name in fields:
                raise ValueError(f"chain takes one policy for each part; two have {field.name!r}: {policies!r}.")
            fields[field.name] = value
    return noted(Policy("+".join(policy.name for policy in policies), **fields), "chain", policies, {})
