"""Every golden checkpoint on two simulated devices, and on four, with copies of their KV heads: the tokens of one device.

`tests/engine/test_mesh.py` runs this file.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from tests.model.test_decoder import CASES, GOLDEN

REFUSED = dict.fromkeys(
    ("gemma4", "gemma4_moe"), r"num_kv_heads=1 must be .* devices of the axis \"tensor\"; 1 / 2"
)  # 2 in their windows
POLICY = jkv.r_kv(budget=16, interval=8, window=4)
ON, ON_FOUR = (Mesh(jax.devices()[:count], ("tensor",)) if len(jax.devices()) > 1 else None for count in (2, 4))


def outcome(model, prompt, on):
    settings = {"max_running": 2, "max_slots": 64, "page_size": 4, "mesh": on, "return_trace": True}
    engine = jkv.Engine(model, policies=[POLICY], **settings)
    tickets = [engine.submit(prompt, policy=policy, max_new_tokens=24, stop_ids=()) for policy in (jkv.full(), POLICY)]
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


@pytest.mark.tested("mesh")
@pytest.mark.everyday(where=lambda golden: golden in ("gemma4_sharing", "qwen3_5", "qwen3_moe"))
@pytest.mark.parametrize("golden", [case for case in CASES if case not in REFUSED])
def test_tokens_are_those_of_one_device(golden):
    assert_is_as_on_one(golden, ON)


@pytest.mark.everyday(where=lambda golden: golden in ("gpt_oss", "phi3"))
@pytest.mark.parametrize("golden", [case for case in CASES if case not in (*REFUSED, "qwen3_5", "qwen3_5_moe")])
def test_four_devices_hold_two_copies_of_two_kv_heads(golden):
    assert_is_as_on_one(golden, ON_FOUR)


def assert_is_as_on_one(golden, on):
    model = jkv.load(str(GOLDEN / golden), dtype=jnp.float32)
    prompt = np.load(GOLDEN / golden / "reference.npz")["prompt"]
    for one, many in zip(outcome(model, prompt, None), outcome(model, prompt, on), strict=True):
        np.testing.assert_array_equal(one.tokens, many.tokens)
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-4)


@pytest.mark.parametrize("golden", REFUSED)
def test_what_two_devices_cannot_split_is_refused_by_name(golden):
    with pytest.raises(ValueError, match=REFUSED[golden]):
        jkv.Engine(jkv.load(str(GOLDEN / golden)), mesh=ON)
