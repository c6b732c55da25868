"""Foresight against plain NumPy, and in the engine."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.analysis.foresee import longest_age
from jkv.policies.foresight import AGES, Foresight, Network, shipped_networks
from jkv.testing import TINY, random_networks, random_view, tiny_model

PROMPT = [4, 5, 6, 7, 8]


def network_of(**changes):
    """Networks of ones, with changed arrays."""
    ones = {
        "into": np.ones((2, 2, 22, 4)),
        "bias": np.ones((2, 2, 4)),
        "out": np.ones((2, 2, 4)),
        "longest_age": np.full(2, 64.0),
    }
    return Foresight(Network(**(ones | changes)))


def plain_score(network, layer, head, view, b, s):
    """The score of one slot, in float64."""
    frequency = np.asarray(view.rope.frequency[b], np.float64)
    position, half = int(view.position[b, head, s]), len(frequency)
    key = np.asarray(view.key[b, head, s], np.float64)
    turned = (key[:half] + 1j * key[half : 2 * half]) * np.exp(-1j * position * frequency) / float(view.rope.factor[b])
    age = min(int(view.position[b].max()) - position, float(network.arrays.longest_age[layer]))
    x = [*turned.real, *turned.imag, *key[2 * half :], *np.asarray(view.value[b, head, s], np.float64)]
    x += [np.interp(np.log2(min(max(age, 4), 2**14)), np.log2(AGES), node) for node in np.eye(len(AGES))]
    into, bias, out = (np.asarray(array[layer, head], np.float64) for array in network.arrays[:3])
    hidden = x @ into + bias
    return (hidden / (1 + np.exp(-hidden))) @ out


@pytest.mark.parametrize("layer", [0, 1])
def test_the_slots_of_the_largest_scores_stay(layer):
    network = random_networks(tiny_model(), hidden=5)
    network = Foresight(network.arrays._replace(longest_age=np.full(2, 100, np.float32)))
    view = random_view(np.random.default_rng(layer), slots=60)._replace(layer=layer, calibration=None)
    slots = np.asarray(jax.jit(jkv.foresight(24, network, sinks=2, recent=5).select)(view))
    for b, head in np.ndindex(view.position.shape[:2]):
        position = np.asarray(view.position[b, head])
        score = np.full(int((position >= 0).sum()), np.inf)
        for s in range(len(score)):
            if position[s] >= 2 and position.max() - position[s] >= 5:
                score[s] = plain_score(network, layer, head, view, b, s)
        kept = slots[b, head][slots[b, head] >= 0]
        np.testing.assert_array_equal(kept, np.sort(np.argsort(-score, kind="stable")[:24]))


def test_slots_older_than_any_in_training_score_as_the_oldest_of_training():
    """Texts of 144 tokens train ages up to 127; the view reaches 8 times as far, where weights of other ages are random."""
    assert longest_age([np.zeros(100, np.int32), np.zeros(144, np.int32)]) == 127
    arrays = random_networks(tiny_model()).arrays._replace(longest_age=np.full(2, 127, np.float32))
    view = random_view(np.random.default_rng(0), batch=1, slots=40)
    view = view._replace(calibration=jax.tree.map(lambda x: jnp.asarray(x[:1]), arrays))
    still = view.rope._replace(frequency=jnp.zeros_like(view.rope.frequency))  # so that keys say nothing of positions
    rate = jax.jit(jkv.foresight(24, Foresight(arrays), sinks=0, recent=0).rate)

    def scores(oldest):
        """Of the same slots, as far apart as before but for the newest one, which is `oldest` tokens after the first."""
        position = np.broadcast_to(np.r_[:39, oldest], view.position.shape).astype(np.int32)
        one = jnp.asarray(np.nan_to_num(view.key)), jnp.asarray(np.nan_to_num(view.value))
        return np.asarray(rate(view._replace(key=one[0], value=one[1], position=position, rope=still)))[..., :39]

    np.testing.assert_array_equal(scores(127 + 39), scores(8 * 144))
    assert (scores(100) != scores(8 * 144)).any()


@pytest.mark.parametrize(("name", "longest"), [("tiny-reasoner", 1044), ("tiny-reasoner-2", 1095)])
def test_networks_know_the_longest_age_of_their_training(name, longest):
    """`longest` is the length of the longest of the 400 traces that they were trained on."""
    file = shipped_networks().get(name) or Path(__file__).parents[2] / "research" / "assets" / name / "foresight.safetensors"
    ages = Foresight.load(file).arrays.longest_age
    np.testing.assert_array_equal(ages, [longest_age([np.zeros(longest, np.int32)])] * 4)


def test_every_layer_and_head_has_its_own_network():
    model, network = tiny_model(), random_networks(tiny_model())
    settings = {"max_new_tokens": 40, "stop_ids": (), "return_trace": True, "page_size": 4}

    def ends(arrays):
        policy = jkv.foresight(16, Foresight(arrays, network.about), interval=8, sinks=0)
        return jkv.generate(model, PROMPT, policy, **settings).trace.end[0]

    before = ends(network.arrays)
    for layer, head in np.ndindex(2, 2):
        out = network.arrays.out.copy()
        out[layer, head] *= -1
        after = ends(network.arrays._replace(out=out))
        is_first = np.minimum(before, after) <= 24  # the first compaction, on whose states the later ones depend
        differs = ((before != after) & is_first).any(axis=-1)
        assert np.argwhere(differs).tolist() == [[layer, head]]


def test_replay_and_preemption_keep_it_exact():
    model = tiny_model()
    policy = jkv.foresight(16, random_networks(model), interval=8)
    out = jkv.generate(model, [PROMPT, PROMPT[::-1]], policy, max_new_tokens=60, stop_ids=(), return_trace=True, page_size=4)
    np.testing.assert_allclose(out.logprobs, jkv.score(model, out, trace=out.trace).logprobs, atol=2e-5)
    assert out.stats.evicted > 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: network_of(out=np.ones((2, 2, 5))), "out .L, K, I."),
        (lambda: network_of(into=np.full((2, 2, 22, 4), np.nan)), "must be finite"),
        (lambda: network_of(longest_age=np.full(2, 3.0)), "longest_age must be .L., tokens in .4, 16,384."),
        (lambda: network_of(longest_age=np.full(3, 64.0)), "longest_age must be .L."),
        (
            lambda: jkv.foresight(64, "absent.safetensors"),
            "networks of foresight must be a safetensors file made by `jkv foresee`",
        ),
        (lambda: jkv.foresight(4, random_networks(tiny_model())), "budget"),
    ],
)
def test_what_cannot_be_a_network_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_networks_of_another_model_are_refused_before_anything_compiles():
    policy = jkv.foresight(16, random_networks(tiny_model()))
    with pytest.raises(ValueError, match="networks of foresight must be of this model, with weights with the digest"):
        jkv.generate(tiny_model(seed=1), PROMPT, policy)
    with pytest.raises(ValueError, match="with into"):
        jkv.generate(tiny_model(config=dataclasses.replace(TINY, num_layers=3)), PROMPT, policy)


def test_the_networks_of_tiny_reasoner_are_in_the_package():
    model = jkv.load("tiny-reasoner")
    policy = jkv.foresight(budget=64, network="tiny-reasoner", interval=16)
    problem = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"
    out = jkv.generate(model, problem, policy)
    assert out.text[0].endswith("\\boxed{g=7}")
    assert out.stats.evicted > 100
    with pytest.raises(ValueError, match="must be of this model"):
        jkv.generate(tiny_model(), PROMPT, policy)
