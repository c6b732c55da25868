"""`jkv calibrate` measures the statistics of a model's queries."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jkv.cli.inputs import LOOKS, check_target, own_traces
from jkv.cli.options import LEARNT_FILE, MODEL, Option, add_options

OPTIONS = (
    MODEL,
    Option("text", str, None, "any plain text; default: the model's own traces of unseen chains", Path),
    Option("problems", int, 100, "how many unseen chains, without --text"),
    Option("tokens", int, 32_768, "of the text, at most"),
    LEARNT_FILE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "calibrate",
        help="measure the statistics of a model's queries",
        description="Measures statistics of a model's queries over plain text, for the policy tri_attention.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Reads or generates the text, measures its queries and saves their statistics."""
    from jkv.analysis.calibration import calibrate
    from jkv.checkpoints import loading as checkpoint
    from jkv.checks import check_counts
    from jkv.text_files import read_text

    check_counts(problems=options.problems, tokens=options.tokens)
    check_target(options.out)
    texts: Any = read_text(options.text) if options.text else None
    model = checkpoint.load(options.model)
    if texts is None:
        texts = [[*prompt, *rest] for prompt, rest in own_traces(model, options.problems)]
    statistics = calibrate(model, texts, options.tokens)
    statistics.save(options.out)
    print(f"wrote {options.out}: {statistics}", file=sys.stderr)
    return 0
