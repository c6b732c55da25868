"""Samples for a trainer: groups of completions, conversations, and what several threads ask for in one batch."""

from jkv.rollout.conversing import ReplyError as ReplyError
from jkv.rollout.conversing import Turn as Turn
from jkv.rollout.results import Rollouts as Rollouts
from jkv.rollout.rollout import DEFAULT_NEW_TOKENS as DEFAULT_NEW_TOKENS
from jkv.rollout.rollout import Rollout as Rollout
from jkv.rollout.session import SampleOptions as SampleOptions
from jkv.rollout.session import Session as Session
