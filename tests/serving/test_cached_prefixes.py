"""Requests whose prompts begin alike: what the server reuses, and what it says of it."""

import pytest

import jkv
from tests.serving.conftest import SETTINGS, Running

httpx = pytest.importorskip("httpx")

PROMPT = [4 + i * i % 50 for i in range(300)]


def ask(server, **fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    out = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    return out["choices"][0]["token_ids"], out["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(server):
    """Tokens of prompts that were looked up, and that were found."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = [
        line.split()[-1] for name in ("queries", "hits") for line in lines if line.startswith(f"vllm:prefix_cache_{name}_t")
    ]
    return [float(value) for value in values]


@pytest.mark.parametrize(("piece", "found"), [(None, 256), (16, 288), (0, 0)])  # None: of 128 tokens; 0: no cache
def test_a_second_request_prefills_the_rest_of_its_prompt_and_says_so(chat_model, piece, found):
    settings = {"prefix_cache": piece != 0, "prefix_piece": piece or None}
    engine = jkv.Engine(chat_model, max_running=2, max_slots=512, page_size=16, policies=[jkv.r_kv(**SETTINGS)], **settings)
    server = Running(engine, policy="full", settings={})
    try:
        first, second, other, again = (ask(server, **salt) for salt in ({}, {}, {"cache_salt": "b"}, {"cache_salt": "b"}))
        assert [one[1] for one in (first, second, other, again)] == [0, found, 0, found]
        assert first[0] == second[0] == other[0] == again[0]
        assert counted(server) == ([4 * len(PROMPT), 2 * found] if found else [0, 0])
    finally:
        server.close()
