"""The policies that another policy may build on, as in `ams(around="r_kv")`."""

from collections.abc import Callable
from typing import Any

from jkv.checks import check_known
from jkv.errors import refused
from jkv.eviction.policy import Policy
from jkv.policies.caote import caote
from jkv.policies.cur import cur
from jkv.policies.g_kv import g_kv
from jkv.policies.key_diff import key_diff
from jkv.policies.lag_kv import lag_kv
from jkv.policies.own import fields_of
from jkv.policies.r_kv import r_kv
from jkv.policies.random import random
from jkv.policies.snap_kv import snap_kv

AROUND: dict[str, Callable[..., Policy]] = {
    "caote": caote,
    "cur": cur,
    "g_kv": g_kv,
    "key_diff": key_diff,
    "lag_kv": lag_kv,
    "r_kv": r_kv,
    "random": random,
    "snap_kv": snap_kv,
}


def inner(around: str | Policy, name: str, **settings: int) -> Any:
    """The policy that the policy `name` builds on: `around` itself, or made by its name with every setting that it takes.

    Raises:
      ValueError: an unknown name, or a policy without a score.
    """
    if not isinstance(around, Policy):
        check_known(AROUND, around=around)
        fields = fields_of(AROUND[around])
        return AROUND[around](**{field: value for field, value in settings.items() if field in fields})
    if around.evict is None:
        rule = f"{name} needs a policy with a score as `around`; {around.name} has none. Use another, such as r_kv."
        raise refused(rule, around="unsupported")
    return around
