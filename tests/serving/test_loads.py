"""Many clients at once: the tokens of `jkv.generate`, no page held for clients that vanished, nothing that grows."""

import asyncio
import collections
import gc
import itertools
import json
import random
import resource
import time

import pytest

import jkv
from jkv.bench.load import Answer, events_of
from jkv.engine.requests import Request
from jkv.engine.results import Result
from jkv.engine.service import Ticket
from jkv.evaluation.held_out import held_out
from jkv.serving.jobs import Job
from tests.serving.conftest import SETTINGS, Running, make_engine

POLICIES = {"full": {}, "r_kv": SETTINGS, "streaming_llm": {"budget": 40}, "r_kv of another budget": {**SETTINGS, "budget": 64}}
DRAWS = [{"seed": 3, "temperature": 1.0, "max_tokens": 24}, {"seed": 5, "temperature": 0.7, "max_tokens": 90}]
KEPT = (Ticket, Job, Request, Result)


@pytest.fixture(scope="module")
def crowded(chat_model):
    """A server that lets 600 samples wait."""
    one = Running(make_engine(chat_model), max_waiting=600)
    yield one
    one.close()


def in_flight(most, jobs):
    """Runs coroutines, so many at a time."""

    async def everything():
        free = asyncio.Semaphore(most)

        async def one(job):
            async with free:
                return await job

        return await asyncio.gather(*map(one, jobs))

    return asyncio.run(everything())


async def tokens_of(url, body, most_events=None):
    """The token ids of a streamed completion; the client vanishes after so many events."""
    tokens = []
    events = events_of(f"{url}/v1/completions", body | {"stream": True, "return_token_ids": True}, None, Answer())
    async for count, data in counted(events):
        if count == most_events:
            break
        if data != "[DONE]":
            tokens += json.loads(data)["choices"][0]["token_ids"]
    await events.aclose()
    return tokens


async def counted(events):
    count = 0
    async for event in events:
        yield count, event
        count += 1


def expected_of(model, prompts, policies):
    """The tokens of each prompt, policy and draw, by `jkv.generate`."""
    found = {}
    for policy, (i, draw) in itertools.product(policies, enumerate(DRAWS)):
        sampling = jkv.Sampling(temperature=draw["temperature"], seed=draw["seed"])
        settings = {"page_size": 16, "max_running": 4, "chunk": 8, "progress": False, "max_new_tokens": draw["max_tokens"]}
        chosen = jkv.POLICIES[policy.split()[0]](**POLICIES[policy])
        out = jkv.generate(model, prompts, chosen, sampling, **settings)
        for j, prompt in enumerate(prompts):
            found[prompt, policy, i] = out.tokens[j, : out.lengths[j]].tolist()
    return found


@pytest.mark.parametrize(
    ("count", "num_prompts", "policies"),
    [(24, 3, ["full", "r_kv"]), pytest.param(500, 12, list(POLICIES), marks=pytest.mark.slow)],
    ids=["24", "500"],
)
@pytest.mark.filterwarnings("ignore")
def test_mixed_requests_at_once_have_the_tokens_of_generate(crowded, chat_model, count, num_prompts, policies):
    prompts = [problem.prompt for problem in held_out(num_prompts)]
    expected = expected_of(chat_model, prompts, policies)
    asked = random.Random(0).choices(list(expected), k=count)
    assert {policy for _, policy, _ in asked} == set(policies)
    bodies = [{"prompt": p, "policy": policy.split()[0], **POLICIES[policy], **DRAWS[i]} for p, policy, i in asked]
    got = in_flight(count, [tokens_of(crowded.url, body) for body in bodies])
    assert [tokens == expected[key] for tokens, key in zip(got, asked, strict=True)] == [True] * count
    crowded.wait_until_idle()


def test_clients_that_vanish_leave_no_page_held(crowded):
    rng = random.Random(1)
    body = {"prompt": "b=3;c=7;d=b*c;?d", "max_tokens": 400, "ignore_eos": True}
    lengths = [rng.choice([0, 1, 2, 5]) for _ in range(200)]
    bodies = [body | {"seed": i, "policy": "r_kv", **SETTINGS, "n": 1 + i % 2} for i in range(200)]
    before = num_drawn(crowded)
    in_flight(40, [tokens_of(crowded.url, one, length) for one, length in zip(bodies, lengths, strict=True)])
    crowded.wait_until_idle(seconds=300)  # and none is held
    assert num_drawn(crowded) - before < 300 * 400 / 2  # tokens: the requests ended early
    assert crowded.app.state.server.num_open == 0
    assert crowded.service.call(lambda engine: len(engine.scheduler.waiting)).result() == 0


def num_drawn(running):
    return running.service.call(lambda engine: engine.stats.tokens).result()


def serve_some(running, count):
    """Serves short requests, and returns how many of what belongs to a request stay alive."""
    body = {"prompt": "b=3;c=7;d=b*c;?d", "max_tokens": 2, "policy": "streaming_llm", "budget": 40}
    in_flight(16, [tokens_of(running.url, body | {"seed": i}) for i in range(count)])
    running.wait_until_idle()
    end = time.monotonic() + 10
    while (alive := num_alive()) and time.monotonic() < end:  # a handler ends after its client has the answer
        time.sleep(0.1)
    return alive


def num_alive():
    """How many there are of each type that belongs to a request."""
    gc.collect()
    return collections.Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), KEPT))


def test_nothing_of_a_request_stays_alive(crowded):
    before = serve_some(crowded, 30)
    after = serve_some(crowded, 90)
    assert sum(after.values()) <= sum(before.values()) + 2, f"{before} became {after}"


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_do_not_grow_the_process(crowded, count):
    def pages():
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()

    early = serve_some(crowded, count // 5), pages()
    late = serve_some(crowded, count - count // 5), pages()
    print(
        f"resident {early[1]:,} bytes after {count // 5:,} requests, {late[1]:,} after {count:,}; alive {early[0]}, {late[0]}"
    )
    assert sum(late[0].values()) <= sum(early[0].values()) + 2
    assert late[1] - early[1] < 16 << 20  # 2 KiB a request
