"""A request that takes long to encode keeps no other one waiting, and there are not too many of them."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jkv.serving import jobs
from jkv.serving.encodings import OF_CLIENT, THREADS, Encodings
from jkv.serving.errors import RefusalError
from jkv.serving.jobs import RENDERERS, Encoder
from tests.serving.test_hostile_requests import CHAT, post

LONG = "b=3;" * 20
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Blocked:
    """A function that blocks for a long prompt until it is let go."""

    def __init__(self, function):
        self.function, self.go, self.num_begun = function, threading.Event(), 0

    def __call__(self, *args, **options):
        if any(LONG in str(one) for one in args):
            self.num_begun += 1
            assert self.go.wait(60)
        return self.function(*args, **options)

    def wait(self, count):
        """Waits until so many long ones have begun."""
        end = time.monotonic() + 60
        while self.num_begun < count:
            assert time.monotonic() < end
            time.sleep(0.01)


def bodies(text):
    return {
        COMPLETIONS: {"prompt": text, "max_tokens": 1},
        CHATS: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        "/tokenize": {"prompt": text},
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
def test_a_long_text_that_is_encoded_keeps_no_short_one_waiting(tiny, monkeypatch, path):
    names = {COMPLETIONS: "encode_prompts", CHATS: "encode_prompt", "/tokenize": "encode_text"}
    blocked = Blocked(getattr(jobs, names[path]))
    monkeypatch.setattr(jobs, names[path], blocked)
    with ThreadPoolExecutor(OF_CLIENT) as threads:
        long_ones = [threads.submit(post, tiny, bodies(LONG)[path], path) for _ in range(OF_CLIENT - 1)]
        blocked.wait(OF_CLIENT - 1)
        for other, body in bodies("b=3;").items():
            assert post(tiny, body, other).status_code == 200
        assert not any(one.done() for one in long_ones)
        blocked.go.set()
        assert [one.result().status_code for one in long_ones] == [200] * len(long_ones)


def test_a_slow_template_keeps_no_other_conversation_waiting(chat_model):
    encoder = Encoder(chat_model)
    for one in encoder._renderers:
        one.render = Blocked(one.render)
    slow = encoder._renderers[0].render  # the first that is used
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(encoder.encode_chat, [{"role": "user", "content": LONG}])
        slow.wait(1)
        for _ in range(3):
            assert len(encoder.encode_chat(CHAT["messages"]))
        assert not late.done()
        slow.go.set()
        assert len(late.result())
    assert [one.process is not None for one in encoder._renderers] == [True, True] + [False] * (RENDERERS - 2)
    encoder.close()


def test_a_client_leaves_a_thread_to_others_and_too_many_are_refused():
    started, go = [], threading.Event()

    def work(name):
        started.append(name)
        assert go.wait(60)
        return name

    async def main():
        encodings = Encodings(most=12)
        many = [asyncio.ensure_future(encodings.run("a", work, f"a{i}")) for i in range(10)]
        while len(started) < OF_CLIENT:
            await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(encodings.run(name, work, name)) for name in "bc"]
        while "b" not in started:
            await asyncio.sleep(0.01)
        assert len(started) == THREADS
        with pytest.raises(RefusalError) as caught:
            await encodings.run("d", work, "d")
        assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
        gone = many.pop()
        gone.cancel()
        go.set()
        assert [await one for one in (*many, *others)] == [*(f"a{i}" for i in range(9)), "b", "c"]
        assert encodings.num_open == 0
        del many, others, gone, caught
        gc.collect()
        assert not encodings._turns
        assert await encodings.run("d", work, "d") == "d"
        encodings.close()

    asyncio.run(main())
    assert "a9" not in started
