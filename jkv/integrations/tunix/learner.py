"""`JkvGRPOLearner`: tunix's GRPO for rollouts with a compressed cache, corrected or replayed.

tunix 0.1.7 ignores the log-probabilities of a sampler. Corrected, this learner scores each batch with the full cache, with the
forward pass of the loss, and passes importance weights and a mask (`jkv.rl.correct`) to the loss. The difference between the
two distributions (`jkv.rl.mismatch`) is logged as metrics, with a warning if it is too large. Replayed, the loss reads what the
rollout read, and there is nothing to correct.
"""

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl import common, rl_cluster
from tunix.rl import utils as rl_utils
from tunix.rl.grpo import grpo_learner

from jkv.checks import check_known
from jkv.errors import refused
from jkv.integrations.tunix.replayed import ReplayedExample, make_loss, renamed, settings_of
from jkv.integrations.tunix.rollout import JkvRollout
from jkv.rl import correct, make_batch, mismatch
from jkv.rl.batch import failed_rows
from jkv.rollout import Rollouts

LOSSES = ("dense", "replay")
LOGGED_STATS = ("kv_bytes", "peak_kv_bytes", "dense_kv_bytes", "evicted", "tokens_per_second", "occupancy")


class JkvGRPOLearner(grpo_learner.GRPOLearner):
    """GRPO with importance weights, or under the evictions of the rollout.

    Takes the arguments of tunix's `GRPOLearner`, and these keyword arguments:
      loss: "dense" trains the model with the full cache, where each token's loss is multiplied by its weight, or masked by the
        correction. "replay" trains it as it sampled (`jkv.rl.policy_loss`). The metrics `replay_p99` and `replay_max` are the
        difference of its log-probabilities to those sampled, in nats: rounding at the first update on a batch, and the change
        of the weights, too, at later ones.
      correction: of a dense loss, a mode of `jkv.rl.correct`, such as "mask"; "none" only measures. None is "tis+veto".
      cap, band, veto: the bounds of the mode.

    The completion mask is computed from lengths, not by comparison with the padding token, so an end token that equals the
    padding token is trained. Samples that failed are outside of it. A dense loss works with any rollout engine that returns
    log-probabilities; a replay needs `JkvRollout`, for which `rollout_micro_batch_size` then splits nothing. On a mesh, the
    axis "tp" splits the heads of the replay and the other axes split its samples; weights that these split are gathered for the
    loss. A reference policy (`beta`) reads the full cache and the whole distribution, so rollouts with top-k or top-p differ
    from it from the start.

    Raises:
      ValueError: an unknown loss or mode, bounds that have no effect, settings of the cluster that would lose the weights, or
        a replay with a correction, with another engine, or with a loss of tunix that `policy_loss` lacks.
    """

    def __init__(
        self,
        *args: Any,
        loss: str = "dense",
        correction: str | None = None,
        cap: float = 2.0,
        band: tuple[float, float] = (0.5, 1.5),
        veto: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        check_known(LOSSES, loss=loss)
        if loss == "replay" and (correction, cap, band, veto) != (None, 2.0, (0.5, 1.5), 1e-4):
            raise refused(
                f"A correction and its bounds are of a dense loss; a replay needs none; got {correction=}, {cap=}, {band=}, "
                f"{veto=}. Leave them out.",
                correction="conflict",
            )
        self._is_replayed = loss == "replay"
        mode = "tis+veto" if correction is None else correction
        self._correction: dict[str, Any] = {"mode": mode, "cap": cap, "band": band, "veto": veto}
        correct(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1), bool), **self._correction)  # refuses bad settings early
        super().__init__(*args, **kwargs)
        config = self.rl_cluster.cluster_config
        for name, is_set in (
            ("max_seq_token_per_tpu", config.training_config.max_seq_token_per_tpu is not None),
            ("offload_to_cpu", config.offload_to_cpu),
        ):
            if is_set:
                raise refused(
                    f"{name} must not be set: tunix 0.1.7 loses importance weights if it packs sequences, and offloaded "
                    "weights cannot score. Leave it out.",
                    **{name: "unsupported"},
                )
        self._rolled_out = threading.local()  # tunix rolls out and evaluates in different threads
        if self._is_replayed:
            self._replay()
        if isinstance(self.rl_cluster.rollout, JkvRollout):
            self.rl_cluster.rollout.on_samples = self._keep
        self._generate, self.rl_cluster.generate = self.rl_cluster.generate, self._generate_and_keep

    def _replay(self) -> None:
        """Has the rollout engine trace its samples, and the trainer replay them."""
        cluster = self.rl_cluster
        rollout, settings = cluster.rollout, settings_of(self.algo_config)
        if not isinstance(rollout, JkvRollout):
            rule = f'loss="replay" needs the rollout engine JkvRollout; got {type(rollout).__name__}. Set it.'
            raise refused(rule, rollout="unsupported")
        mesh = renamed(cluster.r2m[rl_cluster.Role.ACTOR])
        rollout.return_trace = True
        cluster.get_old_per_token_logps = lambda *args, **kwargs: None  # of the full cache, which nothing would read
        cluster.actor_trainer.with_loss_fn(make_loss(rollout.shape, rollout.scales, settings, mesh), has_aux=True)
        logged = {"kl": np.mean, "pg_clipfrac": np.mean, "replay_p99": np.mean, "replay_max": np.max}
        cluster.actor_trainer.with_rl_metrics_to_log(logged)

    def _keep(self, samples: Rollouts) -> None:
        """Keeps the samples that this thread drew, with the fields that tunix does not carry."""
        self._rolled_out.samples = [*getattr(self._rolled_out, "samples", ()), samples]

    def _generate_and_keep(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the cluster's `generate` and keeps its output, because tunix drops the log-probabilities."""
        if self._is_replayed:
            kwargs["micro_batch_size"] = None  # the engine batches by itself
        self._rolled_out.samples = []
        self._rolled_out.output = self._generate(*args, **kwargs)
        return self._rolled_out.output

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: rl_cluster.Mode = rl_cluster.Mode.TRAIN
    ) -> grpo_learner.TrainExample:
        """The example of tunix with importance weights and the corrected mask, or with what each token read."""
        example = super()._generate_and_compute_advantage(training_input, mode)
        if self._is_replayed:
            return self._replayed(example, mode)
        output = self._rolled_out.output
        if output.logprobs is None:
            rule = "A correction needs the sampler's log-probabilities; got none. Set return_logprobs=True."
            raise refused(rule, return_logprobs="missing")
        width = example.completion_ids.shape[1]
        sampled = np.zeros((len(output.tokens), width), np.float32)
        lengths = np.array([len(row) for row in output.tokens])
        for row, log_probs in zip(sampled, output.logprobs, strict=True):
            row[: len(log_probs)] = log_probs
        failed = [failed_rows(out, "mask") for out in self._rolled_out.samples]  # none of another engine's
        mask = np.arange(width) < lengths[:, None]
        mask &= ~np.concatenate(failed)[:, None] if failed else True
        dense = self._score(example)
        corrected = correct(dense, sampled, mask, **self._correction)
        self._log(mismatch(dense, sampled, mask).as_dict() | corrected.metrics, mode)
        is_old = self.should_sync_weights or self.algo_config.num_iterations > 1
        return dataclasses.replace(
            example,
            completion_mask=corrected.mask,
            sampler_is_weights=corrected.weights,
            old_per_token_logps=dense if is_old else None,
        )

    def _replayed(self, example: grpo_learner.TrainExample, mode: rl_cluster.Mode) -> ReplayedExample:
        """The example with its completions as a batch of one shape."""
        (out,), widths = self._rolled_out.samples, (example.prompt_ids.shape[1], example.completion_ids.shape[1])
        advantages, size = np.asarray(example.advantages), {"rows": len(out.tokens), "length": sum(widths)}
        batch = make_batch(out, advantages, replay=True, failed="mask", **size)
        self._log({}, mode)
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
        mask = jnp.asarray(np.arange(widths[1]) < np.where(failed_rows(out, "mask"), 0, out.lengths)[:, None])
        return ReplayedExample(**fields | {"completion_mask": mask, "batch": batch})

    def _score(self, example: grpo_learner.TrainExample) -> jax.Array:
        """The trainer's log-probabilities [B, T] with the weights of the rollout (the actor's, or the last synchronised)."""
        cluster = self.rl_cluster
        ids = {"pad_id": cluster.rollout.pad_id(), "eos_id": cluster.rollout.eos_id()}
        tokens, size = (example.prompt_ids, example.completion_ids), len(example.prompt_ids)
        step = (self._compute_logps_micro_batch_size or size) * self.algo_config.num_generations
        temperature = self.algo_config.temperature
        if self.should_sync_weights:
            return cluster.get_actor_per_token_logps(*tokens, **ids, micro_batch_size=step, temperature=temperature)
        graphdef, state = nnx.split(cluster.actor_trainer.model)
        with cluster.r2m[rl_cluster.Role.ACTOR]:
            parts = [
                common.compute_per_token_logps(
                    graphdef, state, *(part[rows] for part in tokens), **ids, temperature=temperature
                )
                for rows in rl_utils.chunk_slices_by_size(size, step)
            ]
        return jnp.concatenate(parts)

    def _log(self, figures: dict[str, Any], mode: rl_cluster.Mode) -> None:
        """Logs metrics with tunix, and the statistics of the rollout if it has any."""
        logged = {f"sampler/{name}": float(value) for name, value in figures.items() if np.ndim(value) == 0}
        last = getattr(self.rl_cluster.rollout, "last", None)
        if last is not None:
            logged |= {f"rollout/{name}": float(getattr(last.stats, name)) for name in LOGGED_STATS}
        self.rl_cluster.buffer_metrics({name: (value, np.mean) for name, value in logged.items()}, mode=mode)
