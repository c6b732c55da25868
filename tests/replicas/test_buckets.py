"""Weights come out of buckets as they went in, and only what is new travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.replicas.worker import check_digests, digests_of, pack, unpack, with_leaves


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


def test_digests_of_an_adapter_differ_alone_and_with_leaves_brings_the_new_ones(model):
    params = jkv.testing.adapted(model.params)
    layer = params.layers[0]
    query = layer.query.replace(down=layer.query.down * 2)
    new = params.replace(layers=(layer.replace(query=query), *params.layers[1:]))
    is_new = (digests_of(params) != digests_of(new)).any(axis=1)
    changed = {i: leaf for i, leaf in enumerate(jax.tree.leaves(new)) if is_new[i]}
    assert [leaf.shape for leaf in changed.values()] == [query.down.shape]
    together = with_leaves(params, changed)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(new), strict=True))
    check_digests(together, digests_of(new), version=3)
    with pytest.raises(RuntimeError, match=r"version 3; its params.layers\[0\].query.down are others \(1 of"):
        check_digests(params, digests_of(new), version=3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_every_change_of_a_leaf_changes_its_digest(dtype):
    random = np.random.default_rng(0)
    leaf = jnp.asarray(random.integers(-3, 4, (3, 5, 4)), dtype)
    (whole,) = digests_of(leaf)
    for place in [(0, 0, 0), (2, 4, 3), (1, 2, 3)]:
        (other,) = digests_of(leaf.at[place].add(jnp.asarray(4, dtype)))
        assert (other != whole).all()
    others = [leaf[::-1], leaf[:, ::-1], leaf[:, :, ::-1], leaf * jnp.asarray(-1, dtype), jnp.zeros_like(leaf)]
    assert all((digests_of(other)[0] != whole).all() for other in others)
    assert (digests_of(np.asarray(leaf))[0] == whole).all()
