"""The gate beside each slot, and thresholds that drop by it, against an independent forward pass in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

import jkv
from jkv.cache.attention import OPEN_END
from jkv.engine.engine import Engine
from jkv.eviction.scores import Recency
from jkv.testing import TINY, TinyTokenizer, random_gate, tiny_model
from tests.cache.test_pool import assert_allocator_is_consistent
from tests.eviction.test_gate_kinds import reference

PROMPT, LONG = list(range(1, 30)), [7 * i % 31 + 1 for i in range(300)]  # the second is prefilled in two chunks
KINDS = {"dms": 0.0, "linear": 0.0, "mlp": 0.0, "fast": 0.5}  # the threshold that drops about half
WINDOW, INTERVAL, SINKS, LIMIT = 6, 8, 2, 40


def model_of():
    return tiny_model(tokenizer=TinyTokenizer())


GATES = {name: random_gate(model_of(), name) for name in KINDS}


def by_threshold(name="linear", **settings):
    """A policy that drops below the threshold of a kind."""
    given = {"threshold": KINDS[name], "window": WINDOW, "interval": INTERVAL, "sinks": SINKS} | settings
    return jkv.learned_gate(GATES[name], **given)


def by_budget(name="linear", **settings):
    return jkv.learned_gate(GATES[name], 16, window=4, interval=INTERVAL, sinks=SINKS, **settings)


def norm(x, weight, epsilon):
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)


def states_of(params, tokens, end):
    """The hidden states that enter each layer, and those after its norm: two [L, T, D]. `end` ([L, K, T]) is when keys left."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    c, num = params.config, len(tokens)
    half = c.head_size // 2
    angle = np.arange(num)[:, None] * c.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def heads(x, weight, bias, turned=True):
        x = (x @ weight + bias).reshape(num, -1, c.head_size)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1) if turned else x

    hidden, entering, normed = params.embedding[tokens], [], []
    query_at, key_at = np.arange(num)[:, None], np.arange(num)
    for layer, w in enumerate(params.layers):
        x = norm(hidden, w.attention_norm, c.norm_epsilon)
        entering.append(hidden)
        normed.append(x)
        query = heads(x, w.query, w.query_bias)
        key, value = heads(x, w.key, w.key_bias), heads(x, w.value, w.value_bias, turned=False)
        out = np.empty_like(query)
        for n in range(c.num_query_heads):
            k = n // c.group_size
            is_read = (key_at <= query_at) & (query_at < end[layer, k, :num])
            logits = np.where(is_read, query[:, n] @ key[:, k].T / np.sqrt(c.head_size), -np.inf)
            share = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out[:, n] = share / share.sum(axis=-1, keepdims=True) @ value[:, k]
        hidden = hidden + out.reshape(num, -1) @ w.out
        x = norm(hidden, w.mlp_norm, c.norm_epsilon)
        inner = x @ w.gate
        hidden = hidden + (inner / (1 + np.exp(-inner)) * (x @ w.up)) @ w.down
    return np.array(entering), np.array(normed)


def gates_of(model, name, tokens, end):
    """[L, K, T] the gate of every token, from a forward pass of its own."""
    hidden, normed = states_of(model.params, tokens, end)
    each = [reference(GATES[name], name, i, hidden[i], normed[i], TINY.norm_epsilon) for i in range(TINY.num_layers)]
    return np.moveaxis(np.array(each), 2, 1)


def engine_of(policies, num_pages=4000, **settings):
    """An engine with room for the long prompt."""
    sizes = {"max_running": 4, "max_slots": 352, "page_size": 4, "chunk": 8, "poison": True, "return_trace": True}
    return Engine(model_of(), num_pages=num_pages, policies=policies, **sizes | settings)


def held_in(pool, row, layer, head):
    """The positions in a row's slots, and the numbers of all its slots."""
    length = pool.length[layer, row, head]
    position = pool.position[pool.page_table[layer, row, head]].reshape(-1)[:length]
    return position, pool.slot_data["gate"][layer, row, head]


