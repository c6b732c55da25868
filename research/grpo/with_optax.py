"""GRPO with optax alone, on rollouts of a compressed cache: one page to start from.

    python -m research.grpo.with_optax --steps 60

A tiny model with random weights learns to count: the reward is the share of digits that are one more than the digit before. It
takes half a minute on a CPU. For a model of your own, replace `counting.start` (by `jkv.load`), `counting.draw` and
`counting.reward`.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax

import jkv
from research.tasks import counting

PROMPTS, SAMPLES = 4, 8  # of a step: prompts, and completions of each
NEW_TOKENS = 24
POLICY = jkv.r_kv(budget=12, interval=8, window=4)  # slots of up to 29 tokens


def train(steps: int, loss: str = "replay") -> tuple[list[float], jkv.Model]:
    """The mean reward of each step, and the model after the last.

    `loss` is "replay", which trains what sampled, under its evictions; or "dense", the full cache with importance weights.
    """
    model, rng, rewards = counting.start(seed=0), np.random.default_rng(0), []
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    params, state = model.params, optimizer.init(model.params)
    sizes: Any = {"n": SAMPLES, "max_prompt_tokens": counting.PROMPT_TOKENS, "max_new_tokens": NEW_TOKENS, "page_size": 4}
    rollout = jkv.Rollout(model, POLICY, **sizes)

    @jax.jit
    def learn(params: Any, state: Any, batch: jkv.rl.Batch) -> tuple[Any, Any, dict[str, Any]]:
        correction = None if loss == "replay" else "tis+veto"
        gradient, metrics = jax.grad(jkv.rl.policy_loss, has_aux=True)(params, batch, clip=(0.2, 0.28), correction=correction)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, metrics

    for step in range(steps):
        prompts, _ = counting.draw(rng, PROMPTS)
        out = rollout(prompts, seed=step, return_trace=loss == "replay")
        reward = counting.reward(out)
        batch = jkv.rl.make_batch(out, jkv.rl.group_advantages(reward, n=SAMPLES), replay=loss == "replay")
        params, state, metrics = learn(params, state, batch)
        rollout.update(params)
        rewards.append(float(np.mean(reward)))
        print(f"step {step + 1}: reward {rewards[-1]:.3f}, difference {metrics['difference_p99']:.0e} nats", flush=True)
    return rewards, jkv.Model(params, name=model.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss", choices=("replay", "dense"), default="replay")
    options = parser.parse_args()
    rewards, model = train(options.steps, options.loss)
    out = jkv.generate(model, [[1, 2, 3]], policy=POLICY, max_new_tokens=12, page_size=4)
    print(f"reward {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}; 123 goes on {out.tokens[0].tolist()}")
