"""The unmodified `openai` package against a server: the tokens are those of `jkv.generate`."""

import asyncio

import httpx
import pytest

import jkv
from tests.serving.conftest import SETTINGS

openai = pytest.importorskip("openai")

PROMPTS = ["b=3;c=7;d=b*c;e=d+b;?e", "x=4;y=9;z=x-y;w=z*x;?w", "b=1;c=2;d=b+c;?d"]
R_KV = jkv.r_kv(**SETTINGS)
DRAW = {"seed": 3, "temperature": 1.0}
LIMIT = 64


@pytest.fixture(scope="session")
def expected(chat_model):
    """Two samples of each prompt, by `jkv.generate`."""
    settings = {"page_size": 16, "max_running": 4, "progress": False, "max_new_tokens": LIMIT, "chunk": 8}
    return jkv.generate(chat_model, PROMPTS, R_KV, jkv.Sampling(**DRAW), n=2, **settings)


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(prompt):
    return [{"role": "user", "content": prompt}]


def ask(client, prompt=PROMPTS[0], **others):
    settings = {"model": "tiny", "max_tokens": LIMIT, **DRAW} | others
    return client.chat.completions.create(messages=chat(prompt), **settings)


def token_ids(choices):
    return [choice.token_ids for choice in choices]


def test_a_chat_has_the_tokens_of_generate_and_its_reasoning_apart(client, expected, chat_model):
    out = ask(client, n=2, logprobs=True, extra_body={"return_token_ids": True})
    assert out.object == "chat.completion"
    assert out.model == "tiny"
    assert [choice.index for choice in out.choices] == [0, 1]
    for i, choice in enumerate(out.choices):
        tokens = expected.tokens[i, : expected.lengths[i]].tolist()
        assert choice.token_ids == tokens
        assert choice.finish_reason == expected.finish_reason[i]
        assert choice.message.role == "assistant"
        assert choice.message.reasoning == choice.message.reasoning_content == expected.reasoning[i]
        assert choice.message.content == expected.answer[i]
        assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.logprobs[i, : len(tokens)].tolist())
        assert "".join(one.token for one in choice.logprobs.content) == chat_model.tokenizer.decode(tokens)
    usage = out.usage
    assert usage.prompt_tokens == len(expected.prompts[0])
    assert usage.completion_tokens == int(expected.lengths[:2].sum())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_usage_counts_reasoning_and_what_the_cache_holds(client, expected, chat_model):
    out = ask(client, PROMPTS[2], temperature=0, max_tokens=200)
    whole = jkv.generate(chat_model, PROMPTS[2], R_KV, max_new_tokens=200, page_size=16, progress=False)
    end = chat_model.tokenizer.encode("</think>")[0]
    tokens = whole.tokens[0, : whole.lengths[0]].tolist()
    assert end in tokens
    assert out.usage.completion_tokens_details.reasoning_tokens == tokens.index(end) + 1
    assert out.usage.kv["evicted_tokens"] == round(whole.samples[0].evicted) > 0
    assert out.usage.kv["held_tokens"] == len(whole.prompts[0]) + len(tokens) - round(whole.samples[0].evicted)
    assert out.usage.kv["bytes"] == whole.samples[0].peak_kv_bytes
    assert out.choices[0].message.content == whole.answer[0]


def test_a_stream_has_the_role_first_the_reason_last_and_the_same_text(client, expected):
    settings = {"n": 2, "stream_options": {"include_usage": True}, "logprobs": True}
    chunks = list(ask(client, stream=True, extra_body={"return_token_ids": True}, **settings))
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == int(expected.lengths[:2].sum())
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    for i in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == i]
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + [expected.finish_reason[i]]
        assert "".join(getattr(choice.delta, "reasoning", "") for choice in own) == expected.reasoning[i]
        assert "".join(choice.delta.content or "" for choice in own) == expected.answer[i]
        tokens = [token for choice in own for token in getattr(choice, "token_ids", [])]
        assert tokens == expected.tokens[i, : expected.lengths[i]].tolist()
        log_probs = [one.logprob for choice in own if choice.logprobs for one in choice.logprobs.content]
        assert len(log_probs) == len(tokens)
        assert len(own) > 4  # it is a stream