def assert_stored(engine, name):
    """Every slot of every running row has its token's gate, and no other slot has any; returns how many were compared."""
    pool, count = jax.device_get(engine.runner.state.cache.pool), 0
    for row, sample in engine.scheduler.running.items():
        tokens = np.concatenate([sample.request.prompt, sample.completion.tokens]).astype(int)
        expected = gates_of(engine.model, name, tokens, sample.row.records.trace.end)
        for layer, head in np.ndindex(expected.shape[:2]):
            position, numbers = held_in(pool, row, layer, head)
            filled = position >= 0
            np.testing.assert_allclose(
                numbers[: len(position)][filled], expected[layer, head, position[filled]], rtol=1e-4, atol=2e-3
            )
            assert not numbers[len(position) :].any()
            assert not numbers[: len(position)][~filled].any()
            count += filled.sum()
    return count


def run(engine, requests, name="linear"):
    """The results of requests, with the stored gates compared now and then, and the pages every turn."""
    greedy = jkv.Sampling(temperature=1.0, seed=3)
    tickets = [
        engine.submit(prompt, policy, greedy, LIMIT, n=n, stop_ids=(), request=i)
        for i, (prompt, policy, n) in enumerate(requests)
    ]
    compared = turns = 0
    while not engine.is_idle:
        engine.step()
        turns += 1
        assert engine.runner.num_held_pages <= min(engine.scheduler.reserved, engine.num_pages)
        tables = [prefix.row.snapshot.block_table for prefix in engine.scheduler.prefixes.values() if prefix.row.snapshot]
        assert_allocator_is_consistent(jax.device_get(engine.runner.state.cache.pool), jax.device_get(tables))
        if turns % 3 == 0:
            compared += assert_stored(engine, name)
        for row, sample in engine.scheduler.running.items():
            length = jax.device_get(engine.runner.state.cache.pool.length)[:, row]
            if not sample.request.policy.evicts_in_steps:
                np.testing.assert_allclose(sample.row.filled, length.mean(axis=1))
                of_heads, counted = np.ceil(length / 4).sum(), sample.num_pages(0, TINY.num_kv_heads, 4)
                assert counted >= of_heads if "compete" in sample.request.policy.definition else counted == of_heads
    assert compared > 40
    assert engine.runner.num_held_pages == 0
    return [engine.result(ticket) for ticket in tickets]


def assert_dropped_below(model, out, i, policy, name):
    """Sample i dropped exactly the tokens below the threshold, when they had left the window and the row was due."""
    schedule, num = policy.schedule, len(out.prompts[i])
    tokens = np.concatenate([out.prompts[i], out.tokens[i, : out.lengths[i]]]).astype(int)
    end = out.trace.end[i]
    gate = gates_of(model, name, tokens, end)
    assert np.abs(gate - schedule.threshold).min() > 1e-4  # rounding decides nothing
    due = [now for g in range(0, LIMIT, INTERVAL) if (now := num + g) > schedule.window]
    assert due
    expected = np.full(gate.shape, OPEN_END)
    for t in range(SINKS, len(tokens)):
        when = next((now for now in due if now - 1 - t >= schedule.window), None)
        if when is not None:
            expected[:, :, t] = np.where(gate[:, :, t] < schedule.threshold, when, OPEN_END)
    np.testing.assert_array_equal(end[:, :, : len(tokens)], expected)
    counts = (expected == OPEN_END).sum(axis=-1)
    assert len(set(counts.ravel().tolist())) > 1  # heads hold different numbers of slots
    return (expected != OPEN_END).mean(axis=(0, 1)).sum()


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_stored_and_drops_exactly_what_is_below_its_threshold(name):
    policy = by_threshold(name)
    engine = engine_of([policy])
    (out,) = run(engine, [(PROMPT, policy, 1)], name)
    assert out.stats.evicted == pytest.approx(assert_dropped_below(engine.model, out, 0, policy, name))


def test_a_prompt_in_chunks_has_the_gates_of_one_pass():
    policy = by_threshold()
    engine = engine_of([policy])
    (out,) = run(engine, [(LONG, policy, 1)])
    assert_dropped_below(engine.model, out, 0, policy, "linear")


