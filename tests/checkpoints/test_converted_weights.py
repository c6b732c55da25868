"""Saved weights are restored bit for bit, onto any sharding."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints import saved_weights
from tests.support.checkpoints import GOLDEN, SMALL, assert_equal, random_params
from tests.support.devices import environment


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_saved_weights_are_restored_bit_for_bit(case, tmp_path):
    params = checkpoint.load(GOLDEN / case).params
    params = params.replace(embedding=params.embedding.astype(jnp.bfloat16))
    saved_weights.save(params, tmp_path / "saved")
    assert_equal(saved_weights.restore(tmp_path / "saved"), params)


SHARDED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jkv
from jkv.model.weight_shapes import leaf_name

golden, folder = sys.argv[1:]
devices = np.array(jax.devices())
assert len(devices) == 8
wide, square = jax.sharding.Mesh(devices, ("x",)), jax.sharding.Mesh(devices.reshape(2, 4), ("x", "y"))
params = jkv.load(golden).params
by_columns = jax.tree.map(lambda leaf: NamedSharding(wide, P(*[None] * (leaf.ndim - 1), "x")), params)

def by_name(name, shape):
    return NamedSharding(square, P("y", "x") if name.endswith(("query", "down")) else P())

everywhere = NamedSharding(wide, P())
named = [by_name(leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
jkv.save(jax.device_put(params, by_columns), folder)
for sharding, expected in [
    (None, [jax.sharding.SingleDeviceSharding(devices[0])] * len(named)),
    (everywhere, [everywhere] * len(named)),
    (by_columns, jax.tree.leaves(by_columns)),
    (by_name, named),
]:
    restored = jkv.restore(folder, sharding)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == expected
    jax.tree.map(np.testing.assert_array_equal, restored, params)
assert restored.layers[1].query.addressable_shards[0].data.shape == (8, 16)
"""


def test_sharded_weights_are_saved_and_restored_onto_any_sharding(tmp_path):
    root = str(Path(checkpoint.__file__).parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", SHARDED, str(GOLDEN / "phi3"), str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment(8) | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_saved_weights_are_not_overwritten(tmp_path):
    saved_weights.save(random_params(SMALL), tmp_path)
    with pytest.raises(ValueError, match=r"must not contain weights yet.*another folder"):
        saved_weights.save(random_params(SMALL, seed=1), tmp_path)
    assert_equal(saved_weights.restore(tmp_path), random_params(SMALL))


@pytest.mark.parametrize("folder", ["missing", "golden/phi3"])
def test_only_a_saved_folder_is_restored(folder):
    with pytest.raises(ValueError, match=r"folder of jkv\.save.*no jkv\.json.*jkv\.load"):
        saved_weights.restore(GOLDEN.parent / folder)


def test_a_saved_folder_that_lost_a_file_is_named(tmp_path):
    saved_weights.save(random_params(SMALL), tmp_path)
    (tmp_path / "weights").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"weights must be complete.*again"):
        saved_weights.restore(tmp_path)
    (tmp_path / "jkv.json").write_text('{"config": {"family": "llama", "colour": 1}}')
    with pytest.raises(ValueError, match=r"jkv\.json must be written by this version"):
        saved_weights.restore(tmp_path)
