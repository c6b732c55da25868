"""What is compiled before the first client comes."""

import pytest

import jkv
from jkv.engine.clocks import COMPILING
from jkv.serving.run import warm_up
from tests.serving.conftest import SETTINGS, make_engine

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.1},
]


def test_usual_requests_compile_nothing_after_the_warm_up(chat_model):
    policy = jkv.r_kv(**SETTINGS)
    with jkv.Service(make_engine(chat_model)) as service:
        warm_up(service, policy, is_whole=True)
        assert service.engine.stats.steps == 0  # it is not counted
        compiled = COMPILING.count
        asked = {"policy": policy, "max_new_tokens": 70, "stop_ids": ()}
        tickets = [service.submit([5] * 30, sampling=jkv.Sampling(**one), **asked) for one in SAMPLINGS]
        tickets += [service.submit([6] * 90, n=3, sampling=jkv.Sampling(temperature=1.0), **asked)]
        tickets += [service.submit([5] * 30, sampling=jkv.Sampling(temperature=0.2, top_p=0.9), model_logprobs=True, **asked)]
        first = service.submit([7] * 9, keep=True, **asked)
        first.result()
        tickets.append(first.extend([8] * 20, max_new_tokens=9, stop_ids=()))
        for ticket in tickets:
            ticket.result()
        assert COMPILING.count == compiled


@pytest.mark.parametrize("policy", [jkv.reason_cache(), jkv.streaming_llm(budget=48, interval=8, positions="cache")], ids=str)
def test_what_a_policy_refuses_is_left_out(chat_model, policy):
    engine = jkv.Engine(chat_model, max_running=2, max_slots=64, page_size=16, policies=[policy], max_stop_ids=8, chunk=8)
    with jkv.Service(engine) as service:
        warm_up(service, policy, is_whole=True)
        assert not service.engine.tickets
        assert service.submit([5, 6], policy=policy, max_new_tokens=4, stop_ids=()).result().lengths.tolist() == [4]
