"""Traced results that all pictures are tested on."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.replay.score import Trace
from jkv.testing import TinyTokenizer, tiny_model

KNOBS = {"stop_ids": (), "page_size": 4, "progress": False, "return_trace": True}
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7]]
OPEN_END = 2**31 - 1


@pytest.fixture(scope="session")
def reasoner():
    return tiny_model(tokenizer=TinyTokenizer())


@pytest.fixture(scope="session")
def evicting(reasoner):
    """Two samples of R-KV."""
    return jkv.generate(reasoner, PROMPTS, policy=jkv.r_kv(budget=16, interval=8, window=2), max_new_tokens=44, **KNOBS)


@pytest.fixture(scope="session")
def sliding(reasoner):
    """The same two prompts with StreamingLLM, for fewer tokens."""
    policy = jkv.streaming_llm(budget=12, interval=4)
    return jkv.generate(reasoner, PROMPTS, policy=policy, max_new_tokens=30, **KNOBS)


@pytest.fixture(scope="session")
def keeping(reasoner):
    """One sample that keeps all."""
    return jkv.generate(reasoner, PROMPTS[0], policy=jkv.full(), max_new_tokens=20, **KNOBS)


@pytest.fixture(scope="session")
def choosing(reasoner):
    """One sample of Quest, whose pages come and go."""
    return jkv.generate(reasoner, PROMPTS[0], policy=jkv.quest(budget=12, dense_layers=1), max_new_tokens=40, **KNOBS)


@pytest.fixture(scope="session")
def sharing(evicting):
    """Twelve tokens after a prompt of five: pages 8 to 9 and 12 to 13 leave for 6 to 7; one head then evicts token 6."""
    own = np.arange(17)
    source = np.broadcast_to(np.concatenate([own, [6, 7, 6, 7]]), (1, 2, 2, 21)).astype(np.int32)
    begin = np.broadcast_to(np.concatenate([own, [11, 11, 15, 15]]), source.shape).astype(np.int32)
    end = np.full(source.shape, OPEN_END, np.int32)
    end[..., [8, 9]], end[..., [12, 13]] = 11, 15
    end[0, 1, 0, [6, 17, 19]] = 16
    return dataclasses.replace(
        evicting,
        trace=Trace.of(source, begin, end),
        prompts=[np.arange(4, 9, dtype=np.int32)],
        tokens=np.full((1, 12), 5, np.int32),
        lengths=np.array([12]),
        finish_reason=["length"],
    )
