"""One compressed run of the tiny model, of which batches are made."""

import pytest

import jkv

PROMPTS = [[5, 1, 9], [3, 7] * 8 + [1]]
KNOBS = {"max_new_tokens": 40, "page_size": 4, "progress": False, "return_trace": True, "n": 4}


@pytest.fixture(scope="package")
def squeezed(model):
    """Eight completions of different length, by a budget of 12 slots."""
    policy = jkv.r_kv(budget=12, interval=4, window=4)
    return jkv.generate(model, PROMPTS, policy=policy, sampling=jkv.Sampling(0.8, seed=1), stop_ids=[2], **KNOBS)
