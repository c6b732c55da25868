"""Every golden checkpoint through the engine: a batch, replay under policies, and quantised pages.

`test_decoder.py` compares their logits with transformers; `tests/support/eight_devices_golden.py` runs them on a mesh.
`tests/support/model_table.py` makes the table of `docs/models.md` of these tests.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.policies import POLICIES
from tests.model.test_decoder import CASES, GOLDEN
from tests.support.mixes import LOOSE, BreakingTokenizer
from tests.support.policies import build
from tests.support.sweeps import in_turn

NAMES = (*POLICIES, "moved-sinks")
SHARES = "reason_cache", "mem_share", "random_share"
SETTINGS = {
    "max_new_tokens": 32,
    "page_size": 4,
    "chunk": 8,
    "stop_ids": (),
    "progress": False,
    "return_trace": True,
    "poison": True,
}
FORMATS = "int8", "fp8"
OFTEN = "gpt_oss", "qwen3_5"  # each with some of the policies, every day
APART = "gemma4_sharing", "gpt_oss", "phi3_longrope", "qwen3_5"  # with another kind of layers or heads each


def policy_of(name, model):
    """A policy that acts several times on texts of these lengths."""
    if name == "moved-sinks":
        return jkv.streaming_llm(budget=16, sinks=4, interval=8, positions="cache")
    sharing = LOOSE | {"include_prompt": True, "like": jkv.reason_cache(**LOOSE)} if name in SHARES else {}
    return build(name, model, **{"budget": 16, "interval": 8, "protect_prompt": False} | sharing)


class WideTokenizer(BreakingTokenizer):
    """Pieces for as many tokens as the checkpoints have."""

    pieces = BreakingTokenizer.pieces * 3


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    """A checkpoint's model, and the prompt that transformers read."""
    model = dataclasses.replace(jkv.load(str(GOLDEN / request.param), dtype=jnp.float32), tokenizer=WideTokenizer())
    return model, np.load(GOLDEN / request.param / "reference.npz")["prompt"].tolist()


def run(model, prompts, name, **settings):
    return jkv.generate(model, prompts, policy=policy_of(name, model), sampling=jkv.Sampling(seed=1), **SETTINGS | settings)


def apart(model, out):
    """How far replay is from the log-probabilities of the engine, for each token."""
    return np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs)


@pytest.mark.tested("batch and replay", value="name")
@pytest.mark.everyday
@pytest.mark.everyday(where=lambda golden, name: golden in OFTEN and in_turn(CASES, golden, NAMES, name))
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_each_by_itself_and_replay_gives_their_log_probabilities(golden, name):
    model, prompt = golden
    prompts = [prompt, prompt[:3], prompt[5:16]]
    out = run(model, prompts, name, max_running=2)
    difference = apart(model, out)
    # Of Qwen3.5 with experts, weights changed by 1e-7 of themselves move one token by 2e-4.
    is_unsteady = model.config.delta_net is not None and model.config.num_experts > 0
    assert np.percentile(difference, 95) <= (2e-5 if is_unsteady else 1e-5)  # of so few tokens, the 99th is the largest
    assert difference.max() <= (3e-4 if is_unsteady else 1e-4)
    alone = run(model, prompts[:1], name, max_running=2)
    np.testing.assert_array_equal(out.tokens[0], alone.tokens[0])


@pytest.mark.tested("quantised pages", value="kv_dtype")
@pytest.mark.everyday(where=lambda golden, kv_dtype: golden in APART and kv_dtype == "int8")
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_quantised_pages_are_replayed(golden, kv_dtype):
    model, prompt = golden
    out = run(model, [prompt[first:] for first in range(3)], "r_kv", kv_dtype=kv_dtype)
    replayed = apart(model, out)
    # A number at the border of two codes may get the other one, which moves all later tokens of its row.
    assert np.percentile(replayed, 50) <= 1e-5
    assert np.percentile(replayed, 90) <= 1e-3
    plain = np.asarray(jkv.score(model, out, trace=out.trace.replace(kv_format=None)).logprobs)
    assert np.percentile(np.abs(plain - out.logprobs), 50) > 20 * np.percentile(replayed, 50)  # pages were quantised
