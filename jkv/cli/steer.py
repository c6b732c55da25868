"""`jkv steer` extracts a steering vector."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, check_target, read_prompts
from jkv.cli.options import LEARNT_FILE, MAX_NEW_TOKENS, MODEL, TEMPERATURE, Option, add_options

OPTIONS = (
    MODEL,
    Option("file", str, None, "prompts, as of generate; default: unseen chains", Path),
    Option("problems", int, 100, "how many unseen chains"),
    TEMPERATURE,
    Option("seed", int, None, "of the random draws; default: fresh"),
    MAX_NEW_TOKENS,
    LEARNT_FILE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "steer",
        help="extract a steering vector",
        description="Extracts a steering vector (SEAL) from a model's own traces, for the policies seal and skip_kv.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Generates traces, extracts their vector and saves it."""
    from jkv.analysis.steering_vectors import extract
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts
    from jkv.engine.results import complete
    from jkv.evaluation.held_out import held_out
    from jkv.generate import generate
    from jkv.model.sampling import Sampling

    check_counts(problems=options.problems)
    check_target(options.out)
    sampling = Sampling(options.temperature, seed=options.seed)
    prompts = read_prompts(None, options.file) if options.file else None
    model = checkpoint.load(options.model)
    prompts = prompts or [problem.prompt for problem in held_out(options.problems)]
    out = complete(generate(model, prompts, sampling=sampling, max_new_tokens=options.max_new_tokens))
    completions = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
    vector = extract(model, out.prompts, completions)
    vector.save(options.out)
    kinds = ", ".join(f"{value} {name}" for name, value in vector.about.items() if name in ("check", "switch", "go on"))
    print(f"wrote {options.out}: {vector}, from thoughts: {kinds}", file=sys.stderr)
    return 0
