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
# # First steps with jkv
#
# A reasoning model whose KV cache stays small while it thinks.
# On Colab, install it first from a checkout: `%pip install ./jkv`.

# %%
import numpy as np

import jkv

model = jkv.load("tiny-reasoner")  # 2.4 million weights, inside the package
model

# %% [markdown]
# It solves chains of arithmetic modulo 10, one step a paragraph, and verifies itself.

# %%
problem = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"
full = jkv.generate(model, problem)
print(full.text[0])

# %% [markdown]
# The same with R-KV: at most 96 slots in each layer and KV head after every compaction, every 16 tokens.

# %%
policy = jkv.r_kv(budget=96, interval=16)
small = jkv.generate(model, problem, policy=policy, return_trace=True)
print(small.text[0].splitlines()[-1], small.stats)
assert small.stats.peak_kv_bytes < full.stats.peak_kv_bytes

# %% [markdown]
# The trace says which keys each query could read. Replaying it in one forward pass gives the engine's log-probabilities.

# %%
replayed = jkv.score(model, small, trace=small.trace).logprobs
print("largest difference:", np.abs(replayed - small.logprobs).max())
