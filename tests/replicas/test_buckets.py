"""Weights come out of buckets as they went in, and only what is new travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.replicas.buckets import Changes, pack, unpack, with_leaves


@pytest.mark.parametrize("most_bytes", [1, 1000, 1 << 28], ids=["a leaf each", "some leaves", "all"])
def test_weights_of_several_dtypes_come_out_as_they_went_in(model, most_bytes):
    params = jkv.testing.adapted(model.params)
    leaves = [
        x.astype(dtype) for x, dtype in zip(jax.tree.leaves(params), [jnp.bfloat16, jnp.float32, jnp.int8] * 99, strict=False)
    ]
    buckets = list(pack(dict(enumerate(leaves)), most_bytes))
    assert [i for bucket in buckets for i in bucket.leaves] == list(range(len(leaves)))
    assert len(buckets) == (len(leaves) if most_bytes == 1 else 1) or most_bytes == 1000
    out = {i: leaf for bucket in buckets for i, leaf in unpack(bucket, leaves).items()}
    for i, leaf in enumerate(leaves):
        assert (out[i].dtype, out[i].shape) == (leaf.dtype, leaf.shape)
        np.testing.assert_array_equal(out[i], leaf)
        assert out[i].ctypes.data % 16 == 0  # of an array that begins anywhere


def test_of_an_adapter_whose_base_stays_only_the_adapter_is_new(model):
    params, changes = jkv.testing.adapted(model.params), Changes()
    assert len(changes.since_last(jax.tree.leaves(params))) == len(jax.tree.leaves(params))
    layer = params.layers[0]
    query = layer.query.replace(down=layer.query.down * 2)
    new = params.replace(layers=(layer.replace(query=query), *params.layers[1:]))
    changed = changes.since_last(jax.tree.leaves(new))
    assert [leaf.shape for leaf in changed.values()] == [query.down.shape]
    together = with_leaves(params, changed)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(new), strict=True))
    assert changes.since_last(jax.tree.leaves(new)) == {}


def test_weights_that_are_gone_are_all_new(model):
    changes = Changes()
    changes.since_last(jax.tree.leaves(jax.tree.map(lambda x: x + 1, model.params)))
    assert len(changes.since_last(jax.tree.leaves(model.params))) == len(jax.tree.leaves(model.params))
