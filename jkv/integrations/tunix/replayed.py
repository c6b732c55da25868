"""The loss of `JkvGRPOLearner(loss="replay")`: the policy that sampled, its evictions included, is the one that is trained."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float
from tunix.rl.grpo import grpo_learner

from jkv.errors import refused
from jkv.integrations.tunix.weights import TENSOR, leaves_of, make_params
from jkv.model.params import ModelConfig
from jkv.model.sharding import HEADS
from jkv.replay.on_mesh import num_row_shards
from jkv.rl import Batch, policy_loss
from jkv.rl.loss import parse_clip

MEANS = {"token-mean": "tokens", "sequence-mean-token-mean": "sequences"}  # loss_agg_mode -> mean of `jkv.rl.policy_loss`
Loss = Callable[[nnx.Module, Any, Any], tuple[Array, dict[str, Array]]]


@flax.struct.dataclass(frozen=True)
class ReplayedExample(grpo_learner.TrainExample):
    """What tunix trains on, and the same completions with what each token read; tunix cuts both into microbatches."""

    batch: Batch | None = None


def settings_of(config: grpo_learner.GRPOConfig) -> dict[str, Any]:
    """The settings of `jkv.rl.policy_loss` that mean what a configuration of tunix means.

    Raises:
      ValueError: it asks for a loss that `policy_loss` does not have.
    """
    for name, given, known in (
        ("policy_loss_fn", config.policy_loss_fn, ("grpo",)),
        ("loss_algo", config.loss_algo, ("grpo",)),
        ("loss_agg_mode", config.loss_agg_mode, tuple(MEANS)),
        ("kl_loss_mode", config.kl_loss_mode if config.beta else "low_var_kl", ("low_var_kl",)),
        ("kl_clamp_value", getattr(config, "kl_clamp_value", None) if config.beta else None, (None,)),
        ("epsilon_c", getattr(config, "epsilon_c", None), (None,)),
    ):
        if given not in known:
            choices = " or ".join(map(repr, known))
            rule = f'{name} must be {choices} with loss="replay"; got {given!r}. Set it, or take loss="dense".'
            raise refused(rule, **{name: "unsupported"})
    clip = config.epsilon, getattr(config, "epsilon_high", config.epsilon)
    return {"clip": parse_clip(clip), "mean": MEANS[config.loss_agg_mode], "beta": config.beta or 0.0}  # DAPO's is None


def renamed(mesh: Mesh) -> Mesh | None:
    """A mesh of tunix by the names of `jkv`; None for one device."""
    return Mesh(mesh.devices, [HEADS if name == TENSOR else name for name in mesh.axis_names]) if mesh.size > 1 else None


def make_loss(shape: ModelConfig, scales: dict[str, float], settings: dict[str, Any], mesh: Mesh | None = None) -> Loss:
    """A loss for tunix's trainer: of its model, a `ReplayedExample` and its configuration.

    Each device computes its rows with its heads. Weights that an axis other than "tp" splits are gathered first: a device then
    holds its heads' part of all layers, and of their gradient.

    Args:
      shape: of the actor.
      scales: of its LoRA adapters, by the path of their weights.
      settings: of `jkv.rl.policy_loss`.
      mesh: of the actor, by the names of `jkv`.
    """
    shards = num_row_shards(mesh)

    def loss(model: nnx.Module, train_example: ReplayedExample, algo_config: Any) -> tuple[Array, dict[str, Array]]:
        batch = train_example.batch
        assert batch is not None
        reference = placed(train_example.ref_per_token_logps, batch) if settings["beta"] else None
        batch, reference = with_rows(batch, reference, -(-len(batch.token) // shards) * shards)
        params = make_params(shape, leaves_of(model), scales)
        value, metrics = policy_loss(params, batch, reference=reference, mesh=mesh, **settings)
        figures = {f"replay_{name}": metrics[f"difference_{name}"] for name in ("p99", "max")}
        return value, {"kl": metrics.get("kl", jnp.zeros(())), "pg_clipfrac": metrics["clipped"]} | figures

    return loss


def placed(values: Float[Array, "N W"], batch: Batch) -> Float[Array, "N T"]:
    """Values of completion tokens where a batch has these tokens; 0 elsewhere."""
    index = jnp.arange(batch.token.shape[1]) - batch.start[:, None]
    is_there = (index >= 0) & (index < values.shape[1])
    return jnp.where(is_there, jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1), 0.0)


def with_rows(batch: Batch, reference: Float[Array, "N T"] | None, rows: int) -> tuple[Batch, Float[Array, "rows T"] | None]:
    """A batch and its reference with so many rows, for a mesh. What is added are copies of the last row that train nothing."""
    index = jnp.minimum(jnp.arange(rows), len(batch.token) - 1)
    is_own = jnp.arange(rows) < len(batch.token)
    batch, reference = jax.tree.map(lambda x: x[index], (batch, reference))
    return batch.replace(mask=batch.mask & is_own[:, None]), reference
