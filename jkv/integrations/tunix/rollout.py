"""`JkvRollout`: `jkv.Rollout` as a rollout engine of tunix, with live weights of the actor or synchronised ones.

tunix repeats each prompt for its group; adjacent equal prompts become one group, which is prefilled once. Intended differences
from tunix's own sampler: end tokens stay in the completion, so that stopping is trained; log-probabilities are under the exact
distribution that was drawn from; a call without a seed draws fresh entropy.
"""

import collections
import contextlib
import dataclasses
import itertools
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from jkv.checks import check_known, counted
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.mesh import DATA
from jkv.engine.results import FAILED, reason_of
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.integrations.tunix.weights import TENSOR, Leaves, config_of, leaves_of, make_params, merged, scales_of, warn_of_dtype
from jkv.model.params import Params
from jkv.model.sampling import Sampling
from jkv.model.sharding import HEADS, check_divides, num_parts, shard
from jkv.replay.score import score
from jkv.rollout import Rollout, Rollouts

ON_FAILED = ("raise", "return")
LIMITS = ("max_prompt_tokens", "max_new_tokens", "max_stop_ids")  # limits of the engine that a configuration may raise


class JkvRollout(base_rollout.BaseRollout):
    """A rollout engine for `ClusterConfig(rollout_engine=functools.partial(JkvRollout, policy=...))`.

    Args:
      rollout_actor: tunix's actor. tunix passes it, the tokenizer, the mesh and the configuration.
      tokenizer: a tokenizer of `tunix.generate.tokenizer_adapter`.
      mesh: the devices of the role ROLLOUT. Its axis "tp" splits heads, and must divide them or be a multiple of the KV heads.
        Other axes, such as "fsdp", make replicas, each with all weights and an engine of its own; where these do not fit, give
        the role a mesh of the same devices with a longer "tp". None splits heads over the devices of the weights.
      rollout_config: the configuration of training. A call may pass another; a larger one rebuilds the engine.
      policy: the eviction policy; None means the full cache.
      live: whether each call reads the actor's weights directly. With False, the weights come from `update_params`. None
        means live if the actor is on the devices of the mesh.
      lora_alpha: the alpha of the actor's adapters; None reads it from the rules of qwix.
      sleeps: whether the pool is freed between calls to make room for the trainer. References to live weights are dropped too,
        so that arrays which training replaces are freed.
      failed: what becomes of a call with samples that ended by a failure (finish reason "error" or "nan"), which tunix cannot
        mark: "raise" raises, "return" returns them; `JkvGRPOLearner` leaves them out of its mask, other learners train them.
      engine: further arguments of `jkv.Rollout` (`max_running`, `page_size`, `kv_memory`, ...).

    Attributes:
      shape: the model's `ModelConfig`.
      scales: the scale of each LoRA adapter, by the path of its weight.
      return_trace: whether samples have their trace.
      on_samples: receives the samples of each call, in its thread. `JkvGRPOLearner` sets it, and with `loss="replay"` both.
      last: the `jkv.Rollouts` of the last call, with statistics, finish reasons and versions of the weights. The version is 0
        for the first weights and increases with each change.

    Any number of threads may call `generate`, as tunix's agents do; their samples run in one batch. `last` is then of the call
    that ended last.

    Weights are used in place; only a mesh that splits them differently makes a copy. Rollouts run in the dtype of the weights,
    or, if they are synchronised, in the `data_type` of the configuration.

    Raises:
      ValueError: jkv cannot run the model or split it over the mesh, or live weights are on other devices.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        policy: Policy | None = None,
        live: bool | None = None,
        lora_alpha: float | None = None,
        sleeps: bool = True,
        failed: str = "raise",
        **engine: Any,
    ) -> None:
        check_known(ON_FAILED, failed=failed)
        self._tokenizer, self._policy, self._sleeps, self._engine = tokenizer, policy, sleeps, engine
        self._returns_failed = failed == "return"
        self._config = rollout_config or base_rollout.RolloutConfig()  # that of the last call
        self._limits: tuple[int, ...] = (1, 1, engine.pop("max_stop_ids", 8))
        self.shape = config_of(rollout_actor)
        leaves = leaves_of(rollout_actor)
        self.scales = scales_of(rollout_actor, leaves, lora_alpha)
        warn_of_dtype(rollout_actor)
        self._devices = devices_of(mesh, leaves)
        check_divides(self.shape, num_parts(self._devices))
        is_there = set(next(iter(leaves.values())).devices()) == set(self._devices.devices.flat)
        if live and not is_there:
            raise refused(
                "Live weights must be on the devices of the role ROLLOUT; the actor's are on others. Use one mesh for both "
                "roles, or pass live=False.",
                live="conflict",
            )
        self._actor = rollout_actor if (is_there if live is None else live) else None
        self._leaves = leaves if self._actor is None else None  # the last synchronised weights
        self._known = references(leaves)  # the weights of the engine's version
        self._versions = [0]  # by the engine's version, which also counts weights that were forgotten and came back
        self._dtype = self._check_dtype(next(iter(leaves.values())).dtype)
        self._rollout: Rollout | None = None
        self._has_warned = False
        self.return_trace = False
        self.on_samples: Callable[[Rollouts], None] | None = None
        self._calls, self._num_calls = threading.Condition(), 0
        self.last: Rollouts | None = None
        rollout = self._ready(self._config, self._stop_ids(self._config))
        self._rest(rollout)

    # The interface of tunix.

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """A completion of each prompt. Adjacent equal prompts are samples of one group.

        Raises:
          ValueError: a prompt is longer than `max_prompt_length`, or a setting is out of range. Raised before compilation.
          RuntimeError: a sample ended by a failure, unless the engine was built with `failed="return"`.
          KeyboardInterrupt: Ctrl-C was pressed; the samples are discarded.
        """
        groups = [(self._encode(text), len(list(same))) for text, same in itertools.groupby(prompts)]
        check_widths(groups, rollout_config.max_prompt_length)
        stop_ids = self._stop_ids(rollout_config)
        with self._in_use(rollout_config, stop_ids) as rollout:
            out = self._sample(rollout, groups, rollout_config, stop_ids)
        if not self._returns_failed:
            check_none_failed(out)
        self.last, self._config = out, rollout_config
        if self.on_samples is not None:
            self.on_samples(out)
        tokens, log_probs = out.ragged()
        return base_rollout.RolloutOutput(
            text=[self._decode(row, stop_ids) for row in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=self._pad_left(out.prompts, rollout_config.max_prompt_length),
            logprobs=log_probs,
        )

    def _sample(
        self,
        rollout: Rollout,
        groups: Sequence[tuple[np.ndarray, int]],
        config: base_rollout.RolloutConfig,
        stop_ids: Sequence[int],
    ) -> Rollouts:
        """The samples of groups of equal prompts; samples of other threads run in the same batch."""
        sampling, session = sampling_of(config), rollout.session()
        seen: collections.Counter[bytes] = collections.Counter()
        try:
            for ids, count in groups:
                session.submit(
                    ids,
                    n=count,
                    sampling=sampling,
                    max_new_tokens=config.max_tokens_to_generate,
                    stop_ids=stop_ids,
                    return_trace=self.return_trace,
                    first_sample=seen[ids.tobytes()],
                )
                seen[ids.tobytes()] += count
            out = session.run(progress=False)
            if session.pending:
                raise KeyboardInterrupt
            own = np.asarray(self._versions, np.int32)[np.maximum(out.policy_version, 0)]
            return dataclasses.replace(out, policy_version=np.where(out.policy_version < 0, out.policy_version, own))
        finally:
            if session.pending:
                session.cancel()

    @contextlib.contextmanager
    def _in_use(self, config: base_rollout.RolloutConfig, stop_ids: Sequence[int]) -> Iterator[Rollout]:
        """The rollout with the current weights, for a call. The last of the calls at one time makes room for the trainer.

        A call that needs higher limits than the engine has waits for the end of the others.
        """
        with self._calls:
            self._calls.wait_for(lambda: not self._num_calls or self._sizes(config, stop_ids) == self._limits)
            rollout = self._ready(config, stop_ids)
            self._num_calls += 1
        try:
            yield rollout
        finally:
            with self._calls:
                self._num_calls -= 1
                if not self._num_calls:
                    self._rest(rollout)
                self._calls.notify_all()

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Log-probabilities [B, T] of completions with the full cache, at the temperature of the last call; 0 in padding.

        Before the first call, the temperature is that of the constructor's configuration. (tunix's own sampler ignores the
        temperature here, but its loss does not.)
        """
        pad = self.pad_id()
        prompts, tokens = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        lengths = (tokens != pad).sum(axis=1).tolist()
        sampling = Sampling(temperature=self._config.temperature)
        whole = [row[row != pad] for row in prompts]
        return score(self._params(), tokens, prompts=whole, lengths=lengths, sampling=sampling).logprobs

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the weights, or the adapters of a LoRA model. Nothing is copied on the same devices.

        Raises:
          ValueError: the weights have another structure, shape or dtype, or are not finite. The old weights stay in use.
        """
        leaves = merged(self._current(), leaves_of(params))
        assert self._rollout is not None
        self._use(self._rollout, leaves)
        if self._actor is None:
            self._leaves = leaves
        else:
            with deferred_interrupts():  # an actor has all of the new weights, or none
                nnx.update(self._actor, params)
            self._rest(self._rollout)

    def pad_id(self) -> int:
        """The padding token of tunix."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The end token."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module | None:
        """The actor with the live weights; None if weights are synchronised."""
        return self._actor

    # Weights.

    def _current(self) -> Leaves:
        """The current weights: the actor's, or the last synchronised ones."""
        return leaves_of(self._actor) if self._leaves is None else self._leaves

    def _params(self) -> Params:
        """The current weights on the devices of the rollouts: the engine's, if it holds them."""
        leaves, rollout = self._current(), self._rollout
        return rollout.model.params if rollout is not None and self._holds(rollout, leaves) else self._place(leaves)

    def _place(self, leaves: Leaves) -> Params:
        """Weights on the devices of the rollouts; copied only for another dtype or sharding."""
        params = make_params(self.shape, leaves, self.scales)
        if self._dtype is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)
        if self._devices.size > 1:
            return shard(params, self._devices)
        return jax.device_put(params, jax.sharding.SingleDeviceSharding(self._devices.devices.item()))

    def _is_known(self, leaves: Leaves) -> bool:
        """Whether these are the same array objects as in the engine's version."""
        return bool(self._known) and all(leaf is self._known[path]() for path, leaf in leaves.items())

    def _holds(self, rollout: Rollout, leaves: Leaves) -> bool:
        return isinstance(rollout.model.params.embedding, jax.Array) and self._is_known(leaves)

    def _use(self, rollout: Rollout, leaves: Leaves) -> None:
        """Updates the engine to these weights. Weights that it had before keep their version.

        If that is interrupted after the engine has taken them, no weights are known to be the engine's, and the next call
        updates it again.
        """
        self._note_versions(rollout, self._versions[-1] + 1)  # of an update that was interrupted before its end
        if self._holds(rollout, leaves):
            return
        before, own = rollout.version, self._versions[-1] + (not self._is_known(leaves))
        known, self._known = self._known, {}
        try:
            rollout.update(self._place(leaves))
        finally:
            if rollout.version == before:
                self._known = known
            self._note_versions(rollout, own)
        self._known = references(leaves)

    def _note_versions(self, rollout: Rollout, own: int) -> None:
        """Gives all versions of the engine that have no own one yet this number."""
        self._versions += [own] * (rollout.version + 1 - len(self._versions))

    def _rest(self, rollout: Rollout) -> None:
        """Makes room for the trainer: frees the pool and drops references to live weights."""
        if self._sleeps:
            rollout.sleep(forget_weights=self._actor is not None)

    def _check_dtype(self, own: Any) -> Any:
        """The dtype to which synchronised weights are cast; None if they are not cast."""
        wanted = self._config.data_type
        if wanted is None or jnp.dtype(wanted) == own:
            return None
        if self._actor is not None:
            raise refused(
                f"Live weights must be used in their dtype, {own}; got data_type {jnp.dtype(wanted)}. Leave it out, or pass "
                "live=False for a copy of that dtype.",
                data_type="conflict",
            )
        return jnp.dtype(wanted)

    # Requests.

    def _ready(self, config: base_rollout.RolloutConfig, stop_ids: Sequence[int]) -> Rollout:
        """The rollout with the current weights. It is rebuilt if the configuration needs higher limits."""
        sizes = self._sizes(config, stop_ids)
        if self._rollout is not None:
            self._use(self._rollout, self._current())
        if self._rollout is None or sizes != self._limits:
            self._rollout, self._limits = self._build(sizes), sizes
        return self._rollout

    def _sizes(self, config: base_rollout.RolloutConfig, stop_ids: Sequence[int]) -> tuple[int, ...]:
        """The limits that the engine must have for a call: at least those it has."""
        asked = (config.max_prompt_length, config.max_tokens_to_generate, len(stop_ids))
        return tuple(max(pair) for pair in zip(self._limits, asked, strict=True))

    def _build(self, sizes: tuple[int, ...]) -> Rollout:
        """A new rollout with these limits; the pool of the old one is freed first."""
        params, old = self._params(), self._rollout
        if old is not None:
            old.sleep(forget_weights=True)
            old.engine.close()
        on = self._devices if self._devices.size > 1 else None
        limits: dict[str, Any] = dict(zip(LIMITS, sizes, strict=True))
        stops = self._stop_ids(self._config)
        unused = next(token for token in range(self.shape.vocab_size) if token not in stops)  # tunix does the padding
        self._versions = self._versions[-1:]
        return Rollout(params, self._policy, mesh=on, pad_id=unused, **limits, **self._engine)

    def _encode(self, text: str) -> np.ndarray:
        """Token ids as in tunix's own sampler: a text begins with exactly one BOS token."""
        begin = self._tokenizer.bos_id()
        ids = ([begin] if begin else []) + list(self._tokenizer.encode(text))
        return np.asarray(self._tokenizer.dedup_bos_ids(ids), np.int32)

    def _decode(self, tokens: np.ndarray, stop_ids: Sequence[int]) -> str:
        """The text of a completion, without its end token."""
        ids = tokens.tolist()
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in stop_ids else ids)

    def _stop_ids(self, config: base_rollout.RolloutConfig) -> tuple[int, ...]:
        """The stop tokens. They include the padding token, which tunix masks; warns once if it is also an end token."""
        ends = tuple(config.eos_tokens or [self.eos_id()])
        if self.pad_id() in ends and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the padding token {self.pad_id()} is also an end token. tunix masks with `tokens != pad_id`, so its loss "
                "leaves out every end token, the policy never learns to stop, and inside prompts the token is not attended to. "
                "Give the tokenizer another pad token. The loss of JkvGRPOLearner includes end tokens.",
                stacklevel=3,
            )
        return tuple(dict.fromkeys([*ends, self.pad_id()]))

    def _pad_left(self, prompts: Sequence[np.ndarray], width: int) -> np.ndarray:
        """Prompts padded on the left: [B, width]. The width is the same in every call, because tunix joins the results."""
        padded = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[width - len(prompt) :] = prompt
        return padded


