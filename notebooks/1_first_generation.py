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
# # A first generation
#
# Run a reasoning model with a small KV cache.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/1_first_generation.ipynb)

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
# A language model stores a key and a value of every token that it has read or written: the *KV cache*. A reasoning model writes
# thousands of tokens before it answers, so the cache, not the weights, fills the memory.
#
# `tiny-reasoner` is a small model in the package. It solves chains of arithmetic modulo 10, with one thought per paragraph, and
# then checks its answer.

# %%
import numpy as np

import jkv

model = jkv.load("tiny-reasoner")
problem = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"
full = jkv.generate(model, problem)
print(full.text[0][:300], "...", full.text[0].splitlines()[-1], sep="\n")

# %% [markdown]
# ## What the numbers mean
#
# `stats` is counted on the real pool. With the full cache, nothing is evicted.

# %%
stats = full.stats
print(f"{stats.prompt_tokens} tokens of prompt, {stats.generated_tokens} generated, ended by {full.finish_reason[0]!r}")
print(f"{stats.peak_kv_bytes:,} bytes of cache at the end, {stats.kv_bytes:,} on average")
print(f"{stats.tokens_per_second:.0f} tokens a second, after {stats.compile_seconds:.1f} seconds of compiling")
assert stats.evicted == 0

# %% [markdown]
# You can compute these bytes by hand. A token has a key, a value and a position (4 bytes) in each layer and KV head. A page has
# 16 slots, and the last page is usually not full.

# %%
config = model.params.config
heads = config.num_layers * config.num_kv_heads
token_bytes = heads * (full.slot_bytes + 4)
tokens = stats.prompt_tokens + stats.generated_tokens
pages = -(-tokens // 16)
print(f"{tokens} tokens of {token_bytes:,} bytes, in {pages} pages: {pages * 16 * token_bytes:,} bytes")
assert abs(stats.peak_kv_bytes - pages * 16 * token_bytes) <= 16 * token_bytes

# %% [markdown]
# ## A smaller cache
#
# Every 16 tokens, R-KV compacts the cache to 160 slots in each layer and KV head: those with high attention from the last queries
# whose keys are not similar to others. The pages of the evicted slots are free at once.

# %%
policy = jkv.r_kv(budget=160, interval=16)
small = jkv.generate(model, problem, policy=policy, return_trace=True)
print(f"{small.stats.evicted:.0f} tokens evicted in {small.stats.compactions} compactions")
print(f"{small.stats.peak_kv_bytes:,} bytes at the peak, where the full cache took {full.stats.peak_kv_bytes:,}")
print("the full cache answers", full.text[0].splitlines()[-1], "and the small one", small.text[0].splitlines()[-1])
assert small.stats.peak_kv_bytes < full.stats.peak_kv_bytes

# %% [markdown]
# The answer may need an evicted token, so a small cache can cost accuracy. How much depends on the policy and the task
# (`2_compare_policies`).
#
# ## Several prompts, several policies
#
# Prompts decode in one batch, and each may have its own policy. The tokens of a row do not depend on the other rows.

# %%
prompts = [problem, "x=4;y=9;z=x-y;w=z*x;v=w+y;u=v-z;?u"]
policies = [jkv.full(), jkv.lag_kv(budget=128, interval=16)]
out = jkv.generate(model, prompts, policy=policies)
for sample, chosen, text in zip(out.samples, policies, out.text, strict=True):
    print(f"{chosen.name:>14}: {sample.evicted:5.0f} evicted, {sample.peak_kv_bytes:,} bytes at most, {text.splitlines()[-1]}")
assert np.array_equal(out.tokens[0, : out.lengths[0]], full.tokens[0, : full.lengths[0]])

# %% [markdown]
# ## Replay
#
# A trace records which keys each query could read. One parallel forward pass over the same keys reproduces the log-probabilities
# of the tokens, so a compressed generation can be checked exactly. The full cache has other log-probabilities.

# %%
replayed = jkv.score(model, small, trace=small.trace).logprobs
dense = jkv.score(model, small).logprobs
print("largest difference from the replay:    ", np.abs(replayed - small.logprobs).max())
print("largest difference from the full cache:", np.abs(dense - small.logprobs).max())
assert np.abs(replayed - small.logprobs).max() < 1e-3 < np.abs(dense - small.logprobs).max()

# %% [markdown]
# ## A large model
#
# How much memory would this save for a model of 32 billion weights on one GPU? `jkv.plan` computes it from shapes alone. Nothing
# is downloaded or compiled.

# %%
plan = jkv.plan("qwq-32b", "h200", jkv.r_kv(budget=1024))
print(plan)
assert plan.own.batch > plan.full.batch

# %% [markdown]
# Next: `2_compare_policies` compares several policies, and `4_what_is_kept` shows which tokens they keep.
