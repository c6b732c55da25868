"""Several policies on one cache, each by its own part."""

import dataclasses
from typing import Any

from jkv.policies.base import Policy


def chain(*policies: Any) -> Policy:
    """One policy with the parts of all: `chain(reason_cache(), r_kv(budget=1024))` shares, then evicts.

    Pages are shared as long as none of their row was compacted; eviction then sees how many each slot stands for.

    Raises:
      ValueError: two policies have the same part, or parts that exclude each other.

    >>> from jkv.policies import r_kv, seal, reason_cache
    >>> chain(reason_cache(), r_kv(budget=64)).name
    'reason_cache+r_kv'
    """
    if not policies or not all(isinstance(policy, Policy) for policy in policies):
        raise ValueError(f"chain takes policies, such as jkv.reason_cache() and jkv.r_kv(budget=1024); got {policies!r}.")
    fields: dict[str, Any] = {}
    for policy in policies:
        for field in dataclasses.fields(Policy):
            value = getattr(policy, field.name)
            if field.name == "name" or value == field.default:
                continue
            if field.name in fields:
                raise ValueError(f"chain takes one policy for each part; {field.name!r} is in two: {policies!r}.")
            fields[field.name] = value
    return Policy("+".join(policy.name for policy in policies), **fields)
