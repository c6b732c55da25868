"""Reinforcement learning on compressed rollouts: how far they are off, what corrects them, and the loss that replays them.

    out = rollout(prompts, n=8, return_trace=True)
    batch = jkv.rl.make_batch(out, jkv.rl.group_advantages(rewards, n=8), replay=True)
    (loss, metrics), gradient = jax.value_and_grad(jkv.rl.policy_loss, has_aux=True)(params, batch)
    wandb.log({"loss": loss, **metrics})  # all metrics are scalars

Optimisers are the caller's; `python -m research.grpo` is a whole run.
"""

from jkv.rl.advantages import group_advantages
from jkv.rl.batch import Batch, log_probs, make_batch
from jkv.rl.correction import Correction, correct
from jkv.rl.diagnosis import Diagnosis, diagnose
from jkv.rl.distillation import distillation, kl_divergence, log_probs_at, teacher_advantages, with_rest
from jkv.rl.loss import policy_loss
from jkv.rl.mismatch import Figures, Mismatch, mismatch
from jkv.rl.overlap import FullOverlap, full_overlap

__all__ = [
    "Batch",
    "Correction",
    "Diagnosis",
    "Figures",
    "FullOverlap",
    "Mismatch",
    "correct",
    "diagnose",
    "distillation",
    "full_overlap",
    "group_advantages",
    "kl_divergence",
    "log_probs",
    "log_probs_at",
    "make_batch",
    "mismatch",
    "policy_loss",
    "teacher_advantages",
    "with_rest",
]
