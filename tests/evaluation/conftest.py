"""What comparisons run on: a shipped model and a few problems. A file may have others of the same names."""

import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.evaluation import compare as bench
from jkv.evaluation.held_out import held_out


@pytest.fixture(scope="module")
def reasoner():
    return checkpoint.load("tiny-reasoner")


@pytest.fixture(scope="module")
def problems():
    return [bench.Problem(problem.prompt, problem.answer) for problem in held_out(6, seed=3)]
