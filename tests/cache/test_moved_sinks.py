"""StreamingLLM's own positions: what a step reads equals keys rotated anew at their place in the cache, as its authors do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import compaction
from jkv.cache import pool as pages
from jkv.cache.attention import Cache, DecodeAttention
from jkv.cache.moved_sinks import SinkRules, merge
from jkv.eviction.scores import Uniform
from jkv.model.rotary import rotary_angle
from jkv.testing import TINY

K, H, SINKS, DROPPED, SEEN = 2, TINY.head_size, 3, 14, 30
KNOBS = {"max_new_tokens": 60, "stop_ids": (), "page_size": 4, "progress": False}


def rope(x, position):
    """The rotation by its definition, pair by pair, in float64: `x` [..., H] at one position."""
    out = np.array(x, np.float64)
    for i in range(H // 2):
        angle = position * TINY.rope_theta ** (-2 * i / H)
        a, b = x[..., i], x[..., i + H // 2]
        out[..., i], out[..., i + H // 2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


@pytest.mark.parametrize("group", [1, 2, 6])
def test_a_step_reads_what_keys_at_their_place_in_the_cache_would_give(group):
    """Row 0 moves its sinks, row 1 of the same length does not."""
    rng = np.random.default_rng(group)
    key, value = rng.standard_normal((2, 2, SEEN + 1, K, H))
    query = rng.standard_normal((2, K * group, H))
    pool = pages.create(
        num_layers=1, num_rows=2, num_kv_heads=K, head_size=H, num_pages=40, max_pages=8, page_size=4, poison=True
    )
    row, kept = jnp.arange(2, dtype=jnp.int32), [*range(SINKS), *range(SINKS + DROPPED, SEEN)]

    def rotated(t):
        return jnp.asarray(rope(key[:, t], t), jnp.float32)[:, None], jnp.asarray(value[:, t], jnp.float32)[:, None]

    one = jnp.ones(2, jnp.int32)
    for t in range(SEEN):
        pool, address = pages.reserve(pool, row, one, 1)
        pool = pages.advance(pages.append(pool, address[0], *rotated(t)), row, one)
    slots = jnp.broadcast_to(jnp.asarray(kept, jnp.int32), (1, 2, K, len(kept)))
    pool = compaction.take_slots(pool, row, slots)
    pool, address = pages.reserve(pool, row, one, 1)
    length, place = pool.length + 1, len(kept)
    angle = rotary_angle(TINY, jnp.full((2, 1), place - SEEN, jnp.int32))
    sinks = SinkRules(jnp.asarray([SINKS, 0], jnp.int32), jnp.cos(angle), jnp.sin(angle))
    unturned = jnp.ones((2, H // 2)), jnp.zeros((2, H // 2))  # the keys given are rotated
    attend = DecodeAttention(address, length, pool.logical_length, *unturned, None, None, sinks, jnp.ones(2, bool))
    at_true = jnp.asarray(rope(query, SEEN), jnp.float32)[:, None]
    out, _ = jax.jit(lambda *arrays: attend(0, *arrays))(at_true, *rotated(SEEN), Cache(pool, None))

    tokens = [*kept, SEEN]
    for b, n in np.ndindex(2, K * group):
        positions = range(place + 1) if b == 0 else tokens
        keys = [rope(key[b, t, n // group], p) for t, p in zip(tokens, positions, strict=True)]
        logits = np.array(keys) @ rope(query[b, n], positions[-1]) / np.sqrt(H)
        weight = np.exp(logits - logits.max())
        expected = weight @ value[b, tokens, n // group] / weight.sum()
        np.testing.assert_allclose(out[b, 0, n], expected, atol=2e-5)


@pytest.mark.parametrize("sinks", [1, 4, 6])
def test_replay_gives_the_log_probabilities_and_true_positions_would_not(sinks, model):
    policy = jkv.streaming_llm(budget=20, sinks=sinks, interval=8, positions="cache")
    policies = [policy, jkv.streaming_llm(budget=20, sinks=sinks, interval=8), policy]
    prompts = [list(range(1, 22)), [4, 4, 9], [7]]
    out = jkv.generate(model, prompts, policy=policies, return_trace=True, sampling=jkv.Sampling(seed=1), **KNOBS)
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.abs(replayed - out.logprobs).max() <= 1e-4
    assert np.percentile(np.abs(replayed - out.logprobs), 99) <= 1e-5
    unmoved = jkv.score(model, out, trace=out.trace.replace(sinks=None, sink_shift=None)).logprobs
    by_row = np.abs(np.asarray(unmoved) - out.logprobs).max(axis=1)
    assert (by_row > 1e-3).tolist() == [True, False, True]
    off_by_one = out.trace.replace(sink_shift=np.minimum(out.trace.sink_shift + 1, 0))
    assert np.abs(np.asarray(jkv.score(model, out, trace=off_by_one).logprobs) - out.logprobs).max() > 1e-3


def test_nothing_moves_before_anything_is_dropped(model):
    knobs = KNOBS | {"max_new_tokens": 20}
    policy = jkv.streaming_llm(budget=64, positions="cache")
    moved, full = (jkv.generate(model, [1, 2, 3], policy=p, **knobs) for p in (policy, jkv.full()))
    np.testing.assert_array_equal(moved.tokens, full.tokens)
    np.testing.assert_allclose(moved.logprobs, full.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.streaming_llm(64, positions="none"), "positions must be"),
        (lambda: jkv.streaming_llm(128, sinks=65, positions="cache"), "can move 1 to 64 sinks"),
        (
            lambda: jkv.Policy("mine", jkv.Evict(Uniform(), scope="layer", sinks=2), jkv.Every(8), moves_sinks=True),
            "can move 1 to 64",
        ),
        (
            lambda: jkv.Engine(jkv.testing.tiny_model(), max_slots=64).submit(
                [1], jkv.streaming_llm(8, positions="cache"), max_new_tokens=9
            ),
            "policies=",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_a_step_without_sinks_to_move_is_the_plain_one():
    """Rules that move none leave every bit alone: the second group is empty."""
    rng = np.random.default_rng(0)
    out = jnp.asarray(rng.standard_normal((3, 2, H)), jnp.float32)
    total = jnp.asarray(rng.standard_normal((3, 2)), jnp.float32)
    nothing = jnp.zeros_like(out), jnp.full_like(total, -jnp.inf)
    np.testing.assert_array_equal(merge((out, nothing[0]), (total, nothing[1])), out)
    assert (merge((nothing[0], nothing[0]), (nothing[1], nothing[1])) == 0).all()
