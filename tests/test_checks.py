"""Values of another type are refused by name, wherever a caller can pass them."""

import subprocess
import sys

import numpy as np
import pytest

import jkv
from jkv.testing import tiny_model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jkv.r_kv(64, interval=16.5), "r_kv's interval must be a whole number; got 16.5"),
        (lambda: jkv.r_kv(64, interval="16"), "r_kv's interval must be a whole number; got '16'"),
        (lambda: jkv.r_kv(True), "r_kv's budget must be a whole number; got True"),
        (lambda: jkv.r_kv(64, exempt=1.5), "r_kv's exempt must be a whole number"),
        (lambda: jkv.r_kv(64, importance="a"), "r_kv's importance must be a number; got 'a'"),
        (lambda: jkv.r_kv(64, released=1), "r_kv's released must be True or False; got 1"),
        (lambda: jkv.streaming_llm(64, sinks=1.5), "streaming_llm's sinks must be a whole number"),
        (lambda: jkv.random(64, seed="x"), "random's seed must be a whole number"),
        (lambda: jkv.h2o(64, recent="half"), "h2o's recent must be a whole number or None; got 'half'"),
        (lambda: jkv.seal(3), "seal's vector must be SteeringVector or Path or a text; got 3"),
        (lambda: jkv.skip_kv(64, keywords=3), "skip_kv's keywords must be"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: jkv.r_kv(buget=64), TypeError, r"r_kv has these settings: budget, .*; got 'buget'. Did you mean budget\?"),
        (lambda: jkv.r_kv(), TypeError, r"r_kv has these settings: budget, .*; got a call with missing .* 'budget'."),
        (lambda: jkv.full(budget=64), TypeError, "full has no settings; got 'budget'."),
        (
            lambda: jkv.generate(tiny_model(), [1], polcy=None),
            TypeError,
            r"'polcy' is no argument .* policy\?.* on_tokens.* page_",
        ),
        (lambda: jkv.generate(tiny_model(), [1], stop=["x"]), TypeError, r"Write stop_strings="),
        (lambda: jkv.Engine(tiny_model(), rows=3), TypeError, r"'rows' is no setting of an engine. The settings are: max_r"),
        (lambda: jkv.generate(tiny_model(), [1], buget=3), TypeError, r"Did you mean budget\?"),
        (lambda: jkv.generate(tiny_model(), [1], budget=3), TypeError, r"Write policy=jkv.r_kv\(budget=...\)"),
        (lambda: jkv.Rollout(tiny_model(), max_new_token=1), TypeError, r"Did you mean max_new_tokens\?"),
        (lambda: jkv.generate(tiny_model(), [1], policy="r_kv"), ValueError, r"got 'r_kv'. Did you mean jkv.r_kv\?"),
    ],
)
def test_a_name_of_nothing_names_the_nearest_or_its_place(call, error, words):
    with pytest.raises(error, match=words):
        call()


SAMPLING = [  # the test run checks types of its own, so these go to a process without it
    ("temperature='0.7'", "temperature must be a number; got '0.7'."),
    ("temperature=1e-37", "temperature must be 0 (greedy) or at least 1e-06; got 1e-37."),
    ("temperature=float('nan')", "temperature must be 0 (greedy) or at least 1e-06; got nan."),
    ("top_k=2.5", "top_k must be a whole number; got 2.5."),
    ("top_k=2**31", "top_k must be 0 or -1 (all tokens) or a number of tokens below 2**31; got 2147483648."),
    ("seed=1.5", "seed must be a whole number or None; got 1.5."),
    ("seed='a'", "seed must be a whole number or None; got 'a'."),
    (
        "seed=np.uint32(7), top_k=np.int32(3)",
        "Sampling(temperature=1.0, top_p=1.0, top_k=3, min_p=0.0, seed=7, repetition_penalty=1.0, presence_penalty=0.0, "
        "frequency_penalty=0.0)",
    ),
]


def test_sampling_takes_numbers_and_names_what_is_none():
    lines = ["import numpy as np", "from jkv.model.sampling import Sampling"]
    for arguments, _ in SAMPLING:
        lines += ["try:", f"    print(Sampling({arguments}))", "except ValueError as error:", "    print(error)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [words for _, words in SAMPLING]


def test_numpys_numbers_are_numbers():
    assert jkv.r_kv(np.int64(64), importance=np.float32(0.5)) == jkv.r_kv(64, importance=0.5)
