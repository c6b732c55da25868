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
        ({"logprobs": 2, "temperature": 1, "logprobs_mode": "processed_logprobs"}, "logprobs are of the model's own"),
        ({"logprobs": 21}, "logprobs must lie in [0, 20]"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must lie in [0, 20]"),
    ],
    ids=["another name", "another distribution", "too many", "streamed", "too many of the prompt"],
)
def test_what_cannot_be_said_is_refused(tiny, more, word):
    status, text = post_completion(tiny, FULL | more)
    assert status == 400
    assert word in json.loads(text)["error"]["message"]


def test_the_most_likely_tokens_are_the_models_own_whatever_is_drawn(tiny, chat_model):
    body, decode = FULL | COLD | {"logprobs": 5}, chat_model.tokenizer.decode
    (choice,) = post(tiny, body)
    record, tokens = choice["logprobs"], [[token] for token in range(chat_model.config.vocab_size)]
    own = np.asarray(jkv.score(chat_model, tokens, prompts=[IDS] * len(tokens)).logprobs)[:, 0]
    best = np.argsort(-own)[:5]
    names, first = [decode([token]) for token in best], record["top_logprobs"][0]
    assert list(first)[:5] == names
    np.testing.assert_allclose([first[name] for name in names], own[best], atol=1e-4)
    for found, token, log_prob in zip(record["top_logprobs"], choice["token_ids"], record["token_logprobs"], strict=True):
        assert found[decode([token])] == pytest.approx(log_prob, abs=1e-5)
        assert len(found) in (5, 6)
    streamed = joined([one["logprobs"] for one in stream(tiny, body)])
    assert streamed["top_logprobs"] == record["top_logprobs"]
    messages = [{"role": "user", "content": "b=3;c=7;d=b*c;?d"}]
    body = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 20, "temperature": 1.0, "seed": 2}
    chunks = [one for one in stream(tiny, body, "chat/completions") if one.get("logprobs")]
    content = [one for chunk in chunks for one in chunk["logprobs"]["content"]]
    assert len(content) == 4
    for one in content:
        assert len(one["top_logprobs"]) == min(20, chat_model.config.vocab_size)
        assert all(bytes(other["bytes"]).decode() in ("", other["token"]) for other in one["top_logprobs"])
        assert one["logprob"] <= one["top_logprobs"][0]["logprob"] + 1e-5


def test_prompts_have_the_most_likely_tokens_of_each_place(tiny, chat_model):
    body = {"prompt": [IDS, IDS[:9]], "max_tokens": 1, "n": 2, "prompt_logprobs": 3}
    own = np.asarray(jkv.score(chat_model, [IDS[1:]], prompts=[IDS[:1]]).logprobs)[0]
    choices = post(tiny, body)
    assert [len(one["prompt_logprobs"]) for one in choices] == [15, 15, 9, 9]
    first, *places = choices[0]["prompt_logprobs"]
    assert first is None
    for place, token, log_prob in zip(places, IDS[1:], own, strict=True):
        assert place[str(token)]["logprob"] == pytest.approx(log_prob, abs=1e-4)
        assert place[str(token)]["decoded_token"] == chat_model.tokenizer.decode([token])
        ranked = {one["rank"]: one["logprob"] for one in place.values() if one["rank"]}
        assert sorted(ranked) == [1, 2, 3]
        assert ranked[1] >= ranked[2] >= ranked[3]
        assert len(place) == 3 + (place[str(token)]["rank"] is None)
    (echoed,) = post(tiny, {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 3})
    assert "prompt_logprobs" not in echoed
    for names, place in zip(echoed["logprobs"]["top_logprobs"][1:], places, strict=True):
        assert list(names.values())[:3] == pytest.approx(
            sorted((p["logprob"] for p in place.values()), reverse=True)[:3], abs=1e-4
        )


def test_biases_change_what_is_drawn_and_not_the_models_own_distribution(tiny, chat_model):
    (plain,) = post(tiny, FULL | {"temperature": 0, "logprobs": 1})
    first = plain["token_ids"][0]
    body = FULL | {"temperature": 0, "logprobs": 1, "logit_bias": {str(first): -100}}
    (other,) = post(tiny, body)
    assert first not in other["token_ids"]
    best, *_ = other["logprobs"]["top_logprobs"][0].values()
    assert best == pytest.approx(plain["logprobs"]["token_logprobs"][0], abs=1e-5)
    word = plain["text"][:3]
    (other,) = post(tiny, FULL | {"temperature": 0, "bad_words": [word]})
    assert word not in other["text"]
    (only,) = post(tiny, FULL | {"allowed_token_ids": [first, 7], "temperature": 1, "seed": 1})
    assert set(only["token_ids"]) <= {first, 7}
    ends = FULL | {"ignore_eos": False, "stop_token_ids": [first], "temperature": 0}
    assert len(post(tiny, ends)[0]["token_ids"]) == 1
    assert len(post(tiny, ends | {"min_tokens": 5})[0]["token_ids"]) >= 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"bad_words": [3]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["b=3;c=7;d=b*c;?d"]}, "bad_words"),
    ],
    ids=str,
)
def test_biases_that_are_none_are_refused_by_name(tiny, fields, param):
    status, text = post_completion(tiny, FULL | fields)
    assert (status, json.loads(text)["error"]["param"]) == (400, param), text
