"""`JkvSampler`: requests of many tasks, in the order of a trainer's protocol, on one engine."""

import asyncio
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jkv
from jkv.integrations.sampler import JkvSampler
from jkv.model.weight_shapes import init_params

R_KV = jkv.r_kv(budget=16, interval=8, window=4)
SETTINGS = {"max_running": 3, "max_slots": 64, "page_size": 4, "chunk": 4}


@dataclasses.dataclass
class Params:
    """The fields that a trainer's sampling parameters have."""

    max_tokens: int = 12
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = -1
    seed: int | None = 5
    return_logprobs: bool = True
    return_logits: bool = False
    beam_size: int | None = None


@dataclasses.dataclass
class Request:
    prompt: object
    sampling_params: Params | None = dataclasses.field(default_factory=Params)
    request_id: str = "a"
    metadata: dict = dataclasses.field(default_factory=dict)


def running(model, scenario, **settings):
    """Runs a scenario with a sampler that is started, and stopped at its end without anything left."""

    async def main():
        sampler = JkvSampler(model, R_KV, **SETTINGS | settings)
        await sampler.start()
        try:
            return await asyncio.wait_for(scenario(sampler), 120)
        finally:
            engine = sampler._engine
            await sampler.stop()
            assert engine.is_idle
            assert engine.runner.num_held_pages == 0

    return asyncio.run(main())


def sync(params=None, version=7):
    return SimpleNamespace(request_id=f"sync {version}", policy_version=version, weights=params)


def test_responses_have_the_tokens_that_the_engine_draws_and_what_replays_them(model):
    async def scenario(sampler):
        return await sampler.sample(
            [Request([5, 1, 9], request_id="x"), Request([5, 1, 9], request_id="y"), Request([3, 7] * 9)]
        )

    responses = running(model, scenario, return_trace=True)
    engine = jkv.Engine(model, policies=[R_KV], **SETTINGS)
    tickets = [engine.submit(prompt, R_KV, jkv.Sampling(seed=5), 12, n) for prompt, n in (([5, 1, 9], 2), ([3, 7] * 9, 1))]
    engine.run()
    expected = [row for ticket in tickets for row in engine.result(ticket).tokens]
    assert [one.request_id for one in responses] == ["x", "y", "a"]
    for one, tokens in zip(responses, expected, strict=True):
        assert one.token_ids.tolist() == tokens.tolist()[: len(one.token_ids)]
        assert one.logprobs.shape == one.token_ids.shape
        assert one.metadata["policy_versions"].tolist() == [0] * len(one.token_ids)
        replay = jkv.score(model, one.token_ids[None], one.metadata["trace"], prompts=[one.prompt_token_ids])
        np.testing.assert_allclose(replay.logprobs[0], one.logprobs, atol=1e-4)
        assert one.error is None
        assert one.finish_reason in ("stop", "length")


def test_a_request_that_cannot_be_served_has_its_own_error(model):
    bad = [
        Request([5, 1], Params(beam_size=4)),
        Request([5, 1], Params(return_logits=True)),
        Request([10**6]),
        Request(list(range(4, 30)) * 5, metadata={"policy": jkv.full()}),
        Request([5, 1], Params(temperature=-1.0)),
    ]

    async def scenario(sampler):
        return await sampler.sample([*bad, Request([5, 1, 9])])

    *refused, good = running(model, scenario)
    assert [one.finish_reason for one in refused] == ["error"] * len(bad)
    words = ("beam_size=4", "return_logits", "Token ids", "slots", "temperature")
    assert all(word in one.error.message for one, word in zip(refused, words, strict=True))
    assert all(one.error.error_type in ("InputError", "ValueError") for one in refused)
    assert good.error is None
    assert len(good.token_ids) > 0