def test_forked_rows_have_the_gates_of_their_prompt():
    policies = by_threshold(), by_threshold(window=64), by_budget()  # the second shares its prompt with the full cache
    engine = engine_of([*policies, jkv.full()])
    outs = run(engine, [(PROMPT, policies[0], 3), (PROMPT, policies[1], 2), (PROMPT, jkv.full(), 2), (PROMPT, policies[2], 2)])
    assert engine.stats.forks == 9
    for i in range(3):
        assert_dropped_below(engine.model, outs[0], i, policies[0], "linear")
    assert len({tuple(row) for row in outs[0].tokens.tolist()}) == 3


def test_rows_beside_those_that_evict_in_steps_have_their_gates_too():
    """The slot that a step vacates is filled by the next token, with its gate."""
    policies = by_threshold(), jkv.h2o(16), by_budget()
    engine = engine_of(policies)
    outs = run(engine, [(PROMPT, policy, 1) for policy in policies])
    assert_dropped_below(engine.model, outs[0], 0, policies[0], "linear")


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_preempted_rows_keep_their_gates_and_their_tokens(n):
    policy = by_threshold()
    requests = [(PROMPT, policy, n), (PROMPT[::-1], policy, n), (PROMPT[5:], by_budget(), n), (PROMPT[3:], jkv.full(), n)]
    quiet, short = (engine_of([policy, by_budget(), jkv.full()], num_pages, max_slots=72) for num_pages in (4000, 150))
    expected, outs = run(quiet, requests), run(short, requests)
    assert short.stats.preemptions > 0 == quiet.stats.preemptions
    for one, other in zip(expected, outs, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.trace.end, other.trace.end)


@pytest.mark.parametrize(
    "policy",
    [by_threshold("dms"), by_budget("dms"), by_budget("dms", scope="compete")],
    ids=["threshold", "budget", "heads compete"],
)
def test_traces_replay(policy):
    engine = engine_of([policy])
    outs = run(engine, [(PROMPT, policy, 3)], "dms")
    difference = np.abs(np.asarray(jkv.score(engine.model, outs[0], trace=outs[0].trace).logprobs) - outs[0].logprobs)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4
    shifted = outs[0].trace.replace(end=outs[0].trace.end - (outs[0].trace.end < OPEN_END))
    assert np.abs(np.asarray(jkv.score(engine.model, outs[0], trace=shifted).logprobs) - outs[0].logprobs).max() > 1e-3


def test_with_room_enough_it_is_the_full_cache():
    model, knobs = model_of(), {"max_new_tokens": LIMIT, "stop_ids": (), "page_size": 4, "progress": False}
    full = jkv.generate(model, PROMPT, **knobs)
    for policy in (
        by_threshold(threshold=-1e9),
        by_threshold(threshold=1e9, window=100),
        jkv.learned_gate(GATES["linear"], 99),
    ):
        out = jkv.generate(model, PROMPT, policy, **knobs)
        assert out.stats.evicted == 0
        np.testing.assert_array_equal(out.tokens, full.tokens)


def test_a_window_and_the_sinks_are_left_where_all_gates_are_low():
    policy = by_threshold(threshold=1e9)
    out = jkv.generate(model_of(), PROMPT, policy, max_new_tokens=LIMIT, stop_ids=(), page_size=4, return_trace=True)
    held = out.trace.end[0] == OPEN_END
    last = len(PROMPT) + LIMIT - INTERVAL  # of the last compaction; a row's end compacts nothing
    np.testing.assert_array_equal(np.flatnonzero(held.all(axis=(0, 1))), [0, 1, *range(last - WINDOW, len(PROMPT) + LIMIT)])
    assert (held.sum(axis=-1) == SINKS + WINDOW + INTERVAL).all()


def test_the_whole_suite_holds_with_a_threshold():
    report = jkv.verify(by_threshold())
    assert report.is_ok, str(report)


def test_other_weights_thresholds_and_windows_compile_nothing():
    def sizes():
        return {
            name: getattr(jkv.engine.programs, name).num_compiled() for name in ("decode_chunk", "prefill_chunk", "compact")
        }

    def tokens(gate, **settings):
        policy = jkv.learned_gate(gate, **{"threshold": 0.0, "window": WINDOW, "interval": INTERVAL} | settings)
        engine = engine_of([policy], max_slots=72)
        ticket = engine.submit(PROMPT, policy, max_new_tokens=LIMIT, stop_ids=())
        engine.run()
        return engine.result(ticket).tokens.tolist()

    first, before = tokens(GATES["linear"]), sizes()
    others = [
        tokens(random_gate(model_of(), seed=5)),
        tokens(GATES["linear"], threshold=0.5, sinks=0),
        tokens(GATES["linear"], window=9),
    ]
    assert sizes() == before
    assert first not in others


