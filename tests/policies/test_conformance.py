"""What every policy must do, whatever its idea; a new line in the table of policies is enough to be tested here."""

import inspect

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


def random_view(rng, batch=2, heads=2, slots=40, window=8, group=2, dtype=jnp.float32):
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
    arrays = (jnp.asarray(x, dtype) for x in (key, value, query))
    key, value, query = arrays
    return jkv.CacheView(key, value, jnp.asarray(position), query, layer=0, prompt_length=prompt_length)


@pytest.fixture(scope="module")
def uncut(model):
    return jkv.generate(model, PROMPTS, **KNOBS)


@pytest.fixture(scope="module", params=list(POLICIES))
def squeezed(request, model):
    """Each policy's compressed run, with its trace."""
    sampling = jkv.Sampling(seed=3)
    return jkv.generate(model, PROMPTS, policy=build(request.param), sampling=sampling, return_trace=True, **KNOBS)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_budget_as_long_as_the_sequence_gives_the_full_caches_tokens(name, model, uncut):
    out = jkv.generate(model, PROMPTS, policy=build(name, budget=len(PROMPTS[2]) + 96), **KNOBS)
    np.testing.assert_array_equal(out.tokens, uncut.tokens)
    np.testing.assert_allclose(out.logprobs, uncut.logprobs, atol=1e-4)
    assert out.stats.compactions == 0


def test_replay_gives_the_log_probabilities_of_the_engine(model, squeezed):
    replayed = jkv.score(model, squeezed, trace=squeezed.trace).logprobs
    difference = np.abs(np.asarray(replayed) - squeezed.logprobs)
    assert np.percentile(difference, 99) <= 1e-5
    assert difference.max() <= 1e-4


def test_compaction_happens_when_due_and_the_trace_tells_what_it_dropped(squeezed):
    trace = squeezed.trace
    dropped = (trace.end[:, 0, 0] < 2**31 - 1) & (np.arange(trace.end.shape[-1]) < trace.end[:, 0, 0])
    if squeezed.stats.compactions == 0:
        assert not dropped.any()
        return
    # Budget 24, interval 16, 96 steps, the last of which ends the rows. Prompt of 3: due after 32 steps (35 slots), then every
    # 16: 4 times. Prompt of 20: from 16 on: 5 times. Prompt of 33: after prefill as well: 6 times.
    assert squeezed.stats.compactions == 4 + 5 + 6
    assert squeezed.stats.evicted == (3 + 80 - 24) + (20 + 80 - 24) + (33 + 80 - 24)
    assert dropped.sum(axis=-1).tolist() == [59, 76, 89]
    assert set(trace.end[0, 0, 0][dropped[0]].tolist()) <= {3 + 16 * i for i in range(2, 6)}


def test_compression_holds_less_memory_than_full(squeezed, uncut):
    if squeezed.stats.compactions:
        assert squeezed.stats.peak_kv_bytes < 0.6 * uncut.stats.peak_kv_bytes
        assert squeezed.stats.dense_kv_bytes == uncut.stats.dense_kv_bytes


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4], ids=["group1", "group4"])
@pytest.mark.parametrize("name", EVICTING)
def test_select_keeps_the_budget_in_order_and_never_an_empty_slot(name, group, dtype):
    policy = build(name)
    view = random_view(np.random.default_rng(1), group=group, dtype=dtype)
    slots = np.asarray(policy.select(view))
    position = np.asarray(view.position)
    for b, k in np.ndindex(slots.shape[:2]):
        kept = slots[b, k][slots[b, k] != EMPTY]
        filled = (position[b, k] != EMPTY).sum()
        assert len(kept) == min(policy.budget, filled)
        assert (slots[b, k, len(kept) :] == EMPTY).all()
        positions = position[b, k, kept]
        assert (positions != EMPTY).all()
        assert (np.diff(positions) > 0).all()  # distinct and ascending
        newest = position[b, k].max()
        recent = {newest - i for i in range(policy.evict.recent)}
        sinks = {p for p in position[b, k].tolist() if 0 <= p < policy.evict.sinks}
        assert (recent | sinks) <= set(positions.tolist())


@pytest.mark.parametrize("name", EVICTING)
def test_select_treats_rows_apart_and_is_the_same_under_jit_and_vmap(name):
    policy = build(name)
    view = random_view(np.random.default_rng(2), batch=3)
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
    count = (np.asarray(policy.select(view._replace(budget=budget))) != EMPTY).sum(axis=-1)
    filled = np.asarray(view.is_filled).sum(axis=-1)
    np.testing.assert_array_equal(count, np.minimum(budget, filled))


@pytest.mark.parametrize("name", EVICTING)
def test_sets_shared_by_scope_are_the_same_for_every_head(name):
    import dataclasses

    policy = build(name)
    policy = dataclasses.replace(policy, evict=dataclasses.replace(policy.evict, scope="layer"))
    view = random_view(np.random.default_rng(4))
    view = view._replace(position=jnp.broadcast_to(view.position[:, :1], view.position.shape))
    slots = np.asarray(policy.select(view))
    np.testing.assert_array_equal(slots[:, 0], slots[:, 1])


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_hashable_and_prints_its_settings(name):
    assert hash(build(name)) == hash(build(name))
    assert name in repr(build(name))
