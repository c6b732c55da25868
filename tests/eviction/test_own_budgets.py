"""Budgets of each layer, and of each layer and KV head: what stays, what is reserved, and what is refused."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv.cache.attention import OPEN_END
from jkv.cache.pool import num_pages_of
from jkv.engine.engine import Engine
from jkv.eviction.scores import Recency, Uniform
from jkv.testing import TINY, random_view, tiny_model

MODEL = tiny_model(config=dataclasses.replace(TINY, num_layers=3))  # as many layers as heads would hide a mix-up
PROMPT, LIMIT, INTERVAL, PAGE = list(range(1, 30)), 24, 8, 4  # of 29 tokens
BY_HEAD = ((6, 20), (48, 11), (9, 9))  # one head keeps nearly all
EVEN = jkv.evict_by(Recency(), 20, INTERVAL)
POLICIES = {
    "by layer": jkv.evict_by(Recency(), [9, 17, 48], INTERVAL),
    "by head": jkv.evict_by(Recency(), np.array(BY_HEAD), INTERVAL),
    "after the prompt": jkv.Policy("once", jkv.Evict(Recency()), jkv.AfterPrompt(1)).with_budgets(BY_HEAD),
}


def expected_end(policy, prompt=29):
    """[L, K, T] when each head drops each token: of the newest ones, it keeps as many as its budget."""
    slots = np.array(policy.slots).reshape(3, -1)
    end = np.full((3, 2, prompt + LIMIT), OPEN_END)
    for layer, head in np.ndindex(3, 2):
        budget, dropped = slots[layer, head % slots.shape[1]], 0
        for generated in range(0, LIMIT, INTERVAL):
            seen = prompt + generated
            if policy.target(prompt, generated) is not None and seen - budget > dropped:
                end[layer, head, dropped : seen - budget], dropped = seen, seen - budget
    return end


def run(policies, prompts=None, **options):
    """The results of prompts, or of the same one, under these policies, and the engine."""
    prompts = prompts or [PROMPT] * len(policies)
    options = {"max_running": 2, "max_slots": 96, "page_size": PAGE, "chunk": 8, "return_trace": True, "poison": True} | options
    engine = Engine(MODEL, policies=list(POLICIES.values()), **options)
    pairs = zip(prompts, policies, strict=True)
    tickets = [engine.submit(*each, max_new_tokens=LIMIT, stop_ids=(), request=i) for i, each in enumerate(pairs)]
    engine.run()
    return [engine.result(ticket) for ticket in tickets], engine


@pytest.mark.parametrize(("names", "num_pages"), [(POLICIES, 400), (["after the prompt"] * 4, 130)], ids=["ample", "swaps"])
def test_every_head_keeps_its_own_budget(names, num_pages):
    policies = [POLICIES[name] for name in names]
    outs, engine = run(policies, num_pages=num_pages, max_running=4)
    assert (engine.stats.preemptions > 0) == (num_pages < 400)
    for out, policy in zip(outs, policies, strict=True):
        np.testing.assert_array_equal(out.trace.end[0], expected_end(policy))


def test_samples_that_fork_from_a_compacted_prompt_keep_their_budgets():
    engine = Engine(MODEL, max_running=3, max_slots=96, page_size=PAGE, policies=[POLICIES["by head"]], return_trace=True)
    ticket = engine.submit(PROMPT, POLICIES["by head"], max_new_tokens=LIMIT, stop_ids=(), n=3)
    engine.run()
    assert engine.stats.forks == 3
    for end in engine.result(ticket).trace.end:
        np.testing.assert_array_equal(end, expected_end(POLICIES["by head"]))


def test_a_row_reserves_and_holds_the_sum_of_its_heads():
    """Two rows run at a time in a pool of twice the sum; with a page less, one does."""
    policy, prompts = POLICIES["by head"], [PROMPT[:12], PROMPT[12:24]]
    most = np.minimum(np.array(BY_HEAD) + INTERVAL, 12 + LIMIT)
    assert policy.most_pages(12, LIMIT, 3, 2, PAGE) == num_pages_of(most, PAGE).sum()
    assert policy.most_pages(12, LIMIT, 3, 2, PAGE, num_shards=2) == 2 * num_pages_of(most, PAGE).sum(axis=0).max()
    assert policy.widest(12, LIMIT, 3, 2) == 12 + LIMIT
    for pages, rows in ((2 * num_pages_of(most, PAGE).sum(), 2), (2 * num_pages_of(most, PAGE).sum() - 1, 1)):
        outs, engine = run([policy] * 2, prompts, num_pages=int(pages), prefix_cache=False)
        assert engine.stats.sample_chunks == rows * engine.stats.chunks
        for out in outs:
            np.testing.assert_array_equal(out.trace.end[0], expected_end(policy, 12))
            assert out.stats.evicted == pytest.approx((expected_end(policy, 12) < OPEN_END).sum() / 6)


def test_the_plan_counts_the_sum():
    shape = np.full((28, 2), 512)
    uneven = shape + np.where(np.arange(28)[:, None] % 2, 256, -256) * np.array([1, -1])
    even, same, other = (
        jkv.plan("r1-qwen-1.5b", device="h100", policy=policy, length=8192).own
        for policy in (jkv.snap_kv(512), jkv.snap_kv(512).with_budgets(shape), jkv.snap_kv(512).with_budgets(uneven))
    )
    assert even == same
    assert other.num_pages / other.batch == even.num_pages / even.batch
    wide = jkv.plan("r1-qwen-1.5b", device="h100", policy=jkv.snap_kv(768), length=8192).own
    assert wide.max_slots == other.max_slots
    assert other.row_bytes < wide.row_bytes


def test_a_view_of_a_layer_has_the_budgets_of_its_heads():
    view, policy = random_view(np.random.default_rng(0), slots=60), jkv.evict_by(Uniform(), BY_HEAD)
    for layer in (0, 1, 2):
        counts = (np.asarray(policy.select(view._replace(layer=layer))) >= 0).sum(axis=-1)
        np.testing.assert_array_equal(counts, np.minimum(BY_HEAD[layer], np.asarray(view.is_filled).sum(axis=-1)))
    with pytest.raises(jkv.InputError, match=r"Pass CacheView\(layer=\)"):
        policy.select(view._replace(layer=None))


def test_a_policy_with_budgets_is_known_by_them():
    assert POLICIES["by head"].budget == -(-(6 + 20 + 48 + 11 + 9 + 9) // 6)
    assert POLICIES["by head"] == jkv.evict_by(Recency(), BY_HEAD, INTERVAL) != EVEN
    assert repr(EVEN.with_budgets(BY_HEAD)) == f"{EVEN!r}.with_budgets({BY_HEAD})"
    assert "slots=((6, 20), (48, 11), (9, 9))" in POLICIES["by head"].definition


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EVEN.with_budgets([[1, 2], [3]]), "whole numbers of slots"),
        (lambda: EVEN.with_budgets([]), "whole numbers of slots"),
        (lambda: EVEN.with_budgets(8), "whole numbers of slots"),
        (lambda: EVEN.with_budgets([1.5, 2.0]), "whole numbers of slots"),
        (lambda: EVEN.with_budgets([True, True]), "whole numbers of slots"),
        (lambda: EVEN.with_budgets([[[8]]]), "whole numbers of slots"),
        (lambda: jkv.evict_by(Recency(), ["8", "9"]), "whole numbers of slots"),
        (lambda: EVEN.with_budgets([8, -1]), "at least 1 slot"),
        (lambda: EVEN.with_budgets([8, 0]), "at least 1 slot"),
        (lambda: EVEN.with_budgets([8, 1 << 31]), r"below 2\*\*31"),
        (lambda: jkv.evict_by(Recency(), [8, 64], recent=16), "must hold its sinks and recent slots"),
        (lambda: jkv.full().with_budgets([8, 9]), "no budget"),
        (lambda: jkv.rpc().with_budgets([8, 9]), "no budget"),
        (lambda: jkv.h2o(16).with_budgets([8, 9]), "budgets by layer"),
        (lambda: jkv.pyramid_kv(64).with_budgets([64, 65]), "pyramid=1"),
        (lambda: jkv.ada_kv(64).with_budgets(BY_HEAD), "scope 'compete' makes equal"),
        (lambda: jkv.evict_by(Recency(), [8, 9], scope="all"), "scope 'all' makes equal"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), jkv.Every(8), slots=(8, 9)), "as budget, 9; got 8"),
        (lambda: jkv.Policy("mine", jkv.Evict(Recency()), jkv.Every(9), slots=[8, 9]), "must be tuples"),
        (lambda: jkv.generate(MODEL, PROMPT, EVEN.with_budgets([8, 8])), r"\[L, K\] = \[3, 2\] or \[L\]; got \[2\]"),
        (lambda: jkv.generate(MODEL, PROMPT, EVEN.with_budgets([[8], [8], [8]])), r"got \[3, 1\]"),
        (
            lambda: jkv.plan("r1-qwen-1.5b", device="h100", policy=EVEN.with_budgets([8, 8]), length=512),
            r"\[28, 2\] or \[L\]; got \[2\]",
        ),
    ],
)
def test_other_budgets_are_refused(make, words):
    with pytest.raises(jkv.InputError, match=words):
        make()
