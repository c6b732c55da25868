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
# # What is kept
#
# Pictures of the cache during a generation: which tokens stay, how many, and which text repeats.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/4_what_is_kept.ipynb)

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
# One problem and four policies, each with its trace, which records the tokens that each query could read.

# %%
import numpy as np

import jkv
from jkv.bench.distances import all_distances
from jkv.viz.look import subplots

model = jkv.load("tiny-reasoner")
problem = "b=3;c=7;d=b*c;e=d+b;?e"
policies = {
    "streaming_llm": jkv.streaming_llm(budget=64, interval=16),
    "r_kv": jkv.r_kv(budget=64, interval=16, window=4),
    "h2o": jkv.h2o(budget=64),
    "full": jkv.full(),
}
outs = {}
for name, policy in policies.items():
    outs[name] = jkv.generate(model, problem, policy=policy, return_trace=True, page_size=4, max_new_tokens=224, progress=False)
    print(f"{name:>14}: {outs[name].stats.generated_tokens} tokens, {outs[name].stats.evicted:.0f} evicted")

# %% [markdown]
# ## Token by token
#
# The same problem under two policies with the same budget, side by side. Each token is shaded by the share of layers and heads that
# still hold it. The page opens at the first eviction. Move the slider through time, or choose one layer and head. Each panel has the
# text of its own policy, and a mark where the texts begin to differ. This is a page of HTML: run the cell to see it, or write it with
# `.save("kept.html")`. `jkv.viz.kept(outs["r_kv"])` shows one policy alone.

# %%
jkv.viz.kept([outs["r_kv"], outs["streaming_llm"]])

# %% [markdown]
# ## All of time at once
#
# The same as a static picture: a column for each query, a row for each earlier token, dark where all heads can read it. StreamingLLM
# keeps a band and the first four tokens. R-KV keeps single tokens from the whole text, which appear as lines. H2O evicts one token for
# each new token, so it has no stairs.

# %%
compressed = ("streaming_llm", "r_kv", "h2o")
longest = max(outs[name].trace.end.shape[-1] for name in compressed)
figure, every = subplots(1, 3, (8.0, 3.1), sharey=True)
for axes, name in zip(every, compressed, strict=True):
    begin, end = outs[name].trace.begin[0], outs[name].trace.end[0]  # [layers, heads, tokens]
    query = np.arange(end.shape[-1])
    is_read = (begin[..., None] <= query) & (query < end[..., None])
    assert is_read.sum(axis=2).max() <= 64 + 16  # never more than the budget, and what comes before the next compaction
    axes.imshow(is_read.mean(axis=(0, 1)), cmap="Blues", interpolation="nearest")
    axes.grid(visible=False)
    axes.set(title=name, xlabel="position of the query", xlim=(0, longest), ylim=(longest, 0), facecolor="#f7fbff")
every[0].set(ylabel="position of the token")
figure

# %% [markdown]
# ## How much is kept
#
# The number of slots while the completion grows. With R-KV the cache grows for 16 tokens and is then compacted to 64 slots. H2O always
# holds 64 slots. The dashed line is the full cache.

# %%
jkv.viz.cache_size({name: outs[name] for name in ("r_kv", "h2o")})

# %% [markdown]
# ## What repeats
#
# A reasoning model repeats itself, and this one checks its answer word for word. The picture shows the distances between the keys and
# values of all pages of four tokens in the full cache. Dark means near, and a circle marks two pages with equal tokens. Policies that
# *share* pages use these distances (`jkv.reason_cache`, `jkv.mem_share`).

# %%
full = outs["full"]
tokens = np.concatenate([full.prompts[0], full.tokens[0, : full.lengths[0]]]).astype(np.int32)
pages = tokens[: len(tokens) // 4 * 4].reshape(-1, 4)
is_same = (pages[:, None] == pages[None]).all(axis=-1) & ~np.eye(len(pages), dtype=bool)
found = {name: all_distances(model, tokens, 4, name) for name in ("rotated", "raw")}
jkv.viz.distances(found, is_same)

# %% [markdown]
# Repeated text appears as dark diagonals in the raw keys. Cached keys are rotated by their position, so equal text at another position
# is less similar. This is one reason why sharing is hard.

# %%
for name, distance in found.items():
    same, other = np.median(distance[is_same]), np.median(distance[~is_same & ~np.eye(len(pages), dtype=bool)])
    print(f"{name:>8}: pages of the same tokens are {same:.1f} apart at the median, others {other:.1f}")
    assert same < other
