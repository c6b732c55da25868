"""Problems that no training saw, of the task of a tiny model; `python -m research.tasks.problems` writes them as a data set.

python -m research.tasks.problems --model research/assets/tiny-reasoner-2 --problems 200 --out trails.jsonl
jkv eval configs/experiments/tiny-2.toml --dataset trails.jsonl --out results
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints.loading import load_tokenizer
from jkv.evaluation.chains import Problem
from jkv.evaluation.held_out import HELD_OUT_SEED, held_out
from jkv.limits import parse
from jkv.reports import write_text
from research.tasks import trail_vocabulary
from research.tasks.trails import Trail, draw_trail

GATE_SEED = 4_000_037  # of problems that say whether a model can judge policies


def problems_of(tokenizer: Any, count: int, seed: int = HELD_OUT_SEED) -> Sequence[Problem | Trail]:
    """Trails for a tokenizer of trails, else chains."""
    if not trail_vocabulary.is_own(tokenizer):
        return held_out(count, seed)
    rng = np.random.default_rng(seed)
    return [draw_trail(rng) for _ in range(count)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose task: tiny-reasoner, or a folder")
    parser.add_argument("--problems", type=int, default=200, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="(default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a file of lines of JSON")
    options = parse(parser)
    problems = problems_of(load_tokenizer(options.model), options.problems, options.seed)
    write_text(options.out, "".join(json.dumps({"prompt": one.prompt, "answer": one.answer}) + "\n" for one in problems))


if __name__ == "__main__":
    main()
