"""GRPO with tunix, on rollouts of a compressed cache: one page to start from (`pip install "jkv-cache[tunix]"`).

    python -m research.grpo.with_tunix --steps 60
    python -m research.grpo.with_tunix --steps 60 --lora 8

A tiny Qwen3 with random weights learns to count: the reward is the share of digits that are one more than the digit before. It
takes minutes on a CPU. With `--lora`, only a low-rank adapter of that rank is trained; a rollout engine on other devices is
then sent the adapter alone. For a model of your own, replace `make_actor`, `Digits`, `count` and `prompts`.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rollout.base_rollout import RolloutConfig

import jkv
from jkv.integrations.tunix import JkvGRPOLearner, JkvRollout, params_of

PROMPTS, SAMPLES = 4, 8  # of a step: prompts, and completions of each
PROMPT_TOKENS, NEW_TOKENS = 6, 24  # at most; tunix puts the token that begins a text before each prompt
POLICY = jkv.r_kv(budget=12, interval=8, window=4)  # slots of up to 30 tokens


class Digits:
    """A tokenizer with a token for each digit; 10 pads, 11 ends and 12 begins a text."""

    def encode(self, text: str) -> list[int]:
        return [int(digit) for digit in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(token) if token < 10 else "?" for token in ids)

    def bos_id(self) -> int:
        return 12

    def pad_id(self) -> int:
        return 10

    def eos_id(self) -> int:
        return 11


def make_actor(lora_rank: int = 0) -> nnx.Module:
    """The model that is trained, or whose adapter is."""
    shape = {"num_layers": 2, "vocab_size": 13, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2}
    config = qwen3.ModelConfig(**shape, head_dim=16, norm_eps=1e-6, rope_theta=1_000_000)
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    if not lora_rank:
        return model
    matrices = ".*(q_proj|k_proj|v_proj|o_proj)"  # without those of the MLP: in a new model of tunix they are zeros, all three
    provider = qwix.LoraProvider(module_path=matrices, rank=lora_rank, alpha=2.0 * lora_rank)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))


def count(prompts: Sequence[str], completions: Sequence[str], **_: object) -> list[float]:
    """The reward of each completion."""

    def hits(text: str) -> int:
        return sum(after == str((int(before) + 1) % 10) for before, after in itertools.pairwise(text) if before != "?")

    return [hits(text) / NEW_TOKENS for text in completions]


def prompts(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """The prompts of each step."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield {"prompts": np.array(["".join(map(str, rng.integers(10, size=PROMPT_TOKENS - 1))) for _ in range(PROMPTS)])}


def train(steps: int, lora_rank: int = 0) -> tuple[list[float], jkv.Params]:
    """The mean reward of each step, and the weights after the last."""
    rewards: list[float] = []

    def reward(prompts: Sequence[str], completions: Sequence[str], **more: object) -> list[float]:
        values = count(prompts, completions, **more)
        rewards.append(float(np.mean(values)))
        print(f"step {len(rewards)}: reward {rewards[-1]:.3f}", flush=True)
        return values

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster_config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=functools.partial(JkvRollout, policy=POLICY, page_size=4, max_running=PROMPTS * SAMPLES),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(3e-3 if lora_rank else 1e-3),
            eval_every_n_steps=steps + 1,
            max_steps=steps,
            mini_batch_size=PROMPTS,
        ),
        rollout_config=RolloutConfig(max_tokens_to_generate=NEW_TOKENS, max_prompt_length=PROMPT_TOKENS, temperature=1.0),
    )
    actor = make_actor(lora_rank)
    cluster = rl_cluster.RLCluster(actor=actor, tokenizer=Digits(), cluster_config=cluster_config)
    # "replay" trains what sampled, under its evictions; "dense" the full cache, with importance weights.
    learner = JkvGRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), reward, loss="replay")
    learner.train(list(prompts(steps)))
    return rewards, params_of(cluster.actor_trainer.model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    args = parser.parse_args()
    rewards, params = train(args.steps, args.lora)
    out = jkv.generate(params, [[12, 1, 2, 3]], policy=POLICY, max_new_tokens=12, page_size=4)
    print(f"reward {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}; 123 goes on {Digits().decode(out.tokens[0])}")
