"""The pages of the API reference, made of docstrings by mkdocstrings, and the page of the command line, made of its help.

Each public name is in one group; a test compares the groups with the package.
"""

import argparse
import functools
import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from jkv import cli


class Group(NamedTuple):
    """A page of the reference: its title, what it is about, and its names in order."""

    title: str
    about: str
    names: tuple[str, ...]


GROUPS: Mapping[str, Group] = {
    "generate": Group(
        "Generate",
        "From a model and prompts to completions. [Engine](../engine.md) is the guide.",
        (
            "jkv.load",
            "jkv.generate",
            "jkv.Sampling",
            "jkv.Result",
            "jkv.Transcript",
            "jkv.engine.stats.Stats",
            "jkv.engine.stats.SampleStats",
        ),
    ),
    "engine": Group(
        "Engine",
        "The loop behind `jkv.generate`, for requests that come and go. [Engine](../engine.md) is the guide.",
        (
            "jkv.Engine",
            "jkv.Service",
            "jkv.EngineOptions",
            "jkv.ngram",
            "jkv.siblings",
            "jkv.draft_pages",
            "jkv.engine.drafters.Ngram",
            "jkv.engine.drafters.Siblings",
            "jkv.engine.drafters.DraftPages",
            "jkv.engine.drafters.Drafter",
            "jkv.engine.drafters.Proposal",
            "jkv.InputError",
            "jkv.RequestOptions",
            "jkv.forms.json",
            "jkv.forms.regex",
            "jkv.forms.choice",
            "jkv.forms.grammar",
            "jkv.forms.Form",
            "jkv.Event",
            "jkv.engine.stats.RunStats",
            "jkv.engine.service.Ticket",
            "jkv.Replicas",
            "jkv.replicas.waiting.Load",
            "jkv.replicas.options.RayOptions",
        ),
    ),
    "policies": Group(
        "Policies",
        "What a policy is made of. The recipes, such as `jkv.r_kv`, have [pages of their own](../methods.md), and "
        "`jkv.POLICIES` maps each name to its recipe. [A policy of your own](../your-own-policy.md) is the guide.",
        (
            "jkv.evict_by",
            "jkv.published",
            "jkv.chain",
            "jkv.verify",
            "jkv.Policy",
            "jkv.CacheView",
            "jkv.Needs",
            "jkv.eviction.view.Score",
            "jkv.Evict",
            "jkv.Read",
            "jkv.Every",
            "jkv.EachStep",
            "jkv.AfterPrompt",
            "jkv.Threshold",
            "jkv.Growing",
            "jkv.eviction.schedules.Schedule",
            "jkv.eviction.scores.AttentionMass",
            "jkv.eviction.scores.AccumulatedMass",
            "jkv.eviction.scores.Recency",
            "jkv.eviction.scores.Uniform",
            "jkv.Share",
            "jkv.Filter",
            "jkv.reasoning.sentences.Sentences",
            "jkv.Steer",
            "jkv.SteeringVector",
            "jkv.QueryStatistics",
            "jkv.Foresight",
            "jkv.Gate",
        ),
    ),
    "replay": Group(
        "Replay",
        "Which keys each query could read, and the log-probabilities under it. [Replay](../replay.md) is the guide.",
        ("jkv.score", "jkv.replay.score.Scores", "jkv.model.top_tokens.TopTokens", "jkv.Trace"),
    ),
    "rollouts": Group(
        "Rollouts and reinforcement learning",
        "Samples for a trainer, and losses that see the same evictions. [Rollouts](../rollouts.md) is the guide.",
        (
            "jkv.Rollout",
            "jkv.Rollouts",
            "jkv.rl.make_batch",
            "jkv.rl.Batch",
            "jkv.rl.log_probs",
            "jkv.rl.group_advantages",
            "jkv.rl.policy_loss",
            "jkv.rl.correct",
            "jkv.rl.Correction",
            "jkv.rl.diagnose",
            "jkv.rl.Diagnosis",
            "jkv.rl.mismatch",
            "jkv.rl.Mismatch",
            "jkv.rl.Figures",
            "jkv.rl.distillation",
            "jkv.rl.log_probs_at",
            "jkv.rl.kl_divergence",
            "jkv.rl.with_rest",
            "jkv.rl.teacher_advantages",
            "jkv.rl.full_overlap",
            "jkv.rl.FullOverlap",
        ),
    ),
    "models": Group(
        "Models and weights",
        "What `jkv.load` returns, saved weights, and weights on several devices. [Models](../models.md) is the guide.",
        (
            "jkv.Model",
            "jkv.ModelConfig",
            "jkv.Params",
            "jkv.load_adapter",
            "jkv.params_from",
            "jkv.to_maxtext",
            "jkv.save",
            "jkv.restore",
            "jkv.weight_shapes",
            "jkv.quantise_weights",
            "jkv.join_weights",
            "jkv.separate_weights",
            "jkv.shard",
            "jkv.shardings",
            "jkv.split_by_width",
        ),
    ),
    "planning": Group(
        "Planning",
        "What fits a device. `jkv.DEVICES` maps the names of devices to their figures. "
        "[Models](../models.md#what-fits-a-device) is the guide.",
        ("jkv.plan", "jkv.Plan", "jkv.Device", "jkv.planning.estimate.Estimate"),
    ),
    "analysis": Group(
        "Analysis and pictures",
        "How much traces repeat, and pictures for notebooks and files. [Evaluation](../evaluation.md) is the guide.",
        (
            "jkv.choose",
            "jkv.Choice",
            "jkv.compare",
            "jkv.analyze",
            "jkv.calibrate",
            "jkv.recall",
            "jkv.head_losses",
            "jkv.head_budgets",
            "jkv.to_pandas",
            "jkv.Recall",
            "jkv.foresee",
            "jkv.Analysis",
            "jkv.viz.kept",
            "jkv.viz.Kept",
            "jkv.viz.cache_size",
            "jkv.viz.distances",
            "jkv.viz.frontier",
            "jkv.viz.ranking",
            "jkv.viz.learning",
            "jkv.viz.redundancy",
            "jkv.viz.throughput",
        ),
    ),
    "testing": Group(
        "Testing",
        "Small models and views for the tests of a policy or of a loop of your own: `jkv.testing`.",
        (
            "jkv.testing.tiny_model",
            "jkv.testing.TinyTokenizer",
            "jkv.testing.looping_view",
            "jkv.testing.random_view",
            "jkv.testing.random_statistics",
            "jkv.testing.random_networks",
            "jkv.testing.random_gate",
            "jkv.testing.random_calibration",
            "jkv.testing.oracle",
            "jkv.testing.assert_no_pool_copy",
            "jkv.testing.find_copies",
            "jkv.testing.unfolded",
            "jkv.testing.adapted",
        ),
    ),
    "kernels": Group(
        "Kernels",
        "The functions of `pallas_kernels`, each with a reference in plain JAX. [Kernels](../kernels.md) explains how an "
        "implementation is chosen.",
        (
            "pallas_kernels.paged_attention",
            "pallas_kernels.sealed_attention",
            "pallas_kernels.rotate_append",
            "pallas_kernels.add_norm",
            "pallas_kernels.row_product",
            "pallas_kernels.block_product",
            "pallas_kernels.blocks.Blocks",
            "pallas_kernels.row_sum",
            "pallas_kernels.log_softmax",
            "pallas_kernels.largest_slots",
            "pallas_kernels.take_slots",
            "pallas_kernels.attention_mass",
            "pallas_kernels.key_redundancy",
            "pallas_kernels.block_distance",
            "pallas_kernels.replay_attention",
            "pallas_kernels.choice.choose",
            "pallas_kernels.dispatch.Implementation",
        ),
    ),
}


