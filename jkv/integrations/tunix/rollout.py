"""`JkvRollout`: `jkv.Rollout` as a rollout engine of tunix, over live weights of the actor or over synchronised ones.

tunix repeats each prompt for its group; equal neighbours are one group here, prefilled once. Differences to tunix's own
sampler, on purpose: end tokens stay in the completion, so that stopping is trained; log-probabilities are those of the exact
distribution that was drawn from; a call without a seed draws fresh entropy.
"""

import collections
import itertools
import secrets
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from jkv.engine import mesh as meshes
from jkv.integrations.tunix.weights import Leaves, config_of, leaves_of, make_params, merged, scales_of, warn_of_dtype
from jkv.model.params import Params
from jkv.model.sampling import Sampling
from jkv.policies import Policy
from jkv.replay.score import score
from jkv.rollout import Rollout, Rollouts

ROOM = ("max_prompt_tokens", "max_new_tokens", "max_stop_ids")  # what a configuration asks of the engine


class JkvRollout(base_rollout.BaseRollout):
    """A rollout engine for `ClusterConfig(rollout_engine=functools.partial(JkvRollout, policy=...))`.

    Args:
      rollout_actor: tunix's actor; it, the tokenizer, the mesh and the configuration are given by tunix.
      tokenizer: what `tunix.generate.tokenizer_adapter` makes.
      mesh: devices of the role ROLLOUT. On several, KV heads are split over all of them, so their number must divide.
      rollout_config: of training; a call may bring another, and a larger one builds the engine anew.
      policy: how caches stay small; None keeps them whole.
      live: whether to read the actor's own weights at each call, which then are never synchronised; False keeps those that
        `update_params` brings. None takes live ones where the actor is on the mesh's devices.
      lora_alpha: of the actor's adapters; None asks the rules that qwix gave it.
      sleeps: whether the pool is freed between calls, for the trainer; references to live weights are dropped then too, so that
        arrays which training replaces are freed.
      engine: further arguments of `jkv.Rollout` (`max_running`, `page_size`, `kv_memory`, ...).

    Attributes:
      last: the `jkv.Rollouts` of the last call, with statistics, finish reasons and versions of the weights (0 for those that
        it was built with, one more each time they are others).

    Weights are used in place; only a mesh whose split differs from the actor's makes a copy. Rollouts run in the dtype of
    the weights, or, synchronised, in the configuration's `data_type`.

    Raises:
      ValueError: a model that `jkv` cannot run, a mesh that it cannot be split over, or live weights on other devices.
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
        **engine: Any,
    ) -> None:
        self._tokenizer, self._policy, self._sleeps, self._engine = tokenizer, policy, sleeps, engine
        self._config = rollout_config or base_rollout.RolloutConfig()  # of the last call
        self._room: tuple[int, ...] = (1, 1, engine.pop("max_stop_ids", 8))
        self._shape = config_of(rollout_actor)
        leaves = leaves_of(rollout_actor)
        self._scales = scales_of(rollout_actor, leaves, lora_alpha)
        warn_of_dtype(rollout_actor)
        self._devices = devices_of(mesh, leaves)
        if self._devices.size > 1:
            meshes.check_mesh(self._devices, self._shape)
        is_there = set(next(iter(leaves.values())).devices()) == set(self._devices.devices.flat)
        if live and not is_there:
            raise ValueError(
                "Live weights must be on the devices that roll out; the actor's are on others than the mesh of the role "
                "ROLLOUT. Give both roles one mesh, or pass live=False."
            )
        self._actor = rollout_actor if (is_there if live is None else live) else None
        self._leaves = leaves if self._actor is None else None  # the last ones synchronised
        self._known = references(leaves)  # those of the engine's version
        self._dtype = self._check_dtype(next(iter(leaves.values())).dtype)
        self._rollout: Rollout | None = None
        self._has_warned = False
        self.last: Rollouts | None = None
        rollout = self._ready(self._config, self._stop_ids(self._config))
        self._rest(rollout)

    # What tunix calls.

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """A completion of each prompt; equal neighbours are samples of one group.

        Raises:
          ValueError: a prompt wider than `max_prompt_length`, or settings out of their range; before anything compiles.
          KeyboardInterrupt: Ctrl-C was pressed; nothing is kept.
        """
        groups = [(self._encode(text), len(list(same))) for text, same in itertools.groupby(prompts)]
        check_widths(groups, rollout_config.max_prompt_length)
        sampling, stop_ids = sampling_of(rollout_config), self._stop_ids(rollout_config)
        rollout = self._ready(rollout_config, stop_ids)
        seen: collections.Counter[bytes] = collections.Counter()
        try:
            for ids, count in groups:
                rollout.submit(
                    ids,
                    n=count,
                    sampling=sampling,
                    max_new_tokens=rollout_config.max_tokens_to_generate,
                    stop_ids=stop_ids,
                    first_sample=seen[ids.tobytes()],
                )
                seen[ids.tobytes()] += count
            out = rollout.run(progress=False)
            if rollout.pending:
                raise KeyboardInterrupt
        finally:
            if rollout.pending:
                rollout.cancel()
            self._rest(rollout)
        self.last, self._config = out, rollout_config
        tokens, log_probs = out.ragged()
        return base_rollout.RolloutOutput(
            text=[self._decode(row, stop_ids) for row in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=self._pad_left(out.prompts, rollout_config.max_prompt_length),
            logprobs=log_probs,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Log-probabilities [B, T] of completions with the full cache, at the last call's temperature; 0 in padding.

        Before any call, at that of the configuration it was built with. (tunix's own sampler leaves the temperature out here,
        and its loss does not.)
        """
        pad = self.pad_id()
        prompts, tokens = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        lengths = (tokens != pad).sum(axis=1).tolist()
        sampling = Sampling(temperature=self._config.temperature)
        whole = [row[row != pad] for row in prompts]
        return score(self._params(), tokens, prompts=whole, lengths=lengths, sampling=sampling).logprobs

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes new weights, or of a LoRA model its adapters alone; on the same devices nothing is copied.

        Raises:
          ValueError: weights of another model, shape or dtype, or not finite; the old ones stay, a live actor's too.
        """
        leaves = merged(self._current(), leaves_of(params))
        assert self._rollout is not None
        self._use(self._rollout, leaves)
        if self._actor is None:
            self._leaves = leaves
        else:
            nnx.update(self._actor, params)
            self._rest(self._rollout)

    def pad_id(self) -> int:
        """The token that tunix pads with."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module | None:
        """The actor, whose weights are read at each call; None where they are synchronised."""
        return self._actor

    # Weights.

    def _current(self) -> Leaves:
        """The weights of this moment: the actor's, or the last ones synchronised."""
        return leaves_of(self._actor) if self._leaves is None else self._leaves

    def _params(self) -> Params:
        """The weights of this moment where rollouts run: the engine's, if it holds them."""
        leaves, rollout = self._current(), self._rollout
        return rollout.model.params if rollout is not None and self._holds(rollout, leaves) else self._place(leaves)

    def _place(self, leaves: Leaves) -> Params:
        """Weights as rollouts read them; copied only to another dtype or place."""
        params = make_params(self._shape, leaves, self._scales)
        if self._dtype is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)
        if self._devices.size > 1:
            return meshes.shard(params, self._devices)
        return jax.device_put(params, jax.sharding.SingleDeviceSharding(self._devices.devices.item()))

    def _is_known(self, leaves: Leaves) -> bool:
        """Whether these very arrays are those of the engine's version."""
        return all(leaf is self._known[path]() for path, leaf in leaves.items())

    def _holds(self, rollout: Rollout, leaves: Leaves) -> bool:
        return isinstance(rollout.model.params.embedding, jax.Array) and self._is_known(leaves)

    def _use(self, rollout: Rollout, leaves: Leaves) -> None:
        """Gives the engine weights that it does not hold; ones that it had before keep their version."""
        if self._holds(rollout, leaves):
            return
        version = rollout.version
        rollout.update(self._place(leaves))
        if self._is_known(leaves):
            rollout.engine.version = version
        self._known = references(leaves)

    def _rest(self, rollout: Rollout) -> None:
        """Makes room for the trainer: frees the pool, and drops references to live weights, which training replaces."""
        if self._sleeps:
            rollout.sleep(forget_weights=self._actor is not None)

    def _check_dtype(self, own: Any) -> Any:
        """What synchronised weights are cast to; None leaves them."""
        wanted = self._config.data_type
        if wanted is None or jnp.dtype(wanted) == own:
            return None
        if self._actor is not None:
            raise ValueError(
                f"Live weights are used as they are, {own}; data_type is {jnp.dtype(wanted)}. Leave it out, or pass live=False "
                "for a copy of that dtype."
            )
        return jnp.dtype(wanted)

    # Requests.

    def _ready(self, config: base_rollout.RolloutConfig, stop_ids: Sequence[int]) -> Rollout:
        """The engine with the weights of this moment, built anew for a configuration that asks for more room."""
        asked = (config.max_prompt_length, config.max_tokens_to_generate, len(stop_ids))
        room = tuple(max(pair) for pair in zip(self._room, asked, strict=True))
        if self._rollout is not None:
            self._use(self._rollout, self._current())
        if self._rollout is None or room != self._room:
            self._rollout, self._room = self._build(room), room
        return self._rollout

    def _build(self, room: tuple[int, ...]) -> Rollout:
        """An engine with this room, which continues the old one's version; there are never two pools."""
        params, old = self._params(), self._rollout
        if old is not None:
            old.sleep(forget_weights=True)
        on = self._devices if self._devices.size > 1 else None
        limits: dict[str, Any] = dict(zip(ROOM, room, strict=True))
        stops = self._stop_ids(self._config)
        unused = next(token for token in range(self._shape.vocab_size) if token not in stops)  # tunix pads for itself
        new = Rollout(params, self._policy, mesh=on, pad_id=unused, **limits, **self._engine)
        if old is not None:
            new.engine.version = old.version
        return new

    def _encode(self, text: str) -> np.ndarray:
        """Token ids as tunix's own sampler makes them: a text begins with the beginning token, once."""
        begin = self._tokenizer.bos_id()
        ids = ([begin] if begin else []) + list(self._tokenizer.encode(text))
        return np.asarray(self._tokenizer.dedup_bos_ids(ids), np.int32)

    def _decode(self, tokens: np.ndarray, stop_ids: Sequence[int]) -> str:
        """The text of a completion, without its end token."""
        ids = tokens.tolist()
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in stop_ids else ids)

    def _stop_ids(self, config: base_rollout.RolloutConfig) -> tuple[int, ...]:
        """Tokens that end a completion: padding too, which tunix never takes for a token; warns once where it ends texts."""
        ends = tuple(config.eos_tokens or [self.eos_id()])
        if self.pad_id() in ends and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the padding token {self.pad_id()} also ends texts: tunix masks by `tokens != pad_id`, so its loss leaves out "
                "every end token, the policy never learns to stop, and inside prompts the token is not attended to. Give the "
                "tokenizer another pad token; JkvGRPOLearner at least counts end tokens in its loss.",
                stacklevel=3,
            )
        return tuple(dict.fromkeys([*ends, self.pad_id()]))

    def _pad_left(self, prompts: Sequence[np.ndarray], width: int) -> np.ndarray:
        """[B, width]: the same width in every call, for tunix joins them."""
        padded = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[width - len(prompt) :] = prompt
        return padded


