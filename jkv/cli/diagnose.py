"""`jkv diagnose` says whose log-probabilities a trainer's function computes."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, read_prompts, sampling_of
from jkv.cli.options import (
    BUDGET,
    DTYPE,
    KV_DTYPE,
    MAX_NEW_TOKENS,
    MODEL,
    POLICY,
    SEED,
    SET,
    VERBOSE,
    Option,
    add_options,
    read_settings,
    sampling_options,
)
from jkv.errors import refused

OPTIONS = (
    MODEL,
    POLICY,
    BUDGET,
    SET,
    *sampling_options(temperature=1.0),
    SEED,
    dataclasses.replace(MAX_NEW_TOKENS, default=128, help="of each sample"),
    Option("n", int, 2, "samples of each prompt"),
    Option("file", str, None, "prompts, one a line; default: two that come with jkv", Path),
    DTYPE,
    KV_DTYPE,
    VERBOSE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "diagnose",
        help="compare a trainer's log-probabilities with the log-probabilities of the draws",
        description="Draws samples, calls a function of yours with the model and the rollout, and says whose log-probabilities "
        "it returns: the ones of the draws, the full cache's, one token late, without the temperature and so on. The exit "
        "status is 0 if they match the draws, else 1.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument("function", help="module:name or file.py:name; function(model, out) returns [N, T] as out.tokens")
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Draws, asks the function, and prints the finding."""
    from jkv.bench.speculate import texts_of
    from jkv.checkpoints.loading import load
    from jkv.generate import generate
    from jkv.model.sampling import Sampling
    from jkv.policies import make
    from jkv.policies.own import described, module_of
    from jkv.rl.diagnosis import diagnose

    drawn = Sampling()
    place, _, attribute = options.function.rpartition(":")
    if not place:
        rule = f"function must be module:name or file.py:name; got {options.function!r}. Name a function(model, out)."
        raise refused(rule, function="invalid")
    function = getattr(module_of(options.function, place, "function"), attribute, None)
    if not callable(function):
        raise refused(f"{place} must have a function {attribute!r}; it has none of this name.", function="unknown_name")
    policy = make(options.policy, read_settings(options.budget, options.set))
    model = load(options.model, dtype=options.dtype)
    out = generate(
        model,
        next(iter(texts_of(model).values()))[:2] if options.file is None else read_prompts(None, options.file),
        policy=policy,
        sampling=sampling_of(options, drawn) or drawn,
        max_new_tokens=options.max_new_tokens,
        n=options.n,
        kv_dtype=options.kv_dtype,
        return_trace=True,
        progress=False,
    )
    try:
        theirs = function(model, out)
    except Exception as error:
        rule = f"{options.function} must return log-probabilities of out.tokens, and it failed: {described(error)}. Correct it."
        raise refused(rule, function="invalid") from error
    found = diagnose(model, out, theirs)
    print(found)
    return 0 if found.is_right else 1
