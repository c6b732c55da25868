"""One run of GRPO on compressed rollouts: draw, reward, update, swap the weights; and measure the mismatch of policies.

Every number depends on the course, the arm, the seed and the step alone, so a run resumed from a checkpoint equals an unbroken
one.
"""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jkv import rl
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.results import complete
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.model.params import Model, Params
from jkv.model.sampling import Sampling
from jkv.policies import full
from jkv.rollout import Rollout
from research.grpo.checkpoints import Checkpoints, History, Progress
from research.grpo.course import TASKS, Arm, Course

EVALUATION_SEED = 1_000_003
TOLERANCES = {"p99": 1e-5, "max": 1e-4}  # nats: a replay further off than this is no replay
FIGURES = ("k1", "k3", "chi2", "ess", "overlap", "p05", "p01", "max_difference", "veto_rate")


def seed_of(*parts: int) -> int:
    """A seed below 2**32 of several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@functools.cache
def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Adam after clipping; one object a rate, so that equal runs share a program."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


@functools.partial(jax.jit, static_argnames=("optimizer", "loss", "correction"))
def update(
    optimizer: optax.GradientTransformation, params: Params, state: Any, batch: rl.Batch, loss: str, correction: str
) -> tuple[Params, Any, dict[str, Any]]:
    """New weights and optimiser state; the loss's metrics, and the dense log-probabilities before the update."""

    def objective(weights: Params) -> tuple[Any, Any]:
        if loss == "replay":
            return rl.policy_loss(weights, batch, return_log_probs=True)
        old = batch.sampled if loss == "bypass" else None
        return rl.policy_loss(weights, batch.dense(), old=old, correction=correction, return_log_probs=True)

    (value, (metrics, log_probs)), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    dense = rl.log_probs(params, batch.dense()) if loss == "replay" else log_probs
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts by rates, which strict promotion refuses
        change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state, metrics | {"loss": value, "dense": dense}


def beyond(metrics: Mapping[str, Any]) -> str:
    """Which figures of a replay's difference, in nats, are beyond TOLERANCES; empty where it is exact.

    >>> beyond({"difference_p99": 2e-6, "difference_max": 3e-4})
    'max is 3e-04 nats, above 1e-04'
    """
    checked = [(name, float(metrics[f"difference_{name}"]), most) for name, most in TOLERANCES.items()]
    return "; ".join(f"{name} is {value:.0e} nats, above {most:.0e}" for name, value, most in checked if not value <= most)


def take_step(course: Course, arm: Arm, seed: int, step: int, rollout: Rollout, params: Params, state: Any) -> Any:
    """One update: new weights, new optimiser state, and the step's record."""
    task = TASKS[course.task]
    prompts, answers = task.draw(np.random.default_rng((seed, step)), course.prompts)
    began = time.perf_counter()
    out = rollout(
        prompts,
        n=course.samples,
        sampling=Sampling(course.temperature, seed=seed_of(seed, step)),
        max_new_tokens=course.max_new_tokens,
        stop_ids=task.stop_ids,
        return_trace=arm.loss == "replay",
        progress=False,
    )
    seconds = time.perf_counter() - began
    if rollout.pending:  # Ctrl-C: what is finished is no whole group
        raise KeyboardInterrupt
    rewards = task.reward(out, [answer for answer in answers for _ in range(course.samples)])
    advantages = rl.group_advantages(rewards, course.samples)
    batch = rl.make_batch(out, advantages, replay=arm.loss == "replay")
    params, state, metrics = update(make_optimizer(course.learning_rate), params, state, batch, arm.loss, arm.correction)
    with warnings.catch_warnings():  # the report warns once for the run
        warnings.simplefilter("ignore", UserWarning)
        apart = rl.mismatch(np.asarray(metrics["dense"]), np.asarray(batch.sampled), np.asarray(batch.mask))
    if arm.loss == "replay" and (off := beyond(metrics)):
        warnings.warn(f"step {step}: replay is not exact: {off}.", stacklevel=2)
    record = {
        "reward": float(rewards.mean()),
        "loss": float(metrics["loss"]),
        "kept": float(metrics["correction_kept"]),
        "ratio_p99": float(metrics["difference_p99"]),
        "ratio_max": float(metrics["difference_max"]),
        "tokens": int(out.lengths.sum()),
        "seconds": seconds,
        "peak_kv_bytes": out.stats.peak_kv_bytes,
        "dense_kv_bytes": out.stats.dense_kv_bytes,
    }
    return params, state, record | {name: getattr(apart, name) for name in FIGURES}


