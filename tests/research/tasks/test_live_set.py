"""The live set follows from what a text states, and an oracle that keeps it never drops what will be read."""

import numpy as np
import pytest

from jkv.cache.attention import OPEN_END
from research.tasks import trail_vocabulary
from research.tasks.live_set import SINKS, keep_live, live_share, live_slots, statements, thought_heads
from research.tasks.trails import PASSES, draw_trail, write_trace

TEXT = ["b=", "3", ";", "d=", "b", ";", "c=", "7", "?", "d", " ", "b=", "3", " ", "b=", "3"]


@pytest.fixture(scope="module")
def trail():
    """A trail's tokens, and how many of them are its prompt's."""
    tokenizer, one = trail_vocabulary.make_tokenizer(), draw_trail(np.random.default_rng(5))
    prompt, trace = tokenizer.encode(one.prompt), tokenizer.encode(write_trace(one), add_special_tokens=False)
    return tokenizer.convert_ids_to_tokens(prompt + trace), len(prompt)


def test_a_fact_is_live_from_its_first_statement_to_its_last():
    live = live_slots(TEXT)
    assert np.flatnonzero(live.any(axis=0)).tolist() == [1]  # b=3 alone is stated again
    assert np.flatnonzero(live[:, 1]).tolist() == list(range(2, 15))


def test_the_latest_statement_takes_over_as_soon_as_it_is_made():
    live = live_slots(TEXT, is_latest=True)
    assert np.flatnonzero(live.any(axis=0)).tolist() == [1, 12]
    assert np.flatnonzero(live[:, 1]).tolist() == list(range(2, 12))
    assert np.flatnonzero(live[:, 12]).tolist() == [13, 14]


def test_every_statement_but_the_first_of_its_fact_finds_its_content_in_the_live_set(trail):
    tokens, _ = trail
    for is_latest in (False, True):
        live, seen = live_slots(tokens, is_latest), set()
        for fact, content in statements(tokens):
            if fact in seen:
                now = content - 1  # the query of the fact's name
                assert tokens[content] in [tokens[i] for i in np.flatnonzero(live[now])]
                assert live[now].sum() <= len(seen) + 1  # and the head of the running thought
            seen.add(fact)


@pytest.mark.parametrize("is_latest", [False, True], ids=["first", "latest"])
def test_every_thought_can_read_which_pass_goes_on(trail, is_latest):
    """At a blank line the next step is named after the running pass, which nothing else of the live set says."""
    tokens, start = trail
    live, heads = live_slots(tokens, is_latest), list(thought_heads(tokens))
    starts = [i for i in range(start, len(tokens)) if tokens[i] == "\n\n"]
    named = [i for i in starts if tokens[i + 1].removesuffix(">") in set(PASSES)]
    assert len(named) > 20
    for i in named:
        name = tokens[i + 1].removesuffix(">")
        last = max(head for head in heads if head <= i)
        assert tokens[last] == name
        assert live[i, last]
    assert all(live[now, heads].sum() >= 1 for now in range(heads[0] + 1, heads[-1]) if now not in heads)


def test_an_oracle_keeps_sinks_the_live_set_and_the_last_tokens_within_its_budget(trail):
    tokens, start = trail
    live, budget = live_slots(tokens), 64
    end = keep_live(live, start, budget, 16)
    assert live_share(tokens, start) * len(tokens) + SINKS < budget
    for now in range(start, len(tokens), 16):
        kept = np.flatnonzero((end > now) & (np.arange(len(tokens)) < now))
        must = np.flatnonzero(live[now]).tolist()
        assert len(kept) == budget
        assert set(must) | set(range(SINKS)) | {now - 1} <= set(kept.tolist())
    assert (end[start - 1 :] > start).all()
    assert (end == OPEN_END).any()
