"""Every field of every endpoint with values of other types and sizes: no answer is a 500, and the server goes on."""

import dataclasses
import itertools

import pytest

from jkv.serving.requests import REFUSED, SETTINGS, ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from tests.serving.conftest import Running, make_engine
from tests.serving.test_hostile_requests import CHAT, TEXT, post

VALUES = [
    {},
    [],
    [[]],
    {"a": {"type": "b"}},
    "",
    "x",
    "\ud800",
    -(2**70),
    2**70,
    1e300,
    0.5,
    [{"type": "text"}],
    ["x", 1],
    True,
]
ASK = [{"role": "user", "content": "b=3;"}]
MORE = {  # of the APIs that mean chats, and of other servers
    "/v1/responses": ("input", "instructions", "include", "text", "reasoning", "truncation", "metadata", "service_tier"),
    "/v1/messages": ("system", "stop_sequences", "thinking", "output_config", "metadata", "cache_control"),
    "/v1/chat/completions": ("enable_thinking", "think", "reasoning", "n_predict", "grammar", "options", "best_of"),
}
PARTS = [*VALUES, None, 5, {"role": "user"}, {"role": "user", "content": [{}]}, {"role": "assistant", "tool_calls": [{}]}]


def names(*kinds):
    return sorted({field.name for kind in kinds for field in dataclasses.fields(kind)} - {"settings"})


CHATS, TEXTS, SET = names(ChatFields), names(CompletionFields), sorted(SETTINGS)
FIELDS = {  # of each endpoint: a request that is served, the fields that are changed, and every how many values are sent
    "/v1/completions": (TEXT | {"max_tokens": 1}, [*TEXTS, *SET, *REFUSED], 2),
    "/v1/chat/completions": (CHAT | {"max_tokens": 1}, [*CHATS, *REFUSED, *MORE["/v1/chat/completions"]], 2),
    "/v1/responses": ({"input": "b=3;", "max_output_tokens": 1}, ["max_output_tokens", *CHATS, *MORE["/v1/responses"]], 3),
    "/v1/messages": ({"messages": ASK, "max_tokens": 1}, [*CHATS, *MORE["/v1/messages"]], 3),
    "/v1/messages/count_tokens": ({"messages": ASK}, ["messages", "tools", "system", "model"], 1),
    "/tokenize": ({"prompt": "b=3;"}, names(TokenizeFields), 2),
    "/detokenize": ({"tokens": [5, 6]}, names(DetokenizeFields), 1),
}


def requests_of(path):
    """The fields of each request."""
    base, fields, step = FIELDS[path]
    cases = list(itertools.product(dict.fromkeys(fields), VALUES))[::step]
    found = [base | {name: value} for name, value in cases]
    if "messages" in base:
        found += [base | {"messages": [part]} for part in PARTS]
        found += [base | {"messages": [*ASK, part]} for part in PARTS]
        found += [base | {"tools": [part]} for part in PARTS]
        found += [base | {"tools": [{"type": "function", "function": part}]} for part in PARTS]
    return found


@pytest.fixture(scope="module")
def server(chat_model):
    """A server that keeps no rows after its answers."""
    one = Running(make_engine(chat_model), max_waiting=12, max_conversations=0)
    yield one
    one.wait_until_idle()
    one.close()


def test_there_are_more_than_a_thousand():
    assert sum(len(requests_of(path)) for path in FIELDS) > 1000


@pytest.mark.parametrize("path", FIELDS)
def test_no_malformed_request_is_answered_by_an_error_of_the_server(server, path):
    expected = post(server, TEXT).json()["choices"][0]["token_ids"]
    statuses = set()
    for body in requests_of(path):
        answer = post(server, body, path)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"], body
            assert len(error["message"]) < 1500, body
    assert statuses >= {200, 400}
    assert post(server, TEXT).json()["choices"][0]["token_ids"] == expected
