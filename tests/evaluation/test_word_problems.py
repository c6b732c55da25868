"""Word problems: their text, their answers, and what is learnt of them."""

import re

import numpy as np
import pytest

from jkv.evaluation.graders import grader_of
from jkv.evaluation.word_problems import WordProblem, draw_word_problem, write_solution, write_trace
from research.tasks.batches import Stage, make_batch

ANN = WordProblem(("Ann", "Ben"), "books", 12, [5])


class Characters:
    """Each character is a token, 1 the last."""

    eos_token_id = 1

    def encode(self, text, add_special_tokens=True):
        return [ord(character) for character in text]


def test_a_problem_is_solved_and_verified_in_other_words():
    assert ANN.prompt == (
        "Ann has 12 books. Ben has 5 more than Ann. How many books does Ben have?\n\nLet us go step by step.\n"
    )
    assert write_trace(ANN, 1) == (
        "Ann has 12 books.\nBen has 12 + 5 = 17 books.\n\n"
        "Wait, let me verify this.\nAnn has 12 books.\nAdding 5 to what Ann has, 12, gives Ben 17 books.\n"
        "So Ben has 17 books.\n\\boxed{17}"
    )


def test_the_numbers_of_the_last_pass_and_of_the_answer_are_marked():
    assert re.findall("< ?([^>]*)>", write_solution(ANN, 1)) == ["12", "5", "12", "17", "17"]


@pytest.mark.parametrize("passes", [0, 1, 2, 4])
def test_traces_are_right_by_the_grader_and_by_their_own_sums(passes):
    problem = draw_word_problem(np.random.default_rng(passes), 6)
    trace = write_trace(problem, passes)
    assert grader_of("boxed")(trace, problem.answer)
    assert trace.count("\n\n") == passes
    for first, second, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", trace):
        assert int(first) + int(second) == int(total)


def test_batches_hold_traces_of_which_prompts_are_no_targets():
    batch = make_batch(Characters(), Stage(0, 2, 700, 2, 3, passes=(0, 1)), (0, 0), "words")
    text = "".join(map(chr, batch["token"][0]))
    learnt = "".join(chr(token) for token, is_target in zip(batch["token"][0], batch["is_target"][0], strict=True) if is_target)
    assert "How many" in text
    assert "How many" not in learnt
    assert "\\boxed{" in learnt
    assert "\1" in learnt
