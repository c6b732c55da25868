"""GRPO of tunix with small models, for its tests; importing it skips a test file where tunix is not installed."""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

pytest.importorskip("tunix")

import optax
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig

from jkv.integrations.tunix import JkvGRPOLearner, JkvRollout
from tests.support.tunix_models import LIMIT, SETTINGS, Letters, rollout_config


def reward(prompts, completions, **kwargs):
    """The share of every other letter: any signal that a few steps can follow."""
    return [sum(ord(letter) % 2 for letter in text) / LIMIT for text in completions]


def make_mesh(*shape):
    """A mesh by the names of tunix, of the first devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("fsdp", "tp"))


def make_cluster(model, engine, tokenizer=None, config=None, mesh=None, **training):
    mesh = mesh or make_mesh(1, 1)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    settings = {"actor_optimizer": optax.sgd(0.1), "eval_every_n_steps": 1000, "max_steps": 3, "mini_batch_size": 3}
    settings |= {"train_micro_batch_size": 3, "rollout_micro_batch_size": 1, "compute_logps_micro_batch_size": 1}
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        training_config=rl_cluster.RLTrainingConfig(**settings | training),
        rollout_config=config or rollout_config(),
    )
    return rl_cluster.RLCluster(actor=model, tokenizer=tokenizer or Letters(), cluster_config=config)


def learn(
    model,
    learner=JkvGRPOLearner,
    engine=JkvRollout,
    tokenizer=None,
    config=None,
    mesh=None,
    steps=3,
    num_iterations=1,
    **options,
):
    """A learner after some steps, the examples that its loss was given, and how often weights were synchronised."""
    settings = {key: options.pop(key) for key in ("live", "policy") if key in options}
    engine = functools.partial(engine, **SETTINGS, **settings)
    training, eval_ds = options.pop("training", {}), options.pop("eval_ds", None)
    cluster = make_cluster(model, engine, tokenizer, config, mesh, max_steps=steps * num_iterations, **training)
    synchronised, examples, outputs, parts = [], [], [], []
    cluster.rollout.update_params = with_callback(cluster.rollout.update_params, lambda args, _: synchronised.append(args))
    cluster.generate = with_callback(cluster.generate, lambda _, out: outputs.append(out))
    settings = GRPOConfig(num_generations=4, beta=0.0, num_iterations=num_iterations)
    grpo = learner(cluster, settings, reward, **options)
    compute = grpo._generate_and_compute_advantage
    grpo._generate_and_compute_advantage = with_callback(compute, lambda _, example: examples.append(example))
    grpo._process_accumulated_batches = with_callback(grpo._process_accumulated_batches, lambda _, out: parts.extend(out))
    grpo.train([{"prompts": np.array(["abc", "bcdefgh", "cd"])} for _ in range(steps)], eval_ds)
    return Learned(grpo, examples, outputs, synchronised, parts)


class Learned(NamedTuple):
    grpo: object
    examples: list
    outputs: list
    synchronised: list
    parts: list  # examples as tunix cuts them into microbatches

    def logged(self, name):
        return self.grpo.rl_cluster._rl_metrics_logger.get_metric_history(*name.split("/"), "train")


def with_callback(function, listener):
    def called(*args, **kwargs):
        out = function(*args, **kwargs)
        listener(args, out)
        return out

    return called