def test_one_request_and_a_bare_prompt_have_one_response(model):
    async def scenario(sampler):
        return await sampler.sample(Request([5, 1, 9], None)), await sampler.sample([5, 1, 9])

    one, bare = running(model, scenario, max_slots=80)
    assert one.logprobs is None
    assert len(one.token_ids) == 64
    assert bare.prompt_token_ids.tolist() == [5, 1, 9]


def test_weights_change_between_turns_and_rows_go_on(model):
    other = init_params(model.config, jax.random.key(17), scale=0.3)

    async def scenario(sampler):
        request = Request([5, 1, 9], Params(max_tokens=40))
        request.sampling_params.seed = 1
        task = asyncio.create_task(sampler.sample(request))
        while not (await sampler.get_load_info()).num_requests_running:
            await asyncio.sleep(0)
        new = sync(other)
        assert await sampler.get_transfer_status(new.request_id) == "UNKNOWN"
        await sampler.bind_weight_sync(new)
        await sampler.pre_weight_sync(new)
        assert await sampler.get_transfer_status(new.request_id) == "PENDING"
        load = await sampler.get_load_info()
        await sampler.weight_sync(new)
        await sampler.post_weight_sync(new)
        assert await sampler.get_transfer_status(new.request_id) == "SUCCESS"
        later = await sampler.sample(Request([5, 1, 9]))
        return await task, load, later, sampler.version

    out, load, later, version = running(model, scenario)
    assert load.num_requests_running in (0, 1)
    assert 0 <= load.kv_cache_usage_perc <= 1
    versions = out.metadata["policy_versions"]
    assert (np.diff(versions) >= 0).all()
    assert set(versions.tolist()) <= {0, 1}
    assert later.metadata["policy_versions"].tolist() == [1] * len(later.token_ids)
    assert version == 7


@pytest.mark.parametrize("bad", ["missing", "other", "shape", "abort"])
def test_weights_that_cannot_be_used_leave_the_old_ones(model, bad):
    shrunk = model.params.replace(final_norm=model.params.final_norm[:-1])

    async def scenario(sampler):
        before = await sampler.sample(Request([5, 1, 9]))
        weights = {"missing": None, "other": {"a": 1}, "shape": shrunk, "abort": model.params}[bad]
        request = sync(weights)
        await sampler.pre_weight_sync(request)
        if bad == "abort":
            await sampler.weight_sync(request)
            await sampler.abort_weight_sync(request)
        else:
            if bad == "shape":
                await sampler.weight_sync(request)
            change = sampler.post_weight_sync if bad == "shape" else sampler.weight_sync
            with pytest.raises(ValueError, match=r"weight|Params|final_norm"):
                await change(request)
            if bad != "shape":
                await sampler.abort_weight_sync(request)
        assert await sampler.get_transfer_status(request.request_id) == "FAILED"
        return before, await sampler.sample(Request([5, 1, 9])), sampler.version

    before, after, version = running(model, scenario)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert version == 0


def test_a_task_that_is_cancelled_ends_its_requests(model):
    async def scenario(sampler):
        await sampler.pause()
        requests = [Request([5, 1, 9], Params(max_tokens=60)) for _ in range(5)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample(requests), 0.05)
        await sampler.resume()
        while (await sampler.get_load_info()).num_requests_running:
            await asyncio.sleep(0.01)
        load = await sampler.get_load_info()
        assert (load.num_requests_waiting, load.num_requests_running) == (0, 0)

    running(model, scenario)


def test_what_a_trainer_asks_before_it_sends_weights(model):
    sampler = JkvSampler(model, R_KV, **SETTINGS)
    shapes = sampler.get_target_state()
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, model.params)
    metadata = asyncio.run(sampler.get_weight_sync_metadata())
    assert metadata["policy_version"] == 0
    assert asyncio.run(sampler.get_mesh()) is None
    with pytest.raises(NotImplementedError, match="Rows do not move"):
        asyncio.run(sampler.migrate_kv_cache("a", "b", [1]))
    with pytest.raises(RuntimeError, match="must be started"):
        asyncio.run(sampler.sample([Request([1])]))
