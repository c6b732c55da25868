"""Prompts that are echoed with their log-probabilities keep nobody waiting, and have the limits of other calls."""

import concurrent.futures
import json
import threading
import time

import pytest

from jkv.serving import scoring
from tests.serving.conftest import Running, make_engine, post_completion

ECHO = {"echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
IDS = list(range(5, 20))


@pytest.fixture(scope="module")
def small(chat_model):
    """A server with room for 4 + 2 calls."""
    one = Running(make_engine(chat_model), max_waiting=2)
    yield one
    one.close()


@pytest.fixture
def held(monkeypatch):
    """Scoring that waits until it may go on, and the prompts that were begun."""
    genuine, goes_on, begun = scoring.likely_tokens, threading.Event(), []

    def wait(model, prompt, has_best):
        begun.append(len(prompt))
        goes_on.wait(60)
        return genuine(model, prompt, has_best)

    monkeypatch.setattr(scoring, "likely_tokens", wait)
    yield goes_on, begun
    goes_on.set()


def post(server, body, seconds=60):
    status, text = post_completion(server, body, seconds)
    return status, json.loads(text)


def test_others_are_served_while_prompts_are_scored(small, held):
    goes_on, begun = held
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scored = pool.submit(post, small, {"prompt": [IDS, IDS[:9]], **ECHO})
        assert post(small, {"prompt": IDS, "max_tokens": 4})[0] == 200
        assert not scored.done(), scored.result()
        goes_on.set()
        status, answer = scored.result()
    assert status == 200
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]] == begun == [15, 9]


def test_scores_do_not_depend_on_whether_the_best_of_each_place_is_asked_for(small):
    both = [post(small, {"prompt": IDS, **ECHO, "logprobs": count})[1]["choices"][0]["logprobs"] for count in (0, 1)]
    assert both[0]["token_logprobs"] == pytest.approx(both[1]["token_logprobs"])
    assert both[0]["top_logprobs"] is None
    assert len(both[1]["top_logprobs"]) == len(IDS)


def test_scored_prompts_count_as_open(small, held):
    assert post(small, {"prompt": [IDS] * 7, **ECHO})[0] == 400
    goes_on, begun = held
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scored = pool.submit(post, small, {"prompt": [IDS] * 6, **ECHO})
        end = time.monotonic() + 30
        while not begun:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert post(small, {"prompt": IDS, "max_tokens": 4})[0] == 429
        goes_on.set()
        assert scored.result()[0] == 200
    assert post(small, {"prompt": IDS, "max_tokens": 4})[0] == 200


def test_a_client_that_goes_leaves_its_other_prompts_unscored(small, held):
    goes_on, begun = held
    with pytest.raises(TimeoutError):
        post(small, {"prompt": [IDS] * 6, **ECHO}, seconds=1)
    end = time.monotonic() + 30
    while small.app.state.server.num_open:
        assert time.monotonic() < end
        time.sleep(0.01)
    goes_on.set()
    assert post(small, {"prompt": IDS[:9], **ECHO})[0] == 200
    assert begun == [15, 9]


def test_scoring_ends_at_the_time_limit(small, held, monkeypatch):
    monkeypatch.setattr(small.app.state.server.scorer, "seconds", 0.5)
    status, answer = post(small, {"prompt": [IDS] * 2, **ECHO})
    assert status == 503
    assert "must be scored within 0.5 seconds; 0 of 2 were" in answer["error"]["message"]
    assert not small.app.state.server.num_open
