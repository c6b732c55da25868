"""The counting task: problems are right, traces redundant and of the promised lengths, batches what training needs."""

import re

import jax
import numpy as np
import pytest

from jkv.evaluation import chains
from jkv.evaluation.chains import Problem, draw_problem, num_doubts, read_answer, write_trace
from jkv.model.params import ModelConfig
from research.tasks import batches, train, vocabulary


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.make_tokenizer()


def draw_many(count, seed=0):
    rng = np.random.default_rng(seed)
    return [draw_problem(rng) for _ in range(count)]


def test_a_problem_reads_and_computes_as_written():
    problem = Problem((("b", "3"), ("c", "7"), ("d", "*", "b", "c"), ("e", "-", "b", "d")), "d")
    assert problem.prompt == "b=3;c=7;d=b*c;e=b-d;?d"
    assert problem.values == {"b": 3, "c": 7, "d": 1, "e": 2}
    assert problem.answer == "d=1"


def test_a_trace_goes_through_all_definitions_ends_with_the_asked_one_and_verifies_itself():
    problem = Problem((("b", "3"), ("c", "7"), ("d", "*", "b", "c"), ("e", "-", "b", "d")), "d")
    assert write_trace(problem, 2).split("\n\n") == [
        "<think>",
        "b=3",
        "c=7",
        "d=b*c b=3 c=7 3*7=1 d=1",
        "e=b-d b=3 d=1 3-1=2 e=2",
        "d=1",
        "Wait",
        "b=3",
        "c=7",
        "d=b*c b=3 c=7 d=1",
        "e=b-d b=3 d=1 e=2",
        "d=1",
        "Alternatively",
        "b=3",
        "c=7",
        "d=b*c b=3 c=7 d=1",
        "e=b-d b=3 d=1 e=2",
        "d=1",
        "</think>",
        r"\boxed{d=1}",
    ]


def test_every_step_of_every_trace_is_true_by_python():
    for problem in draw_many(200):
        assert 3 <= len(problem.definitions) <= 14
        known = {}
        for name, *body in problem.definitions:
            known[name] = int(body[0]) if len(body) == 1 else eval(f"({known[body[1]]}{body[0]}{known[body[2]]}) % 10")
        text = write_trace(problem, num_doubts(problem))
        for step in text.split("\n\n"):
            for stated in step.split(" "):
                if re.fullmatch("[a-z]=[0-9]", stated):
                    assert known[stated[0]] == int(stated[2])
        assert read_answer(text) == problem.answer == f"{problem.asked}={known[problem.asked]}"


def test_traces_have_100_to_1000_tokens_and_half_of_them_over_300(tokenizer):
    rng = np.random.default_rng(1)
    lengths = [len(tokenizer.encode(write_trace(p, num_doubts(p, rng)))) for p in draw_many(1000)]
    assert min(lengths) >= 100
    assert max(lengths) <= 1000
    assert np.mean(np.array(lengths) > 300) > 0.5
    passes = [num_doubts(p, rng) for p in draw_many(1000)]
    assert set(passes) == {0, 1, 2, 3, 4}


def test_the_tokenizer_gives_back_what_it_took(tokenizer):
    for problem in draw_many(20):
        text = problem.prompt + write_trace(problem, 4)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert len(tokenizer) == vocabulary.SIZE


def test_a_batch_is_packed_and_masks_the_prompts(tokenizer):
    stage = batches.Stage(steps=1, rows=2, length=256, low=3, high=5)
    batch = batches.make_batch(tokenizer, stage, (0, 0))
    assert all(field.shape == (2, 257) for field in batch.values())
    again = batches.make_batch(tokenizer, stage, (0, 0))
    assert all((batch[name] == again[name]).all() for name in batch)
    first = batch["segment"][0] == 0
    text = tokenizer.decode(batch["token"][0][first])
    prompt = text.partition("<think>")[0]
    asked = len(tokenizer.encode(prompt))
    assert batch["is_target"][0][first].tolist() == [0] * asked + [1] * (first.sum() - asked)
    assert batch["position"][0][first].tolist() == list(range(first.sum()))


def test_a_drill_asks_for_what_can_be_known_and_nothing_else(tokenizer):
    given, asked = chains.draw_values(np.random.default_rng(0))
    values = dict(pair.split("=") for pair in given.strip(";").split(";"))
    assert all(values[pair[0]] == pair[2] for pair in asked.split())
    ids = tokenizer.encode(asked)
    learnt = [
        tokenizer.decode([i])
        for i, is_target in zip(ids, batches.drill_targets(tokenizer, ids, "values"), strict=True)
        if is_target
    ]
    assert "".join(learnt) == "".join(pair[2] for pair in asked.split())

    given, asked = chains.draw_steps(np.random.default_rng(0))
    ids = tokenizer.encode(asked)
    learnt = [
        tokenizer.decode([i])
        for i, is_target in zip(ids, batches.drill_targets(tokenizer, ids, "steps"), strict=True)
        if is_target
    ]
    steps = asked.strip().split("\n\n")
    assert len(learnt) == 8 * len(steps)
    for i, step in enumerate(steps):
        formula, total, result = step.split(" ")[0], step.split(" ")[3], step.split(" ")[4]
        assert formula in given.split(";")
        assert "".join(learnt[8 * i : 8 * i + 8]) == formula[2:] + total.replace("=", "") + result[2:]


def test_training_resumes_where_it_stopped_as_if_unbroken(tmp_path):
    model = ModelConfig("qwen2", 96, 16, 1, 2, 1, 8, 16, 256, qkv_bias=True, tie_embeddings=True)
    stage = {"rows": 2, "length": 64, "low": 3, "high": 3}

    def config(steps):
        stages = (batches.Stage(steps=steps, **stage),)
        return train.TrainConfig("", 0, ((0, 0.0), (2, 1e-2)), 0.1, checkpoint_every=3, stages=stages)

    with jax.numpy_dtype_promotion("standard"):  # optax is not written for strict promotion
        unbroken = train.train(config(6), model, tmp_path / "a")
        train.train(config(3), model, tmp_path / "b")
        resumed = train.train(config(6), model, tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, unbroken, resumed)


def test_an_answer_is_read_after_the_thinking_only():
    assert read_answer(r"<think> \boxed{3} </think> \boxed{4}") == "4"
    assert read_answer("<think> 5 </think>") is None
    assert chains.read_answer("") is None
