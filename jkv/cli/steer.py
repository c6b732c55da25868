"""`jkv steer` extracts a steering vector."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, check_target, read_prompts


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "steer",
        help="extract a steering vector",
        description="Extracts a steering vector (SEAL) from a model's own traces, for the policies seal and skip_kv.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--model", default="tiny-reasoner", help="a shipped model, a checkpoint folder, a GGUF file, or a hub name"
    )
    command.add_argument("--file", type=Path, help="prompts, as of generate; default: unseen chains")
    command.add_argument("--problems", type=int, default=100, help="how many unseen chains; default: 100")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--seed", type=int, help="of the random draws; default: fresh")
    command.add_argument("--max-new-tokens", type=int, help="default: what the model's positions leave, up to 32768")
    command.add_argument("--out", type=Path, required=True, help="the safetensors file to write")


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
