# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write a policy
#
# A policy of your own is one function: a score for each slot of the cache.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/3_write_a_policy.ipynb)

# %%
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# JAX for the accelerator of this machine. The JAX that is installed stays (Colab brings its own), unless it is too old.
DEVICE = ",cuda12" if shutil.which("nvidia-smi") else ",tpu" if "TPU_ACCELERATOR_TYPE" in os.environ else ""
SOURCE = f"jkv-cache[eval{DEVICE}] @ git+https://github.com/jkv-project/jkv"
for folder in (Path.cwd(), Path.cwd().parent):  # a checkout around this notebook comes first, and needs no network
    if (folder / "jkv" / "__init__.py").exists():
        SOURCE = f"{folder}[eval{DEVICE}]"
        sys.path.insert(0, str(folder))
        break
try:
    importlib.import_module("jkv")
except ImportError:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", SOURCE], check=True)
    importlib.invalidate_caches()
import jax

print(jax.devices())

# %% [markdown]
# The engine decodes, frees pages and records the trace. A policy only computes a score for each slot, and slots with a higher score
# stay. The function takes a `CacheView`, the cache of one layer, and returns one number for each slot.
#
# | field | shape | content |
# |---|---|---|
# | `key`, `value` | `[B, K, S, H]` | for each row, KV head and slot; undefined in empty slots |
# | `position` | `[B, K, S]` | position of the slot's token in its sequence; -1 if the slot is empty |
# | `query` | `[B, N, W, H]` | the last queries, with `needs=jkv.Needs(window=W)` |
#
# The idea: a key that is similar to all others can be evicted, and a distinct key should stay. So the score is the distance in
# direction between a key and the mean key (KeyDiff, [2504.15364](https://arxiv.org/abs/2504.15364)).
#
# ## A first try

# %%
import jax.numpy as jnp
import numpy as np

import jkv


def distinctness(view: jkv.CacheView):
    """The distance in direction between each key and the mean key."""
    is_filled = view.is_filled[..., None]  # empty slots may hold anything, NaN included
    key = jnp.where(is_filled, view.key, 0.0)
    key = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-6)
    mean = key.sum(axis=(0, 2), keepdims=True) / is_filled.sum(axis=(0, 2), keepdims=True).astype(key.dtype)
    return -(key * mean).sum(axis=-1)


first_try = jkv.evict_by(distinctness, budget=48, interval=16, sinks=4, recent=8)

# %% [markdown]
# `evict_by` makes a policy from the score. Every 16 tokens, at most 48 slots stay, and the first 4 and the last 8 tokens always stay.

# %%
model = jkv.load("tiny-reasoner")
problem = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"
out = jkv.generate(model, problem, policy=first_try)
print(f"{out.stats.evicted:.0f} tokens evicted; {out.text[0].splitlines()[-1]}")

# %% [markdown]
# It runs, but it may still be wrong. `jkv.verify` runs the suite that every policy of the package passes, and reports each failure in
# a sentence.

# %%
report = jkv.verify(first_try)
print(report)
assert not report.is_ok
assert "treats_rows_independently" in report.failures

# %% [markdown]
# The score mixes rows: the mean is also over axis 0, the batch. What is kept of one prompt then depends on the other prompts in the
# batch. No single run would have shown this.
#
# ## The fix
#
# The mean must leave out axis 0:


# %%
def key_diff(view: jkv.CacheView):
    """The distance in direction between each key and the mean key of its row and head."""
    is_filled = view.is_filled[..., None]  # empty slots may hold anything, NaN included
    key = jnp.where(is_filled, view.key, 0.0)
    key = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-6)
    mean = key.sum(axis=2, keepdims=True) / is_filled.sum(axis=2, keepdims=True).astype(key.dtype)
    return -(key * mean).sum(axis=-1)


mine = jkv.evict_by(key_diff, budget=48, interval=16, sinks=4, recent=8)

# %% [markdown]
# You can try a policy without a model. `select` returns the slots that stay. Here 38 of 40 keys are nearly equal, and two are not:

# %%
rng = np.random.default_rng(0)
key = 1 + 0.01 * rng.standard_normal((1, 1, 40, 8)).astype(np.float32)
key[0, 0, [15, 22]] *= -1
view = jkv.CacheView(key=jnp.asarray(key), value=jnp.asarray(key), position=jnp.arange(40, dtype=jnp.int32)[None, None])
slots = np.asarray(jkv.evict_by(key_diff, budget=14, sinks=4, recent=8).select(view))[0, 0]
slots = slots[slots >= 0].tolist()
print("slots that stay:", slots)
assert slots == [0, 1, 2, 3, 15, 22, *range(32, 40)]

# %% [markdown]
# With the model, next to the random baseline:

# %%
for policy in (mine, jkv.random(budget=48, interval=16)):
    out = jkv.generate(model, problem, policy=policy)
    print(
        f"{policy.name:>10}: {out.stats.evicted:.0f} evicted, {out.stats.peak_kv_bytes:,} bytes, {out.text[0].splitlines()[-1]}"
    )
    assert out.stats.evicted > 0

# %% [markdown]
# Accuracy is measured on many problems (`2_compare_policies`). Correctness is checked by `verify`:

# %%
report = jkv.verify(mine)
print(report)
assert report.is_ok
