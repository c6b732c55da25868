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
# A method of one's own is one function: a score for each slot of the cache.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/3_write_a_policy.ipynb)

# %%
import importlib
import subprocess
import sys
from pathlib import Path

SOURCE = "jkv[eval] @ git+https://github.com/jkv-project/jkv"
for folder in (Path.cwd(), Path.cwd().parent):  # a checkout around this notebook comes first, and needs no network
    if (folder / "jkv" / "__init__.py").exists():
        SOURCE = f"{folder}[eval]"
        sys.path.insert(0, str(folder))
        break
try:
    importlib.import_module("jkv")
except ImportError:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", SOURCE], check=True)
    importlib.invalidate_caches()

# %% [markdown]
# The engine decodes, frees pages and records the trace. All that a policy has to say is how much each slot is worth: higher is
# kept. The function gets a `CacheView`, one layer's cache, and returns one number for each slot.
#
# | field | shape | |
# |---|---|---|
# | `key`, `value` | `[B, K, S, H]` | of each row, KV head and slot; anything at all in empty slots |
# | `position` | `[B, K, S]` | of the slot's token in its sequence; -1 if the slot is empty |
# | `query` | `[B, N, W, H]` | the last queries, if asked for |
#
# Our idea: a key that looks like all others can go, a key that stands out should stay. So the score is how far a key points away
# from the mean key (this is KeyDiff, [2504.15364](https://arxiv.org/abs/2504.15364)).
#
# ## A first try

# %%
import jax.numpy as jnp
import numpy as np

import jkv


def standing_out(view: jkv.CacheView):
    """How far each key points away from the mean key."""
    is_filled = view.is_filled[..., None]  # empty slots may hold anything, NaN too
    key = jnp.where(is_filled, view.key, 0.0)
    key = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-6)
    mean = key.sum(axis=(0, 2), keepdims=True) / is_filled.sum(axis=(0, 2), keepdims=True).astype(key.dtype)
    return -(key * mean).sum(axis=-1)


first_try = jkv.evict_by(standing_out, budget=48, interval=16, sinks=4, recent=8)

# %% [markdown]
# `evict_by` makes a policy of it: every 16 tokens, at most 48 slots stay; the first 4 and the last 8 always do. It runs:

# %%
model = jkv.load("tiny-reasoner")
problem = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"
out = jkv.generate(model, problem, policy=first_try)
print(f"{out.stats.evicted:.0f} tokens evicted; {out.text[0].splitlines()[-1]}")

# %% [markdown]
# That it runs does not mean that it is right. `jkv.verify` puts it through the suite that every policy of the library passes, and
# says in words what is wrong.

# %%
report = jkv.verify(first_try)
print(report)
assert not report.is_ok
assert "treats_rows_independently" in report.failures

# %% [markdown]
# The score mixes rows: the mean runs over axis 0, the batch, as well. What is kept of one prompt then depends on which prompts
# happen to run beside it. No single run would have shown it.
#
# ## Mended
#
# One axis less:


# %%
def key_diff(view: jkv.CacheView):
    """How far each key points away from the mean key of its row and head."""
    is_filled = view.is_filled[..., None]  # empty slots may hold anything, NaN too
    key = jnp.where(is_filled, view.key, 0.0)
    key = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), 1e-6)
    mean = key.sum(axis=2, keepdims=True) / is_filled.sum(axis=2, keepdims=True).astype(key.dtype)
    return -(key * mean).sum(axis=-1)


mine = jkv.evict_by(key_diff, budget=48, interval=16, sinks=4, recent=8)

# %% [markdown]
# A policy can be tried without any model. `select` gives the slots that stay. Of 40 keys that are nearly the same, two stand out:

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
# And with the model, beside a policy that draws at random:

# %%
for policy in (mine, jkv.random(budget=48, interval=16)):
    out = jkv.generate(model, problem, policy=policy)
    print(
        f"{policy.name:>10}: {out.stats.evicted:.0f} evicted, {out.stats.peak_kv_bytes:,} bytes, {out.text[0].splitlines()[-1]}"
    )
    assert out.stats.evicted > 0

# %% [markdown]
# Whether it is any good is a question for many problems (`2_compare_policies`). Whether it is correct, for `verify`:

# %%
report = jkv.verify(mine)
print(report)
assert report.is_ok