def test_each_chunk_may_say_what_the_cache_holds(client):
    counting = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, n=2, stream=True, stream_options=counting, extra_body={"ignore_eos": True}))
    *counts, last = [chunk.usage for chunk in chunks if getattr(chunk.usage, "kv", None)]
    assert [one.kv["held_tokens"] + one.kv["evicted_tokens"] for one in counts] == [
        2 * one.prompt_tokens + one.completion_tokens for one in counts
    ]
    evicted = [one.kv["evicted_tokens"] for one in counts]
    assert evicted == sorted(evicted)
    assert 0 == evicted[0] < evicted[-1]
    assert {name: last.kv[name] for name in counts[-1].kv} == counts[-1].kv


@pytest.mark.parametrize("has_template", [True, False])
def test_the_page_asks_the_endpoint_that_the_model_has(tiny, has_template, monkeypatch):
    if not has_template:
        monkeypatch.setattr(tiny.engine.model.tokenizer, "chat_template", None)
    assert httpx.get(tiny.url + "/v1/models").json()["data"][0]["is_chat"] == has_template


def test_many_tasks_at_once_have_the_tokens_of_generate(tiny, expected):
    async def one(client, i, kind):
        more = {"model": "tiny", "max_tokens": LIMIT, "n": 2, "extra_body": {"return_token_ids": True}, **DRAW}
        if kind == "chat":
            return token_ids((await client.chat.completions.create(messages=chat(PROMPTS[i]), **more)).choices)
        if kind == "text":
            return token_ids((await client.completions.create(prompt=PROMPTS[i], **more)).choices)
        got = [[], []]
        async for chunk in await client.chat.completions.create(messages=chat(PROMPTS[i]), stream=True, **more):
            choice = chunk.choices[0]
            got[choice.index] += getattr(choice, "token_ids", [])
        return got

    async def everything():
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i, kind) for i, kind in enumerate(("chat", "stream", "text"))))

    got = asyncio.run(everything())
    for i in range(3):
        assert got[i] == [expected.tokens[j, : expected.lengths[j]].tolist() for j in (2 * i, 2 * i + 1)]


def test_a_request_names_its_policy_and_budget(client, chat_model):
    body = {"policy": "streaming_llm", "budget": 40, "interval": 8, "return_token_ids": True}
    policy = jkv.streaming_llm(budget=40, interval=8)
    whole = jkv.generate(chat_model, PROMPTS[0], policy, max_new_tokens=48, page_size=16, progress=False)
    out = ask(client, temperature=0, max_tokens=48, extra_body=body)
    assert out.choices[0].token_ids == whole.tokens[0, : whole.lengths[0]].tolist()
    assert out.usage.kv["evicted_tokens"] == round(whole.samples[0].evicted) > 0
    full = ask(client, temperature=0, max_tokens=48, extra_body={"policy": "full"})
    assert full.usage.kv["evicted_tokens"] == 0
    wider = ask(client, temperature=0, max_tokens=48, extra_body={"budget": 80})  # of the server's own policy
    assert wider.usage.kv["evicted_tokens"] == 0


def test_completions_take_texts_and_token_ids_and_lists_of_them(client, expected, chat_model):
    ids = [chat_model.tokenizer.encode(prompt) for prompt in PROMPTS]
    settings = {"model": "tiny", "max_tokens": LIMIT, "n": 2, "extra_body": {"return_token_ids": True}, **DRAW}
    for prompt in (PROMPTS, ids):
        out = client.completions.create(prompt=prompt, **settings)
        assert [choice.index for choice in out.choices] == list(range(6))
        assert [choice.text for choice in out.choices] == expected.text
        assert token_ids(out.choices) == [expected.tokens[i, :n].tolist() for i, n in enumerate(expected.lengths)]
    streamed = [[] for _ in range(6)]
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **settings):
        streamed[chunk.choices[0].index] += chunk.choices[0].token_ids
    assert streamed == token_ids(out.choices)
    assert len(client.completions.create(model="tiny", prompt=PROMPTS[0]).choices[0].text) > 0


