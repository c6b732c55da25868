"""What every policy must do, whatever its idea; a new line in the table of policies is enough to be tested here."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.policies import POLICIES, make
from jkv.pool import EMPTY

SMALL = {"budget": 24, "interval": 16, "window": 4}
PROMPTS = [[5, 1, 9], list(range(20)), [3, 7] * 16 + [1]]
KNOBS = {"max_new_tokens": 96, "page_size": 4, "stop_ids": (), "progress": False}
EVICTING = [name for name in POLICIES if name != "full"]


def build(name, **changes):
    """A policy at test size: only the settings that its recipe has."""
    fields = inspect.signature(POLICIES[name]).parameters
    return make(name, {field: value for field, value in (SMALL | changes).items() if field in fields})


def random_view(rng, batch=2, heads=2, slots=40, window=8, group=2, dtype=jnp.float32, budget=None):
    """Random caches of different lengths; what is beyond a length is NaN."""
    length = rng.integers(window, slots + 1, size=(batch, 1))
    seen = np.sort(np.stack([rng.permutation(3 * slots)[:slots] for _ in range(batch * heads)]), axis=-1)
    position = seen.reshape(batch, heads, slots).astype(np.int32)
    for b in range(batch):  # the newest `window` positions are the same everywhere, as after decoding
        position[b, :, length[b, 0] - window : length[b, 0]] = 3 * slots + np.arange(window)
    position = np.where(np.arange(slots) < length[:, :, None], position, EMPTY)
    shape = (batch, heads, slots, 8)
    key, value = rng.standard_normal((2, *shape)).astype(np.float32)
    key[:, :, 1::3] = key[:, :, :1] + 0.1 * key[:, :, 1::3]  # look-alikes
    key, value = (np.where((position == EMPTY)[..., None], np.nan, x) for x in (key, value))
    query = rng.standard_normal((batch, heads * group, window, 8))
    prompt_length = jnp.asarray([3] * batch, jnp.int32)
    budget = None if budget is None else jnp.full((batch, heads), budget, jnp.int32)
    mass = jnp.asarray(np.where(position == EMPTY, np.nan, rng.random(position.shape)), jnp.float32)
    key, value, query = (jnp.asarray(x, dtype) for x in (key, value, query))
    position = jnp.asarray(position)
    return jkv.CacheView(key, value, position, query, mass, layer=0, budget=budget, prompt_length=prompt_length)


@pytest.fixture(scope="module")
def uncut(model):
    return jkv.generate(model, PROMPTS, **KNOBS)


class Squeezed(NamedTuple):
    """A run and its policy."""

    policy: jkv.Policy
    out: jkv.Result
    stats: Any
    trace: jkv.Trace


@pytest.fixture(scope="module", params=list(POLICIES))
def squeezed(request, model):
    """Each policy's compressed run, with its trace."""
    policy = build(request.param)
    out = jkv.generate(model, PROMPTS, policy=policy, sampling=jkv.Sampling(seed=3), return_trace=True, **KNOBS)
    return Squeezed(policy, out, out.stats, out.trace)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_budget_as_long_as_the_sequence_gives_the_full_caches_tokens(name, model, uncut):
    whole = build(name, budget=len(PROMPTS[2]) + 96, beta=1.0, ratio=1)  # in every layer; of the thought
    out = jkv.generate(model, PROMPTS, policy=whole, **KNOBS)
    np.testing.assert_array_equal(out.tokens, uncut.tokens)
    np.testing.assert_allclose(out.logprobs, uncut.logprobs, atol=1e-4)
    assert out.stats.compactions == 0


def test_replay_gives_the_log_probabilities_of_the_engine(model, squeezed):
    replayed = jkv.score(model, squeezed.out, trace=squeezed.trace).logprobs
    difference = np.abs(np.asarray(replayed) - squeezed.out.logprobs)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4


def simulate(policy, prompt, steps, num_layers=2):
    """When a row of `prompt` tokens is compacted in `steps` steps, and how much each layer drops; the last step ends it."""
    filled, when = np.full(num_layers, prompt), set()
    dropped = np.zeros(num_layers, int)
    for generated in range(steps):
        target = policy.target(prompt, generated)
        kept = filled if target is None else np.minimum(filled, policy.budgets(target, num_layers))
        if (kept < filled).any():
            when.add(prompt + generated)
        dropped += filled - kept
        filled = kept + 1
    return when, dropped


def test_a_plain_schedule_is_what_it_says():
    """Prompt of 3: due after 32 steps (35 slots), then every 16. Prompt of 33: after prefill as well."""
    assert simulate(build("streaming_llm"), 3, 96)[0] == {3 + 16 * i for i in range(2, 6)}
    assert simulate(build("streaming_llm"), 33, 96)[0] == {33 + 16 * i for i in range(6)}
    assert simulate(build("streaming_llm"), 33, 96)[1].tolist() == [33 + 80 - 24] * 2


