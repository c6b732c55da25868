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
# # Rollouts
#
# Reinforcement learning samples many long chains of thought, and their caches fill the memory. Here a small model learns to count from
# rollouts with a compressed cache: groups that share a prompt, log-probabilities of the distribution that was sampled, and a loss that
# replays the same evictions.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/6_rollouts.ipynb)

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
# ## A group of samples
#
# A `Rollout` is an engine that stays open between calls. Here it draws sixteen samples of one prompt. The prompt is prefilled once and
# its pages are shared, but each sample evicts independently.

# %%
import warnings

import jax
import numpy as np
import optax
from tqdm.auto import tqdm

import jkv
from jkv.model.weight_shapes import init_params
from jkv.viz.look import style, subplots

reasoner = jkv.load("tiny-reasoner")
options = {"max_prompt_tokens": 32, "max_new_tokens": 160, "max_running": 16}
pad_id = reasoner.tokenizer.unk_token_id  # the pad token of this tokenizer is also its end token, and jkv would warn
rollout = jkv.Rollout(reasoner, jkv.r_kv(budget=96, interval=16), pad_id=pad_id, **options)
out = rollout(["b=3;c=7;d=b*c;e=d+b;?e"], n=16, seed=0, return_trace=True, progress=False)
print(f"{len(out.lengths)} samples of {out.lengths.min()} to {out.lengths.max()} tokens, {out.stats.prefills} prefill")
print(f"at most {out.stats.peak_kv_bytes / 1e6:.1f} MB, full caches {out.stats.dense_kv_bytes / 1e6:.1f} MB")
print(out.tokens.shape, out.logprobs.dtype, sorted(set(out.finish_reason)))

# %% [markdown]
# ## What was sampled is not what is trained
#
# `out.logprobs` are under the distribution that each token was drawn from, that of the compressed cache. The forward pass of a trainer
# has the full cache and other log-probabilities. `jkv.rl.mismatch` measures the difference and warns if it is too large. A replay of the
# trace reproduces the sampled log-probabilities up to rounding.

# %%
dense = jkv.score(reasoner, out).logprobs
replayed = jkv.score(reasoner, out, trace=out.trace).logprobs
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    apart = jkv.rl.mismatch(dense, out.logprobs, out.mask)
print(f"dense: overlap {apart.overlap:.3f}, 1st percentile {apart.p01:.3f}, up to {apart.max_difference:.1f} nats apart")
print(f"replayed: up to {np.abs(np.asarray(replayed) - out.logprobs).max():.1e} nats apart")

# %% [markdown]
# A trainer of the dense policy can weight each token by `dense / sampled`, capped at 2 (`tis`). It can also drop whole sequences that
# contain a token with almost no probability under the dense policy (`veto`). With a budget as small as this, each of these long samples
# contains such a token, so the veto drops all of them. The remedies are a larger budget, `tis` alone, or replay, which needs no correction.

# %%
for mode in ("tis", "tis+veto"):
    kept = jkv.rl.correct(dense, out.logprobs, out.mask, mode=mode).metrics
    print(f"{mode:>8}: {float(kept['kept']):.0%} of the tokens stay, mean weight {float(kept['mean_weight']):.2f}")

# %% [markdown]
# ## Learning
#
# The task: five digits are given, and each following digit should be one more than the digit before. The model starts with random
# weights, and the cache has 12 slots for 45 tokens. Each update samples, computes rewards and group advantages, differentiates the
# replayed loss, and replaces the weights. Nothing compiles after the first update, because weights, prompts and evictions are data.

# %%
shape = {"width": 64, "mlp_width": 128, "num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2, "head_size": 16}
config = jkv.ModelConfig(
    family="qwen3", vocab_size=16, max_positions=1024, qk_norm=True, tie_embeddings=True, **shape
)  # ten digits, and six tokens that are never right


def reward(out):
    """The share of adjacent tokens that are digits of which the second is one more than the first."""
    first, second = out.tokens[:, :-1], out.tokens[:, 1:]
    is_pair = np.arange(first.shape[1]) < out.lengths[:, None] - 1
    return (is_pair & (second == first + 1) & (second < 10)).sum(axis=1) / np.maximum(out.lengths - 1, 1)


start, n = jkv.Model(init_params(config, jax.random.key(0)), name="counting"), 8
params, optimizer = start.params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))
state = optimizer.init(params)
rollout = jkv.Rollout(
    start, jkv.r_kv(budget=12, interval=8, window=4), max_prompt_tokens=5, max_new_tokens=40, n=n, page_size=4
)


@jax.jit
def learn(params, state, batch):
    (_, told), gradient = jax.value_and_grad(jkv.rl.policy_loss, has_aux=True)(params, batch)
    change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state, told["difference_p99"], jkv.rl.log_probs(params, batch.dense())


# %%
history, rng = [], np.random.default_rng(0)
bar = tqdm(range(80), unit="step")
for step in bar:
    prompts = list(rng.integers(10, size=(4, 5), dtype=np.int32))
    out = rollout(prompts, seed=step, stop_ids=(), return_trace=True, progress=False)
    rewards = reward(out)
    batch = jkv.rl.make_batch(out, jkv.rl.group_advantages(rewards, n), replay=True)
    params, state, off, dense = learn(params, state, batch)
    rollout.update(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = jkv.rl.mismatch(dense, batch.sampled, batch.mask)
    saved = 1 - out.stats.peak_kv_bytes / out.stats.dense_kv_bytes
    history.append((rewards.mean(), apart.overlap, apart.p05, float(off), saved, out.stats.tokens_per_second))
    bar.set_postfix(reward=f"{rewards.mean():.2f}", overlap=f"{apart.overlap:.2f}")

reward, overlap, p05, off, saved, speed = np.array(history).T
print(f"reward {reward[:5].mean():.2f} -> {reward[-5:].mean():.2f}; KV bytes saved {saved[-1]:.0%}; {speed[-1]:,.0f} tokens/s")
print(f"overlap with the full cache {overlap[0]:.2f} -> {overlap[-1]:.2f}, 5th percentile {p05[0]:.2f} -> {p05[-1]:.2f}")
print(f"the replayed ratio is off by {off.max():.1e} nats at the 99th percentile of its worst step")

# %%
figure, (left, right) = subplots(1, 2, (8.0, 2.8))
left.plot(reward, **style(0) | {"marker": ""})
left.set(xlabel="updates", ylabel="reward", ylim=(0, 1))
right.plot(overlap, label="mean", **style(0) | {"marker": ""})
right.plot(p05, label="5th percentile", **style(1) | {"marker": ""})
right.set(xlabel="updates", ylabel="overlap with the full cache", ylim=(0, 1.05))
right.legend()
figure

# %% [markdown]
# ## Weights, pauses, memory
#
# A trainer may pause rollouts, replace the weights and continue: `policy_version` has the version of the weights that drew each token.
# `sleep` frees the pool for the update, and pending samples wait in host memory.

# %%
rollout.submit(prompts, n=2, seed=0, stop_ids=())
early = rollout.run(max_steps=16)
rollout.sleep()
rollout.update(start.params)
late = rollout.run()
versions = sorted(set(late.policy_version[0].tolist()))
print(
    f"{len(early.lengths)} finished before the update, {len(late.lengths)} after; one sample was drawn by the weights {versions}"
)

# %% [markdown]
# `python -m research.grpo configs/experiments/grpo-counting.toml` is a complete run with several arms, checkpoints and a report.
# `jkv.integrations.tunix` makes jkv the rollout engine of tunix.
