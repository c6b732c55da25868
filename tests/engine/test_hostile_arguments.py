"""Arguments of any type and size: a ValueError or TypeError within milliseconds, or success; other requests stay right."""

import array
import collections
import decimal
import fractions
import inspect
import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.testing import TinyTokenizer, tiny_model

ROOT = Path(__file__).parents[2]


class Odd:
    """An object that answers nothing."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise KeyError(index)


VALUES = {
    "None": None, "True": True, "NumPy's True": np.True_, "zero": 0, "minus one": -1, "one": 1, "three": 3,
    "2**31": 2**31, "2**32": 2**32, "2**64": 2**64, "-2**64": -(2**64), "10**400": 10**400, "of 5,000 digits": 10**5000,
    "a fraction": 1.5, "NaN": float("nan"), "infinity": float("inf"), "-0.0": -0.0, "denormal": 1e-320,
    "float16": np.float16(3), "int8": np.int8(3), "uint64": np.uint64(2**63), "no dimension": np.array(3),
    "ids": np.array([1, 2]), "ids of JAX": jnp.arange(3), "a table": np.array([[1, 2], [3, 4]]), "floats": np.array([1.5]),
    "texts of NumPy": np.array(["a"]), "no text": "", "a text": "AB", "a surrogate": "\ud800", "null bytes": "\0" * 10,
    "a megabyte of text": "A" * 10**6, "bytes": b"abc", "no list": [], "a list": [1], "lists": [[1], [2]],
    "an empty list in": [[]],
    "mixed": [1, "a"], "mixed, text first": ["a", 1], "a list of None": [None], "a list of True": [True], "a pair": (1, 2),
    "a range": range(3), "a long range": range(10**9), "a longer range": range(10**30), "endless": itertools.count(),
    "an iterator": iter([1]), "a generator": (i for i in [1]), "a table of nothing": {}, "a dict": {1: 2}, "a set": {1, 2},
    "an object": object(), "odd": Odd(), "a class": Odd, "complex": 3 + 4j, "a ratio": fractions.Fraction(1, 3),
    "a decimal": decimal.Decimal(1), "a deque": collections.deque([1, 2]), "an array": array.array("i", [1, 2]),
    "a list of 2**70": [2**70], "a list of -2**70": [-(2**70)], "a list of 5,000 digits": [10**5000], "a list of floats": [1.0],
    "a megabyte of ids": [1] * 10**6, "a list of NaN": [float("nan")], "a function": len, "a recipe": jkv.full,
    "a policy": jkv.full(), "a sampling": jkv.Sampling(), "a view": memoryview(b"ab"), "nothing of NumPy": np.zeros(0),
    "rows of nothing": np.zeros((2, 0), int), "a user's dict": collections.UserDict(a=1), "a large budget": jkv.r_kv(2**31 - 1),
    "a list of policies": [jkv.full()], "itself": [],
}  # fmt: skip
VALUES["itself"].append(VALUES["itself"])
SUBMIT = ("prompt", "policy", "sampling", "max_new_tokens", "n", "stop_ids", "stop_strings", "first_sample", "request")
OPTIONS = (
    "max_running", "max_slots", "page_size", "kv_memory", "num_pages", "policies", "chunk", "order", "max_stop_ids",
    "return_trace", "mesh", "prefix_cache", "poison",
)  # fmt: skip
CANARY = {"prompt": [1, 2, 3], "max_new_tokens": 6, "stop_ids": ()}


@pytest.fixture(scope="module")
def reasoner():
    return tiny_model(tokenizer=TinyTokenizer())


@pytest.fixture(scope="module")
def engine(reasoner):
    """An engine with the memory of two rows; a canary, its tokens, is the first thing that it made."""
    engine = jkv.Engine(reasoner, max_running=2, max_slots=64, page_size=4)
    ticket = engine.submit(**CANARY)
    engine.run()
    engine.canary = engine.result(ticket).tokens.tolist()
    return engine


def refuses_or_takes(call, seconds=1.0):
    """Whether the call succeeds; it takes less than a second, and raises what a caller can read or nothing."""
    start, taken = time.process_time(), True
    try:
        call()
    except (ValueError, TypeError) as error:
        taken, words = False, str(error)
    assert time.process_time() - start < seconds
    assert taken or 10 < len(words) < 1_000, words
    return taken


@pytest.mark.parametrize("name", SUBMIT)
def test_a_request_of_any_argument_is_refused_or_runs_and_others_stay_right(engine, name):
    canary = engine.submit(**CANARY)
    taken = 0
    for value in VALUES.values():
        settings = {"prompt": [1, 2], "max_new_tokens": 3} | {name: value}

        def submit(settings=settings):
            engine.cancel(engine.submit(**settings))

        taken += refuses_or_takes(submit)
    assert 0 < taken < len(VALUES)  # some are right
    engine.run()
    assert engine.result(canary).tokens.tolist() == engine.canary
    for ticket in list(engine.tickets):
        engine.result(ticket)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_setting_of_an_engine_is_refused_or_kept(name):
    for value in VALUES.values():
        refuses_or_takes(lambda value=value: jkv.EngineOptions(**{name: value}))


def try_settings(make, names, base):
    """Gives each named setting every value."""
    for name, value in itertools.product(names, VALUES.values()):
        refuses_or_takes(lambda name=name, value=value: make(**base | {name: value}))


def test_a_setting_of_sampling_or_a_policy_is_refused_or_kept():
    """In a process without the type checks of the test run, which would refuse it before."""
    code = """
