"""Kept rows of every policy: a turn that continues one gives what a row that had drawn its tokens would give."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.engine.runner import Runner
from jkv.policies import POLICIES
from tests.policies.test_conformance import build
from tests.support.mixes import BreakingTokenizer
from tests.support.turns import FREE, LIMITS, PAGE, PROMPT, R_KV, RNG, ROW, assert_same_bits, converse, make

pytestmark = pytest.mark.usefixtures("short_prefills")

ALL = {name: build(name) for name in POLICIES}
CACHE = {"interval": 16, "positions": "cache"}
REFUSED = {name: policy for name, policy in ALL.items() if policy.share is not None}
REFUSED |= {"moved sinks": jkv.streaming_llm(budget=24, **CACHE)}
KEPT = {name: policy for name, policy in ALL.items() if name not in REFUSED}


@pytest.fixture(scope="module")
def breaking(model):
    return dataclasses.replace(model, tokenizer=BreakingTokenizer())


def replay(model, out):
    """How far the log-probabilities of all turns are from their replay by the last turn's trace."""
    (whole,) = out.transcripts
    count = len(whole.tokens) - 1
    scored = jkv.score(
        model, whole.tokens[None, 1:], out.trace, prompts=[whole.tokens[:1]], lengths=[count], sampling=out.sampling[0]
    )
    return np.abs(np.asarray(scored.logprobs)[0] - whole.logprobs[1:])[whole.loss_mask[1:]]


@pytest.fixture(scope="module")
def engines(breaking):
    """For a policy: an engine that may have it."""
    made = {}

    def of(policy, **options):
        key = policy, *options.items()
        if key not in made:
            made.clear()
            made[key] = make(breaking, 2, 2 * ROW, [policy], return_trace=True, **options)
        return made[key]

    return of


@pytest.mark.rounding
@pytest.mark.parametrize("name", KEPT)
def test_the_trace_of_all_turns_replays_what_the_engine_computed(breaking, engines, name):
    outs = converse(engines(KEPT[name]), KEPT[name])
    difference = replay(breaking, outs[-1])
    assert len(difference) == sum(LIMITS)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4
    for out in outs:  # each turn by itself, as any result
        scored = jkv.score(breaking, out, out.trace)
        assert np.abs(np.asarray(scored.logprobs) - out.logprobs).max() <= 1e-4


@pytest.mark.rounding
@pytest.mark.parametrize("name", [name for name, policy in KEPT.items() if not (policy.steer or policy.read)])
def test_new_tokens_compress_as_tokens_that_the_row_had_drawn(engines, name):
    """Schedules count them all the same, so compactions drop the same slots: one request is forced to draw the conversation."""
    engine = engines(KEPT[name])
    outs = converse(engine, KEPT[name], sampling=jkv.Sampling(seed=2))
    (whole,) = outs[-1].transcripts
    forced = whole.tokens[len(PROMPT) :]
    ticket = engine.submit(PROMPT, policy=KEPT[name], forced_tokens=forced.tolist())
    engine.run()
    out = engine.result(ticket)
    is_drawn = whole.loss_mask[len(PROMPT) :]
    np.testing.assert_allclose(out.logprobs[0][is_drawn], whole.logprobs[len(PROMPT) :][is_drawn], atol=2e-5)
    same = out.trace.end[0] == outs[-1].trace.end[0]
    # The last step of the forced request is followed by no compaction, nor is the last turn's.
    assert same.all()
    assert outs[-1].samples[0].compactions == out.samples[0].compactions


@pytest.mark.parametrize("name", KEPT)
def test_a_row_that_was_in_host_memory_gives_the_same_bits(engines, name):
    def sleep(engine):
        engine.sleep()
        engine.wake()

    engine = engines(KEPT[name])
    assert_same_bits(converse(engine, KEPT[name], sleep), converse(engine, KEPT[name]))


@pytest.mark.rounding
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_rows_of_quantised_pages_go_on(model, kv_dtype):
    def sleep(engine):
        engine.sleep()
        engine.wake()

    engine = make(model, kv_dtype=kv_dtype, return_trace=True)
    outs = converse(engine, R_KV)
    in_floats = dataclasses.replace(outs[-1], trace=outs[-1].trace.replace(kv_format=None))
    assert np.percentile(replay(model, outs[-1]), 90) <= 1e-5  # a rounding may move a number to the next code, as in one turn
    assert np.percentile(replay(model, in_floats), 50) > 1e-4
    assert_same_bits(converse(engine, R_KV, sleep), outs)


@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_go_on_are_refused_by_name(breaking, name):
    policy = REFUSED[name]
    engine = make(breaking, policies=[policy])
    with pytest.raises(ValueError, match=rf"keep needs a row that a later turn can continue; .*{policy.name[:8]}.*Leave"):
        engine.submit(PROMPT, policy=policy, keep=True)
    assert engine.is_idle


@pytest.mark.parametrize("name", ["r_kv", "streaming_llm", "h2o"])
def test_a_long_turn_holds_no_more_pages_than_its_policy_allows(breaking, engines, name):
    policy, held = KEPT[name], []
    engine = engines(policy)
    runner = engine.runner
    ticket = engine.submit(PROMPT, policy=policy, max_new_tokens=9, keep=True, **FREE)
    engine.run()
    with pytest.MonkeyPatch.context() as patch:
        append = Runner._append

        def noting(*arguments):
            yield from append(*arguments)
            held.append(runner.num_held_pages)

        patch.setattr(Runner, "_append", noting)
        ticket = engine.extend(ticket, RNG.integers(4, 30, 100).tolist(), max_new_tokens=9, **FREE)
        engine.run()
    engine.release(ticket)
    engine.take([ticket])
    assert len(held) >= 100 // 16
    assert max(held) <= 4 * -(-(24 + 17) // PAGE), "the budget and a piece"