def test_compaction_happens_when_due_and_the_trace_tells_what_it_dropped(squeezed):
    policy, trace = squeezed.policy, squeezed.trace
    expected = [simulate(policy, len(prompt), 96) for prompt in PROMPTS]
    assert squeezed.stats.compactions == sum(len(when) for when, _ in expected)
    assert squeezed.stats.evicted == sum(dropped.mean() for _, dropped in expected)
    ended = trace.end < 2**31 - 1  # [n, L, K, columns]
    real = np.arange(trace.end.shape[-1]) < np.array([len(prompt) + 96 for prompt in PROMPTS])[:, None, None, None]
    for row, (when, dropped) in enumerate(expected):
        by_head = (ended & real)[row].sum(axis=-1)
        if policy.evict and policy.evict.scope == "compete":
            np.testing.assert_array_equal(by_head.mean(axis=-1), dropped)
        else:
            np.testing.assert_array_equal(by_head, np.broadcast_to(dropped[:, None], by_head.shape))
        assert set(trace.end[row][(ended & real)[row]].tolist()) <= when


def test_compression_holds_less_memory_than_full(squeezed, uncut):
    if squeezed.policy.is_bounded:
        assert squeezed.stats.peak_kv_bytes < 0.6 * uncut.stats.peak_kv_bytes
        assert squeezed.stats.dense_kv_bytes == uncut.stats.dense_kv_bytes


def assert_counts(policy, view, slots):
    """Every head keeps its budget, or what it has; heads that compete keep it together, each at least the floor."""
    count = (np.asarray(slots) != EMPTY).sum(axis=-1)
    filled = np.asarray(view.is_filled).sum(axis=-1)
    if policy.evict.scope == "compete":
        budget = np.asarray(view.budget)
        np.testing.assert_array_equal(count.sum(axis=-1), np.minimum(budget.sum(axis=-1), filled.sum(axis=-1)))
        assert (count >= np.minimum(filled, np.floor(budget * policy.evict.floor))).all()
    else:
        np.testing.assert_array_equal(count, np.minimum(view.budget, filled))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4], ids=["group1", "group4"])
@pytest.mark.parametrize("name", EVICTING)
def test_select_keeps_the_budget_in_order_and_never_an_empty_slot(name, group, dtype):
    policy = build(name)
    view = random_view(np.random.default_rng(1), group=group, dtype=dtype, budget=24)
    slots = np.asarray(policy.select(view))
    position = np.asarray(view.position)
    assert_counts(policy, view, slots)
    for b, k in np.ndindex(slots.shape[:2]):
        kept = slots[b, k][slots[b, k] != EMPTY]
        assert (slots[b, k, len(kept) :] == EMPTY).all()
        positions = position[b, k, kept]
        assert (positions != EMPTY).all()
        assert (np.diff(positions) > 0).all()  # distinct and ascending
        newest = position[b, k].max()
        recent = {newest - i for i in range(policy.evict.recent)} & set(position[b, k].tolist())
        sinks = {p for p in position[b, k].tolist() if 0 <= p < policy.evict.sinks}
        assert (recent | sinks) <= set(positions.tolist())


@pytest.mark.parametrize("name", EVICTING)
def test_select_treats_rows_apart_and_is_the_same_under_jit_and_vmap(name):
    policy = build(name)
    view = random_view(np.random.default_rng(2), batch=3, budget=24)
    view = view._replace(layer=None)
    select = jax.jit(policy.select)
    slots = select(view)
    np.testing.assert_array_equal(policy.select(view), slots)
    each = jax.tree.map(lambda x: x[:, None], view)
    np.testing.assert_array_equal(jax.jit(jax.vmap(policy.select))(each)[:, 0], slots)
    for b in range(3):
        np.testing.assert_array_equal(select(jax.tree.map(lambda x, b=b: x[b], each))[0], slots[b])


@pytest.mark.parametrize("name", EVICTING)
def test_a_views_budget_overrides_the_policys(name):
    policy = build(name)
    view = random_view(np.random.default_rng(3))
    budget = jnp.asarray([[9, 24], [12, 30]], jnp.int32)
    view = view._replace(budget=budget)
    assert_counts(policy, view, policy.select(view))
    if policy.budget is not None:
        view = view._replace(budget=None)
        assert_counts(policy, view._replace(budget=jnp.full((2, 2), policy.budget)), policy.select(view))


@pytest.mark.parametrize("name", EVICTING)
def test_sets_shared_by_scope_are_the_same_for_every_head(name):
    import dataclasses

    policy = build(name)
    policy = dataclasses.replace(policy, evict=dataclasses.replace(policy.evict, scope="layer"))
    view = random_view(np.random.default_rng(4), budget=24)
    view = view._replace(position=jnp.broadcast_to(view.position[:, :1], view.position.shape))
    slots = np.asarray(policy.select(view))
    np.testing.assert_array_equal(slots[:, 0], slots[:, 1])


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_hashable_and_prints_its_settings(name):
    assert hash(build(name)) == hash(build(name))
    assert name in repr(build(name))