def page_of(name: str) -> str:
    """The Markdown of a group's page; mkdocstrings puts a docstring in place of each name."""
    group = GROUPS[name]
    return "\n\n".join([f"# {group.title}", group.about, *map(directive, group.names)]) + "\n"


def directive(name: str) -> str:
    """What mkdocstrings reads: the place where a name is defined, and the public name as the heading."""
    value = value_of(name)
    lines = [
        f"::: {value.__module__}.{value.__qualname__}",
        "    options:",
        f"      heading: {name}",
        f"      toc_label: {name}",
    ]
    return "\n".join(lines)


def value_of(name: str) -> Any:
    """The object that a dotted name refers to.

    `jkv.generate` is a function and a module; the attribute of the package is the function.
    """
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def command_line_page() -> str:
    """The Markdown of the page of the command line: the help of `jkv` and of each command."""
    parser = cli.make_parser()
    parts = ["# Command line", "`jkv COMMAND --help` prints the same.", "## jkv", help_of(parser)]
    for name, command in cli.commands_of(parser).items():
        parts += [f"## jkv {name}", help_of(command)]
        inner = command._subparsers
        choices: Any = inner._group_actions[0].choices if inner else {}
        for word, one in choices.items():
            parts += [f"### jkv {name} {word}", help_of(one)]
    return "\n\n".join(parts) + "\n"


def help_of(parser: argparse.ArgumentParser) -> str:
    """The help of a parser: its description, then the rest in lines of one width wherever the site is built."""
    about, parser.description = parser.description or "", None
    parser.formatter_class = functools.partial(argparse.RawDescriptionHelpFormatter, width=80)
    return f"{about}\n\n```text\n{parser.format_help().strip()}\n```".strip()
