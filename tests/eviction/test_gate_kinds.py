"""What each published gate computes, against plain NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.eviction.gate import WINDOWS
from jkv.testing import TINY, random_gate, tiny_model

KINDS = ("dms", "linear", "mlp", "fast")
EPSILON = 1e-2  # large, so that a norm without it shows


def wide(x):
    return np.asarray(x, np.float64)


def norm(x, weight, epsilon):
    return weight * x / np.sqrt((x * x).mean() + epsilon)


def dms(arrays, layer, k, hidden, normed, epsilon):
    """One number: 5 - 100 times the logit of the eviction, which reads the residual stream."""
    x = norm(hidden, arrays.norm[layer], epsilon)
    return -((arrays.weight[layer, k] @ x + arrays.bias[layer, k]) * 100 - 5)


def linear(arrays, layer, k, hidden, normed, epsilon):
    return arrays.weight[layer, k] @ normed + arrays.bias[layer, k]


def mlp(arrays, layer, k, hidden, normed, epsilon):
    inner = arrays.into[layer] @ normed + arrays.into_bias[layer]
    gelu = np.array([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in inner])
    return arrays.out[layer, k] @ gelu + arrays.out_bias[layer, k]


def fast(arrays, layer, k, hidden, normed, epsilon):
    key = norm(arrays.key[layer, k] @ normed, arrays.key_norm[layer], 1e-6)
    total = []
    for g in range(arrays.query.shape[2]):
        query = arrays.query[layer, k, g] @ normed + arrays.query_bias[layer, k, g]
        query = norm(query, arrays.query_norm[layer], 1e-6)
        scale = math.sqrt(len(query))
        own = query @ key / scale + arrays.bias[layer, k, g]
        total.append(1 / (1 + sum(math.exp(query @ sink / scale - own) for sink in arrays.sinks[layer, k])))
    return np.mean(total)


REFERENCES = {"dms": dms, "linear": linear, "mlp": mlp, "fast": fast}


def reference(gate, name, layer, hidden, normed, epsilon):
    """[T, K] in float64, from [T, D]."""
    arrays = type(gate.arrays)(*map(wide, gate.arrays))
    pairs = zip(wide(hidden), wide(normed), strict=True)
    heads = range(arrays[1].shape[1] if name != "mlp" else arrays.out.shape[1])
    return np.array([[REFERENCES[name](arrays, layer, k, *pair, epsilon) for k in heads] for pair in pairs])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_gate_computes_the_formula_of_its_authors(name, layer):
    gate = random_gate(tiny_model(), name, seed=layer)
    rng = np.random.default_rng(layer)
    hidden, normed = (rng.standard_normal((2, 3, TINY.width)).astype(np.float32) for _ in range(2))
    arrays = jax.tree.map(jnp.asarray, gate.arrays)
    ours = np.asarray(arrays(layer, jnp.asarray(hidden), jnp.asarray(normed), EPSILON))
    assert ours.shape == (2, 3, TINY.num_kv_heads)
    assert ours.dtype == np.float32
    for b in range(2):
        np.testing.assert_allclose(ours[b], reference(gate, name, layer, hidden[b], normed[b], EPSILON), rtol=2e-5, atol=1e-4)


def test_a_fast_kvzip_gate_is_finite_whatever_its_logits():
    gate = random_gate(tiny_model(), "fast")
    hidden = jnp.full((1, 1, TINY.width), 3.0, jnp.float32)
    for bias in (-500.0, 500.0):
        arrays = jax.tree.map(jnp.asarray, gate.arrays._replace(bias=np.full_like(gate.arrays.bias, bias)))
        np.testing.assert_array_equal(np.asarray(arrays(0, hidden, hidden, EPSILON)), float(bias > 0))


def test_every_kind_has_a_reference_and_a_window():
    kinds = [type(random_gate(tiny_model(), name).arrays) for name in KINDS]
    assert list(WINDOWS) == kinds
    assert list(WINDOWS.values()) == [512, 128, 128, 8]