import inspect, jkv
from tests.engine.test_hostile_arguments import try_settings
try_settings(jkv.Sampling, jkv.model.sampling.SAMPLING_FIELDS, {})
for recipe in jkv.POLICIES.values():
    names = inspect.signature(recipe).parameters
    try_settings(recipe, names, {"budget": 64} if "budget" in names else {})
print("all")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "all\n", done.stderr


@pytest.mark.parametrize("name", VALUES)
def test_a_prompt_or_model_of_any_kind_is_refused_or_runs(reasoner, name, monkeypatch):
    def stop(*args):
        raise ValueError("This would run.")

    monkeypatch.setattr(inspect.getmodule(jkv.generate), "engine_for", stop)
    for prompt in (VALUES[name], [VALUES[name], [1, 2]]):
        assert not refuses_or_takes(lambda prompt=prompt: jkv.generate(reasoner, prompt))
    assert not refuses_or_takes(lambda: jkv.generate(VALUES[name], [1, 2]))


LIMITS = [
    ({"n": 2**64}, r"131,072 samples.*got 1 times 18446744073709551616. Split"),
    ({"n": 10**5000}, "a whole number of 16610 bits"),
    ({"n": 2**17, "prompt": [[1], [2]]}, "got 2 times 131072"),
    ({"n": None}, "n must be a whole number; got None"),
    ({"n": "3"}, "n must be a whole number; got '3'"),
    ({"prompt": range(10**9)}, "2048 positions|4096 positions"),
    ({"prompt": range(10**30)}, "positions"),
    ({"prompt": itertools.count()}, r"sequence of token ids; got count\(0\)"),
    ({"prompt": b"abc"}, "got b'abc'"),
    ({"prompt": [[1], itertools.count()]}, r"prompt 1 is count\(0\)"),
    ({"prompt": "A" * (1 << 21)}, "has 2,097,152 characters. Shorten"),
    ({"prompt": "A\ud800"}, r"lone surrogate '\\ud800' at 1. Remove"),
    ({"prompt": [2**70]}, r"Token ids must lie in \[0, 32\); prompt 0 holds a?1180591620717411303424"),
    ({"prompt": [True, False]}, "prompt 0 is bool"),
    ({"prompt": {"input_ids": [1]}}, "got {'input_ids': "),
    ({"stop_ids": range(10**9)}, "stop_ids must be at most 32 token ids; got 1,000,000,000"),
    ({"stop_ids": range(10**30)}, "at most 32 token ids"),
    ({"stop_ids": itertools.count()}, "must be a list of token ids"),
    ({"stop_ids": "abc"}, "must be a list of token ids; got 'abc'"),
    ({"stop_ids": [True]}, r"got \[True\]"),
    ({"stop_ids": [2**70]}, "got 1180591620717411303424"),
    ({"stop_strings": ["x"] * 1001}, "at most 1,000 texts; got 1,001"),
    ({"stop_strings": ["x" * 1001]}, "at most 1,000 characters each; got a text of 1,001"),
    ({"stop_strings": "abc"}, "sequence of texts"),
    ({"policy": range(10**9)}, "got 1000000000 for 1 prompts"),
    ({"max_new_tokens": 2**70}, "max_new_tokens is 1180591620717411303424"),
    ({"max_running": 2**40}, "max_running must be at most 65,536; got 1099511627776. Lower"),
    ({"page_size": 2**40}, "page_size must be at most 65,536"),
    ({"num_pages": 2**40}, "num_pages must be at most 2,147,483,647"),
    ({"kv_memory": -1}, "kv_memory must be at least 1"),
    ({"kv_memory": "all"}, "kv_memory must be a number of bytes, .*; got 'all'"),
    ({"policy": jkv.r_kv(2**31 - 1, window=2**31 - 1)}, "window must not exceed the model's 4096 positions"),
    ({"max_running": 65536, "page_size": 1, "max_new_tokens": 4000}, "Page tables must fit|must fit the device"),
]