def test_an_echoed_prompt_has_its_log_probabilities(client, chat_model):
    settings = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    out = client.completions.create(prompt=PROMPTS[:2], echo=True, logprobs=1, **settings)
    for prompt, choice in zip(PROMPTS, out.choices, strict=False):
        ids = chat_model.tokenizer.encode(prompt)
        found = choice.logprobs
        scores = jkv.score(chat_model, [ids[1:]], prompts=[ids[:1]]).logprobs[0]
        assert choice.text.startswith(prompt)
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(scores.tolist(), abs=1e-4)
        assert "".join(found.tokens) == choice.text
        assert [
            choice.text[at:][: len(token)] for at, token in zip(found.text_offset, found.tokens, strict=True)
        ] == found.tokens
    greedy = (
        client.completions.create(prompt=PROMPTS[0], **settings, extra_body={"return_token_ids": True}).choices[0].token_ids
    )
    ids = chat_model.tokenizer.encode(PROMPTS[0])
    again = client.completions.create(prompt=[ids + greedy], echo=True, logprobs=1, **settings | {"max_tokens": 1}).choices[0]
    likely = [top and max(top, key=top.get) for top in again.logprobs.top_logprobs]
    assert likely[0] is None
    assert likely[len(ids) :][: len(greedy)] == [chat_model.tokenizer.decode([token]) for token in greedy]
    assert likely[1 : len(ids)] != again.logprobs.tokens[1 : len(ids)]  # nobody would have drawn this prompt
    only = client.completions.create(prompt=PROMPTS[0], echo=True, logprobs=0, **settings | {"max_tokens": 0})
    assert only.choices[0].text == PROMPTS[0]
    assert only.usage.completion_tokens == 0


def test_stops_and_template_settings_have_effect(client, expected, chat_model):
    out = ask(client, temperature=0, stop=["\n\nc="])
    assert out.choices[0].finish_reason == "stop"
    assert out.choices[0].message.reasoning == "b=3"
    token = chat_model.tokenizer.encode("c=")[0]
    out = ask(client, temperature=0, extra_body={"stop_token_ids": [token]})
    assert (out.choices[0].message.reasoning, out.choices[0].finish_reason) == ("b=3", "stop")  # without what ended it
    ends = ask(client, PROMPTS[2], temperature=0, max_tokens=200).usage.completion_tokens
    assert ends < 200
    assert (
        ask(client, PROMPTS[2], temperature=0, max_tokens=200, extra_body={"ignore_eos": True}).usage.completion_tokens == 200
    )
    off = ask(client, temperature=0, max_tokens=4, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert off.usage.prompt_tokens == len(expected.prompts[0]) + 2
    hidden = ask(client, temperature=0, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning")


def test_a_message_may_come_in_parts(client, expected):
    parts = [{"type": "text", "text": PROMPTS[0][:5]}, {"type": "text", "text": PROMPTS[0][5:]}]
    out = ask(client, parts, extra_body={"return_token_ids": True})
    assert out.choices[0].token_ids == expected.tokens[0, : expected.lengths[0]].tolist()


def test_fields_of_openai_that_change_nothing_are_named_in_a_header(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=chat(PROMPTS[0]), max_tokens=4, user="me", verbosity="low", extra_headers={"x-request-id": "abc"}
    )
    assert raw.headers["x-jkv-ignored"] == "user, verbosity"
    assert raw.headers["x-request-id"] == "abc"


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 2048
