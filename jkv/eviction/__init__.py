"""What a policy is made of: a score, a schedule, its needs, and what it does with pages. Those published: `jkv.policies`."""

from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy, evict_by
from jkv.eviction.recipe import chain
from jkv.eviction.schedules import AfterPrompt, EachStep, Every, Growing, Read, Threshold
from jkv.eviction.view import CacheView

__all__ = [
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
]