def check_none_failed(out: Rollouts) -> None:
    """Refuses samples that ended by a failure.

    Raises:
      RuntimeError: it names the first of them; its cause is the sample's own error, if there is one.
    """
    failed = [i for i, reason in enumerate(out.finish_reason) if reason in FAILED]
    if failed:
        raise RuntimeError(
            f"{counted(len(failed), 'sample')} of {len(out.finish_reason)} failed, and tunix would train on them; the first "
            f"of them, {failed[0]}, {reason_of(out, failed[0])}. Pass failed='return' to JkvRollout, where the learner leaves "
            "them out of its mask."
        ) from out.samples[failed[0]].error


def references(leaves: Leaves) -> dict[str, weakref.ref[jax.Array]]:
    """Weak references to the arrays, to recognise them later without keeping them alive."""
    return {path: weakref.ref(leaf) for path, leaf in leaves.items()}


def devices_of(mesh: jax.sharding.Mesh | None, leaves: Leaves) -> jax.sharding.Mesh:
    """The mesh of an engine, or of replicas: tunix's axis "tp" splits heads, and all its others are "data".

    Without a mesh, all devices of the weights split heads.
    """
    if mesh is None or mesh.empty:
        devices = np.array(sorted(next(iter(leaves.values())).devices(), key=lambda device: device.id))[None]
    elif TENSOR in mesh.axis_names:
        devices = np.moveaxis(mesh.devices, mesh.axis_names.index(TENSOR), -1).reshape(-1, mesh.shape[TENSOR])
    else:
        devices = mesh.devices.reshape(-1, 1)
    return jax.sharding.Mesh(devices, (DATA, HEADS)) if len(devices) > 1 else jax.sharding.Mesh(devices[0], (HEADS,))