def test_two_gates_in_one_engine_are_refused_before_anything_compiles():
    one, other = by_threshold(), jkv.learned_gate(random_gate(model_of(), seed=1), 64)
    with pytest.raises(ValueError, match=r"one gate for all of its rows; it has Gate\(.*learned_gate reads Gate\(.*each gate"):
        engine_of([one, other])
    with pytest.raises(ValueError, match="one gate for all of its rows"):
        jkv.generate(model_of(), [PROMPT, PROMPT], [one, other])
    engine = engine_of([one])
    with pytest.raises(ValueError, match="one gate for all of its rows"):
        engine.submit(PROMPT, other)
    engine.submit(PROMPT, by_budget(), max_new_tokens=4)  # the same gate by another rule


def test_an_engine_that_computes_no_gate_refuses_one():
    with pytest.raises(ValueError, match=r"learned_gate needs gate=True; this engine was built with gate=False"):
        engine_of([jkv.full()]).submit(PROMPT, by_threshold())


def test_the_gate_of_another_model_is_refused_before_anything_compiles():
    policy = by_threshold()
    with pytest.raises(ValueError, match=r"gate must be of this model, with weights with the digest .*trained for this model"):
        jkv.generate(tiny_model(seed=1), PROMPT, policy)
    wider = tiny_model(config=dataclasses.replace(TINY, width=64))
    with pytest.raises(ValueError, match=r"of this model, with weight \(2, 2, 64\); learned_gate has \(2, 2, 32\)"):
        jkv.generate(wider, PROMPT, policy)
    unknown = dataclasses.replace(GATES["fast"], about={})  # as a published file: by its shapes alone
    jkv.generate(tiny_model(seed=1), PROMPT, jkv.learned_gate(unknown, 64), max_new_tokens=1, progress=False)
    fewer = tiny_model(config=dataclasses.replace(TINY, num_query_heads=2))
    with pytest.raises(ValueError, match=r"with query \(2, 2, 1, 4, 32\); learned_gate has \(2, 2, 2, 4, 32\)"):
        jkv.generate(fewer, PROMPT, jkv.learned_gate(unknown, 64))


def test_a_gate_stays_in_use_while_the_model_is_trained():
    model, policy = model_of(), by_threshold()
    engine = engine_of([policy])
    engine.update(tiny_model(seed=1).params)
    ticket = engine.submit(PROMPT, policy, max_new_tokens=LIMIT, stop_ids=())
    engine.run()
    out = engine.result(ticket)
    assert_dropped_below(dataclasses.replace(model, params=tiny_model(seed=1).params), out, 0, policy, "linear")


def test_the_numbers_and_the_weights_are_counted_in_bytes():
    """4 bytes for each layer, KV head and slot of a row, and the gate's weights once."""
    carrying, plain = (engine_of([policy], 100, max_slots=96) for policy in (by_threshold(), jkv.full()))
    assert carrying.runner.meter.row_bytes - plain.runner.meter.row_bytes == 4 * 4 * TINY.num_layers * TINY.num_kv_heads * 96
    model, device = model_of(), jkv.Device("small", "cpu", 10**9)
    unread = jkv.Policy("unread", jkv.Evict(Recency()), jkv.Threshold(0.0, WINDOW, INTERVAL))
    policies = by_threshold(), unread
    own, other = (jkv.plan(model, device, policy, length=96, prompt=20, batch=3, page_size=4).own for policy in policies)
    numbers = 4 * 3 * TINY.num_layers * TINY.num_kv_heads * own.max_slots
    weights = 4 * TINY.num_layers * TINY.num_kv_heads * (TINY.width + 1)
    assert own.total_bytes - other.total_bytes == numbers + weights
    assert own.max_slots == 96  # nothing promises that the text drops anything
