"""Log-probabilities of a server: under the model's own distribution, or by name under the one that tokens are drawn from."""

import json
import urllib.request

import numpy as np
import pytest

import jkv
from jkv.engine.clocks import COMPILING
from tests.serving.conftest import post_completion

IDS = [*range(5, 20)]
COLD = {"temperature": 0.2, "top_p": 0.5, "seed": 3, "frequency_penalty": 0.5}
FULL = {"prompt": IDS, "max_tokens": 12, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}  # nothing is evicted


def post(server, body):
    status, text = post_completion(server, body)
    assert status == 200, text
    return json.loads(text)["choices"]


def stream(server, body, path="completions"):
    """The choices of each chunk."""
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body | {"stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    return [choice for event in events[:-1] for choice in json.loads(event)["choices"]]


def scored(model, tokens, **sampling):
    return np.asarray(jkv.score(model, [tokens], prompts=[IDS], sampling=jkv.Sampling(**sampling)).logprobs[0])


def joined(records):
    return {name: [one for record in records for one in record[name] or []] for name in records[0]}


def test_they_are_of_the_models_own_distribution_whatever_tokens_are_drawn_from(tiny, chat_model):
    (choice,) = post(tiny, FULL | COLD)
    tokens, found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(found, scored(chat_model, tokens), atol=1e-4)
    assert np.abs(found - scored(chat_model, tokens, temperature=0.2)).max() > 0.1
    assert joined([one["logprobs"] for one in stream(tiny, FULL | COLD)])["token_logprobs"] == found


def test_those_of_the_draws_have_a_name(tiny, chat_model):
    (choice,) = post(tiny, FULL | COLD | {"logprobs_mode": "processed_logprobs"})
    sampling = {name: value for name, value in COLD.items() if name != "seed"}
    expected = scored(chat_model, choice["token_ids"], **sampling)
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-4)


def test_a_chat_has_them_with_the_bytes_of_its_text(tiny, chat_model):
    messages = [{"role": "user", "content": "b=3;c=7;d=b*c;?d"}]
    body = {
        "messages": messages,
        "max_tokens": 12,
        "logprobs": True,
        "include_reasoning": True,
        **COLD,
        "return_token_ids": True,
    }
    chunks = stream(tiny, body, "chat/completions")
    content = [one for chunk in chunks if chunk.get("logprobs") for one in chunk["logprobs"]["content"]]
    tokens = [token for chunk in chunks for token in chunk.get("token_ids", [])]
    prompt = chat_model.tokenizer.encode(messages[0]["content"])
    own = np.asarray(jkv.score(chat_model, [tokens], prompts=[prompt]).logprobs[0])
    np.testing.assert_allclose([one["logprob"] for one in content], own, atol=1e-4)
    text = chat_model.tokenizer.decode(tokens, skip_special_tokens=True)
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == text


def test_offsets_count_characters_of_the_echoed_text(tiny):
    for body in (FULL | {"echo": True, "n": 2}, FULL | {"n": 2}):
        for choice in post(tiny, body | COLD):
            record = choice["logprobs"]
            ends = [*record["text_offset"][1:], len(choice["text"])]
            pieces = [choice["text"][start:end] for start, end in zip(record["text_offset"], ends, strict=True)]
            assert pieces == record["tokens"]


def test_asking_for_them_compiles_nothing_twice(tiny):
    post(tiny, FULL | COLD)
    compiled = COMPILING.count
    for more in ({}, {"logprobs": None}, {"logprobs_mode": "processed_logprobs"}, {"seed": 4}):
        post(tiny, FULL | COLD | more)
    assert COMPILING.count == compiled


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"logprobs_mode": "raw"}, "logprobs_mode must be raw_logprobs"),
        ({"logprobs": 1, "temperature": 0, "frequency_penalty": 0.5}, "logprobs must be 0 with penalties"),
    ],
    ids=["another name", "the most likely token with penalties"],
)
def test_what_cannot_be_said_is_refused(tiny, more, word):
    status, text = post_completion(tiny, FULL | more)
    assert status == 400
    assert word in json.loads(text)["error"]["message"]


def test_the_most_likely_token_with_penalties_is_of_the_draws(tiny):
    body = {"logprobs": 1, "temperature": 0, "frequency_penalty": 0.5, "logprobs_mode": "processed_logprobs"}
    record = post(tiny, FULL | body)[0]["logprobs"]
    assert [list(one.values()) for one in record["top_logprobs"]] == [[one] for one in record["token_logprobs"]]
