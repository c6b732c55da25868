"""The end of a server: requests that are open then are answered, in the shape of any other answer."""

import concurrent.futures
import json
import threading
import time

from jkv.serving import scoring
from tests.serving.conftest import Running, make_engine, post_completion

LONG = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}


def wait_for(number, found):
    end = time.monotonic() + 60
    while found() != number:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_open_requests_receive_what_there_is(chat_model, monkeypatch):
    """The engine is paused, so nothing would end them but the server."""
    goes_on, begun, genuine = threading.Event(), [], scoring.likely_tokens

    def wait(model, prompt, has_best):
        begun.append(len(prompt))
        goes_on.wait(60)
        return genuine(model, prompt, has_best)

    monkeypatch.setattr(scoring, "likely_tokens", wait)
    running = Running(make_engine(chat_model), drain=0.5, abort_reason=True)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        whole, streamed = (pool.submit(post_completion, running, LONG | more) for more in ({}, {"stream": True}))
        scored = pool.submit(
            post_completion, running, {"prompt": [[5, 6], [5, 6]], "echo": True, "logprobs": 0, "max_tokens": 0}
        )
        wait_for(4, lambda: running.app.state.server.num_open)
        wait_for(1, lambda: len(begun))
        running.service.pause("keep").result()
        running.server.should_exit = True
        time.sleep(1)
        goes_on.set()
        status, body = whole.result()
        assert status == 200
        choice = json.loads(body)["choices"][0]
        assert choice["finish_reason"] == "abort"
        status, body = streamed.result()
        events = body.strip().split("\n\n")
        assert status == 200
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        status, body = scored.result()
        assert status == 503
        assert "A server that ends scores no more prompts" in json.loads(body)["error"]["message"]
    running.close()
    assert begun == [2]