def check_widths(groups: Sequence[tuple[np.ndarray, int]], limit: int) -> None:
    """Refuses prompts that are empty or longer than the arrays of tunix."""
    for ids, _ in groups:
        if not 0 < len(ids) <= limit:
            raise refused(
                f"A prompt must have 1 to {limit} tokens, RolloutConfig.max_prompt_length; got {len(ids)} tokens, beginning "
                f"with {ids[:8].tolist()}. Raise max_prompt_length, or drop such prompts; a cut prompt is another problem.",
                prompts="does_not_fit",
            )


def sampling_of(config: base_rollout.RolloutConfig) -> Sampling:
    """The sampling of a tunix configuration: greedy without top_p or at temperature 0; top_k below 1 keeps all."""
    seed = secrets.randbits(32) if config.seed is None else seed_of(config.seed)
    if config.top_p is None or config.temperature == 0:
        return Sampling(temperature=0.0, seed=seed)
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=max(config.top_k or 0, 0), seed=seed)


def seed_of(seed: Any) -> int:
    """A seed below 2**32 from an int or a JAX key; `PRNGKey(5)` becomes 5."""
    if isinstance(seed, int):
        return seed % 2**32
    words = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    number = 0
    for word in np.asarray(words).ravel().tolist():
        number = (number * 0x9E3779B1 + word) % 2**32
    return number