@pytest.mark.parametrize(("settings", "words"), LIMITS, ids=[str(words)[:40] for _, words in LIMITS])
def test_an_absurd_size_is_refused_at_once_with_the_rule_and_the_value(reasoner, settings, words):
    settings = {"prompt": [1, 2], "progress": False} | settings
    start = time.process_time()
    with pytest.raises(ValueError, match=words) as raised:
        jkv.generate(reasoner, settings.pop("prompt"), **settings)
    assert time.process_time() - start < 0.5
    assert len(str(raised.value)) < 600


def test_numbers_of_numpy_are_counted_like_pythons(reasoner):
    options = jkv.EngineOptions(max_running=np.int8(2), page_size=np.int8(64), kv_memory=np.int64(1 << 20))
    assert [type(getattr(options, name)) for name in ("max_running", "page_size", "kv_memory")] == [int] * 3
    out = jkv.generate(reasoner, [1, 2, 3], n=np.int8(2), max_new_tokens=np.int8(4), stop_ids=np.array([3]), progress=False)
    assert out.tokens.shape[0] == 2


@pytest.mark.parametrize(("seed", "rounds"), [(0, 2), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in range(10))])
def test_random_calls_leave_canaries_right(engine, seed, rounds):
    draw = random.Random(seed)
    values = list(VALUES.values())
    policies = [jkv.full(), jkv.r_kv(16, interval=8, window=2), jkv.streaming_llm(12, interval=8)]
    for _ in range(rounds):
        canaries = [engine.submit(**CANARY) for _ in range(2)]
        for _ in range(draw.randint(1, 200)):
            settings = {"prompt": [1, 2], "max_new_tokens": draw.randint(1, 9), "policy": draw.choice(policies)}
            for name in draw.sample(SUBMIT, draw.randint(1, 3)):
                settings[name] = draw.choice(values)

            def submit(settings=settings):
                ticket = engine.submit(**settings)
                if len(engine.tickets[ticket]) > 4 or draw.random() < 0.5:
                    engine.cancel(ticket)

            refuses_or_takes(submit)
            if draw.random() < 0.1:
                engine.step()
        engine.run()
        assert all(engine.result(ticket).tokens.tolist() == engine.canary for ticket in canaries)
        for ticket in list(engine.tickets):
            engine.result(ticket)
