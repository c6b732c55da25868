"""Reasoning models with a compressed, paged KV cache, in JAX.

    model = jkv.load("tiny-reasoner")
    out = jkv.generate(model, "b=3;c=7;d=b*c;?d", policy=jkv.lag_kv(budget=96))

Shapes are written in one alphabet everywhere (that of `jax.nn.dot_product_attention`, extended):

    B batch rows    T new tokens   S cache slots   M slots kept    W remembered queries
    N query heads   K KV heads     G = N // K      H head size     P pages (MP: of one row)
    D model width   F MLP width    V vocabulary    L layers        R rows of a program (or B*K)
    X experts       A experts that a token goes through

A slot is an index in the cache, a position an index in the sequence, a token a vocabulary id, a page a block of slots. A step
is one decode step; a thought is a step of reasoning, the text between blank lines.
"""

import pallas_kernels

if not hasattr(pallas_kernels, "KERNELS"):
    raise ImportError(
        f"jkv needs its own package pallas_kernels; another of that name comes first: {pallas_kernels.__path__}. Remove it "
        "from the path, or install jkv-cache in an environment of its own."
    )

from jkv import forms, rl, testing, viz
from jkv.analysis.analysis import Analysis, analyze
from jkv.analysis.calibration import calibrate
from jkv.analysis.foresee import foresee
from jkv.analysis.head_losses import head_budgets, head_losses
from jkv.analysis.recall import Recall, recall
from jkv.checkpoints.adapters import load_adapter
from jkv.checkpoints.loading import load
from jkv.checkpoints.saved_weights import restore, save
from jkv.checkpoints.state_dicts import params_from
from jkv.checkpoints.to_maxtext import to_maxtext
from jkv.engine.drafters import draft_pages, ngram, siblings
from jkv.engine.engine import Engine
from jkv.engine.kept_rows import Transcript
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import Event
from jkv.engine.requests import RequestOptions
from jkv.engine.results import Result
from jkv.engine.service import Service
from jkv.errors import InputError
from jkv.evaluation.choose import Choice, choose
from jkv.evaluation.compare import compare
from jkv.eviction import (
    AfterPrompt,
    CacheView,
    EachStep,
    Every,
    Evict,
    Growing,
    Needs,
    Policy,
    Read,
    Threshold,
    chain,
    evict_by,
)
from jkv.eviction.calibration import QueryStatistics
from jkv.eviction.gate import Gate
from jkv.generate import generate
from jkv.model.eight_bits import quantise_weights
from jkv.model.joined import join_weights, separate_weights
from jkv.model.params import Model, ModelConfig, Params
from jkv.model.sampling import Sampling
from jkv.model.sharding import shard, shardings, split_by_width
from jkv.model.weight_shapes import weight_shapes
from jkv.planning.devices import DEVICES, Device
from jkv.planning.plan import Plan, plan
from jkv.policies import POLICIES, published
from jkv.policies.foresight import Foresight
from jkv.policies.table import *  # noqa: F403 -- the recipes, `jkv.r_kv` and so on
from jkv.reasoning.sharing import Share
from jkv.reasoning.steering import Steer, SteeringVector
from jkv.reasoning.thoughts import Filter
from jkv.replay.score import Trace, score
from jkv.replicas import Replicas
from jkv.rollout import Rollout, Rollouts
from jkv.tidy import to_pandas
from jkv.verify import verify

__version__ = "0.1.0"

__all__ = [
    "DEVICES",
    "POLICIES",
    "AfterPrompt",
    "Analysis",
    "CacheView",
    "Choice",
    "Device",
    "EachStep",
    "Engine",
    "EngineOptions",
    "Event",
    "Every",
    "Evict",
    "Growing",
    "InputError",
    "Model",
    "ModelConfig",
    "Needs",
    "Params",
    "Plan",
    "Policy",
    "Filter",
    "Foresight",
    "Gate",
    "QueryStatistics",
    "Recall",
    "Read",
    "Replicas",
    "RequestOptions",
    "Result",
    "Rollout",
    "Rollouts",
    "Sampling",
    "Service",
    "Share",
    "Steer",
    "SteeringVector",
    "Threshold",
    "Trace",
    "Transcript",
    "analyze",
    "calibrate",
    "foresee",
    "recall",
    "chain",
    "choose",
    "compare",
    "draft_pages",
    "evict_by",
    "forms",
    "generate",
    "head_budgets",
    "head_losses",
    "join_weights",
    "load",
    "load_adapter",
    "ngram",
    "params_from",
    "plan",
    "published",
    "quantise_weights",
    "restore",
    "rl",
    "save",
    "score",
    "separate_weights",
    "shard",
    "shardings",
    "siblings",
    "split_by_width",
    "testing",
    "to_maxtext",
    "to_pandas",
    "verify",
    "viz",
    "weight_shapes",
    *POLICIES,
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
