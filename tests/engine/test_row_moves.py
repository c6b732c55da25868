"""A row that is copied goes on in another engine as it does in its own: equal tokens, log-probabilities and traces."""

import numpy as np
import pytest

import jkv
from tests.support.mixes import POLICIES
from tests.support.simulator import ROW, make_engine

MOVING = [policy for policy in POLICIES if policy.share is None]
SETTINGS = {"max_new_tokens": 23, "stop_ids": (), "sampling": jkv.Sampling(seed=5)}


@pytest.fixture(scope="module")
def engines(model):
    return [make_engine(model, 3, 3 * ROW, return_trace=True) for _ in range(2)]


def finish(engine, tickets):
    engine.run()
    return [engine.result(ticket) for ticket in tickets]


@pytest.mark.parametrize("is_forked", [False, True], ids=["alone", "forked"])
def test_a_copied_row_goes_on_elsewhere_for_every_policy(engines, is_forked):
    here, there = engines
    for policies in (MOVING[i : i + 3] for i in range(0, len(MOVING), 3)):
        prompts = [[3, 7] * 13 + [1]] * 3 if is_forked else [[5, 1, 9], list(range(20)), [4] * 8]
        one = policies[0] if is_forked else None
        tickets = [here.submit(prompts[i], one or policy, **SETTINGS) for i, policy in enumerate(policies)]
        for _ in range(2):
            here.step()
        rows = here.copy_rows()
        moved = [there.resume_row(rows[ticket], one or policy) for ticket, policy in zip(tickets, policies, strict=True)]
        there.reset_stats()
        for stayed, went in zip(finish(here, tickets), finish(there, moved), strict=True):
            assert stayed.tokens.tolist() == went.tokens.tolist()
            np.testing.assert_array_equal(stayed.logprobs, went.logprobs)
            assert all((getattr(stayed.trace, name) == getattr(went.trace, name)).all() for name in ("source", "begin", "end"))
            assert stayed.samples[0].compactions == went.samples[0].compactions
        assert 0 < there.stats.tokens < 23 * len(policies)  # those before the copy were not drawn again
    assert there.runner.num_held_pages == 0
    assert here.runner.num_held_pages == 0


def test_what_has_no_row_of_its_own_is_not_copied(engines):
    here, _ = engines
    shared, finished, many = (
        here.submit([5, 1, 9], next(policy for policy in POLICIES if policy.share is not None), **SETTINGS),
        here.submit([5, 1], max_new_tokens=1),
        here.submit([7, 7], n=2, **SETTINGS),
    )
    here.step()
    assert here.copy_rows() == {}
    here.run()
    assert [here.result(ticket).finish_reason[0] for ticket in (shared, finished, many)] == ["length"] * 3


def test_a_stop_string_that_began_before_the_copy_is_found_after_it(engines):
    here, there = engines
    whole = finish(here, [here.submit([5, 1, 9], **SETTINGS)])[0]
    text = here.model.tokenizer.decode(whole.tokens[0])
    half = len(here.model.tokenizer.decode(whole.tokens[0, :8]))
    stop = text[half - 1 : half + 1]  # one character on each side
    settings = SETTINGS | {"stop_strings": [stop]}
    expected = finish(here, [here.submit([5, 1, 9], **settings)])[0]
    ticket = here.submit([5, 1, 9], **settings)
    here.step()
    rows = here.copy_rows()
    here.cancel(ticket)
    went = finish(there, [there.resume_row(rows[ticket], jkv.full())])[0]
    assert went.text == expected.text == [text[: half - 1]]
    assert went.finish_reason == expected.finish_reason == ["stop"]


def test_versions_are_counted_on(model):
    engine = make_engine(model, 3, 3 * ROW)
    engine.renumber(4)
    ticket = engine.submit([5, 1, 9], **SETTINGS)
    assert finish(engine, [ticket])[0].policy_version.tolist() == [[4] * 23]
    engine.submit([5, 1, 9], **SETTINGS)
    with pytest.raises(ValueError, match="before its first request"):
        engine.renumber(5)
    engine.sleep()
    with pytest.raises(ValueError, match="wake"):
        engine.copy_rows()