def references(leaves: Leaves) -> dict[str, weakref.ref[jax.Array]]:
    """Weak references, to recognise these very arrays later without keeping them."""
    return {path: weakref.ref(leaf) for path, leaf in leaves.items()}


def devices_of(mesh: jax.sharding.Mesh | None, leaves: Leaves) -> jax.sharding.Mesh:
    """The devices to run on, as a mesh that splits heads over all of them; without one, those of the weights."""
    if mesh is None or mesh.empty:
        devices = sorted(next(iter(leaves.values())).devices(), key=lambda device: device.id)
    else:
        devices = list(mesh.devices.flat)
    return jax.sharding.Mesh(np.array(devices), (meshes.HEADS,))


def check_widths(groups: Sequence[tuple[np.ndarray, int]], limit: int) -> None:
    """Refuses prompts that do not fit tunix's arrays."""
    for ids, _ in groups:
        if not 0 < len(ids) <= limit:
            raise ValueError(
                f"A prompt must have 1 to {limit} tokens, RolloutConfig.max_prompt_length; got one of {len(ids)}, which begins "
                f"{ids[:8].tolist()}. Raise max_prompt_length, or drop such prompts: cut ones would be other problems."
            )


def sampling_of(config: base_rollout.RolloutConfig) -> Sampling:
    """The draws that tunix asks for: no top_p or no temperature is greedy, top_k below 1 keeps all, a key is a seed."""
    seed = secrets.randbits(32) if config.seed is None else seed_of(config.seed)
    if config.top_p is None or config.temperature == 0:
        return Sampling(temperature=0.0, seed=seed)
    return Sampling(temperature=config.temperature, top_p=config.top_p, top_k=max(config.top_k or 0, 0), seed=seed)


def seed_of(seed: Any) -> int:
    """A number below 2**32 from a number or a JAX key, `PRNGKey(5)` being 5."""
    if isinstance(seed, int):
        return seed % 2**32
    words = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    number = 0
    for word in np.asarray(words).ravel().tolist():
        number = (number * 0x9E3779B1 + word) % 2**32
    return number