def examine(course: Course, arm: Arm, model: Model) -> dict[str, Any]:
    """The mean reward with the full cache ("dense") and with the arm's own."""
    dense = evaluate(course, model, full())
    return {"dense": dense, "own": dense if arm.policy == full() else evaluate(course, model, arm.policy)}


def is_due(course: Course, history: History) -> bool:
    """Whether an evaluation belongs here, and is not made."""
    done = len(history.steps)
    made = history.evaluations[-1]["step"] if history.evaluations else -1
    return made < done and (done % course.evaluate_every == 0 or done == course.steps)


def evaluate(course: Course, model: Model, policy: Policy) -> float:
    """The mean reward on prompts that are the same for every run, with one draw for each."""
    task = TASKS[course.task]
    prompts, answers = task.draw(np.random.default_rng(EVALUATION_SEED), course.evaluations)
    out = generate(
        model,
        prompts,
        policy=policy,
        sampling=Sampling(course.temperature, seed=EVALUATION_SEED),
        max_new_tokens=course.max_new_tokens,
        stop_ids=task.stop_ids,
        page_size=course.page_size,
        progress=False,
    )
    return float(task.reward(complete(out), answers).mean())


def make_rollout(course: Course, arm: Arm, model: Model) -> Rollout:
    """Where an arm draws its completions."""
    return Rollout(
        model,
        arm.policy,
        max_prompt_tokens=TASKS[course.task].prompt_tokens,
        max_new_tokens=course.max_new_tokens,
        n=course.samples,
        max_running=min(course.prompts * course.samples, 64),
        page_size=course.page_size,
        pad_id=max(set(range(model.config.vocab_size)) - {*model.config.end_ids}),  # no prompt of ids begins or ends with it
    )


def learn(
    course: Course,
    arm: Arm,
    seed: int,
    folder: Path | None = None,
    on_step: Callable[[dict[str, Any]], None] = lambda record: None,
) -> tuple[Params, History]:
    """Runs an arm from a seed, or resumes from the last checkpoint in `folder`; the last weights and what was written down.

    `on_step` receives each step's record.

    Raises:
      ValueError: the folder holds another run.
      KeyboardInterrupt: Ctrl-C was pressed; all whole steps are kept in `folder`.
    """
    model = TASKS[course.task].start(seed)
    start = Progress(model.params, make_optimizer(course.learning_rate).init(model.params))
    about = course.about(arm, seed) | {"start": model.digests}
    with contextlib.closing(Checkpoints(folder, about)) as checkpoints:
        now = checkpoints.restore(start, course.steps)
        rollout = make_rollout(course, arm, dataclasses.replace(model, params=now.params))
        try:
            while True:
                if is_due(course, now.history):
                    now = now.evaluated({"step": len(now.history.steps), **examine(course, arm, rollout.model)})
                done = len(now.history.steps)
                if done == course.steps or (done and done % course.checkpoint_every == 0):
                    checkpoints.save(now)
                if done == course.steps:
                    return now.params, now.history
                now = now.stepped(*take_step(course, arm, seed, done, rollout, now.params, now.state))
                rollout.update(now.params)
                on_step(now.history.steps[-1])
        except KeyboardInterrupt:
            with deferred_interrupts():
                checkpoints.save(now)
            raise
