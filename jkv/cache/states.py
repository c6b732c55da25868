"""The recurrent states of each row in the layers that have one (`jkv.model.delta_net`): arrays of a fixed shape.

A token changes the whole state of its row, so nothing is ever evicted, compacted or shared; policies do not see these layers.
Each layer has an array of its own, which a step overwrites as a whole: XLA copies arrays of all layers to write into one.
A step that appends several tokens keeps the states after each, until it is known how many are accepted.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jkv.model import delta_net
from jkv.model.delta_net import DeltaInputs, DeltaState
from jkv.model.delta_weights import DeltaNet
from jkv.pytrees import PyTree


class LayerStates(PyTree):
    """The states of all rows in a layer. The channels of the convolution lie shard by shard."""

    memory: Annotated[Any, "B N I H"]  # float32; I channels of a key, H of a value
    recent: Annotated[Any, "B R K*I"]  # the last inputs of the convolution


class RowStates(NamedTuple):
    """The states of one row in all layers."""

    memory: Annotated[Any, "L N I H"]
    recent: Annotated[Any, "L R K*I"]


States = tuple[LayerStates, ...]


def create(sizes: DeltaNet, *, num_layers: int, num_rows: int, dtype: Any, poison: bool) -> States:
    """States that no row has used, of each layer; NaN with `poison`, for tests."""

    def of_layer() -> LayerStates:
        empty = delta_net.zero_state(sizes, num_rows, dtype)
        return LayerStates(*(jnp.full_like(x, jnp.nan if poison else 0) for x in empty))

    return tuple(of_layer() for _ in range(num_layers))


def read_row(states: States, row: Int[Array, ""]) -> RowStates:
    """A copy of one row's states."""
    return RowStates(jnp.stack([layer.memory[row] for layer in states]), jnp.stack([layer.recent[row] for layer in states]))


def write_rows(states: States, target: Int[Array, " B"], content: RowStates) -> States:
    """The states with one row copied to rows `target`; targets equal to the number of rows, at the end, are ignored."""

    def write(i: Int[Array, ""], states: States) -> States:
        return tuple(
            LayerStates(layer.memory.at[target[i]].set(memory), layer.recent.at[target[i]].set(recent))
            for layer, memory, recent in zip(states, content.memory, content.recent, strict=True)
        )

    num_rows = states[0].memory.shape[0]
    return jax.lax.fori_loop(0, (target < num_rows).sum(dtype=jnp.int32), write, states)


def replaced(cache: Any, layer: int, memory: Float[Array, "B N I H"], recent: Float[Array, "B R C"]) -> Any:
    """The cache with other states in a layer."""
    return cache._replace(states=(*cache.states[:layer], LayerStates(memory, recent), *cache.states[layer + 1 :]))


class StateDecode(NamedTuple):
    """The recurrence of each row's next tokens: one, or one at each of T places, of which some may be rejected afterwards."""

    sizes: DeltaNet
    is_new: Bool[Array, "B T"]

    def __call__(self, layer: int, inputs: DeltaInputs, cache: Any) -> tuple[Float[Array, "B T N H"], Any]:
        """`jkv.model.layer_groups.LayerGroups.recur`.

        Of several places, it leaves the states as they are, and keeps those after each place for `accept`. The places go
        through one loop, so that a token's bits do not depend on its place.
        """
        old = DeltaState(cache.states[layer].memory, cache.states[layer].recent)
        if self.is_new.shape[1] == 1:
            out, new = delta_net.step(self.sizes, inputs, old, self.is_new[:, 0])
            return out, replaced(cache, layer, *new)

        def step(state: DeltaState, place: tuple[Array, ...]) -> tuple[DeltaState, tuple[Array, DeltaState]]:
            mixed, rate, log_decay, is_new = place
            given = DeltaInputs(mixed[:, None], rate[:, None], log_decay[:, None], inputs.taps)
            out, state = delta_net.step(self.sizes, given, state, is_new)
            return state, (out[:, 0], state)

        of_tokens = inputs.mixed, inputs.rate, inputs.log_decay, self.is_new
        _, (out, after) = jax.lax.scan(step, old, tuple(jnp.moveaxis(x, 1, 0) for x in of_tokens))
        return jnp.moveaxis(out, 0, 1), cache._replace(states_after=(*cache.states_after, LayerStates(*after)))


def accept(cache: Any, num_accepted: Int[Array, " B"]) -> Any:
    """The cache with each row's states after the places that were accepted; of a row without any, they are what they were."""
    row, last = jnp.arange(len(num_accepted), dtype=jnp.int32), jnp.maximum(num_accepted - 1, 0)
    return cache._replace(states=tuple(jax.tree.map(lambda x: x[last, row], of_layer) for of_layer in cache.states_after))


class StatePrefill(NamedTuple):
    """The recurrence over a chunk of one row's prompt, from the row's state or from the first token."""

    sizes: DeltaNet
    row: Int[Array, " 1"]
    position: Int[Array, "1 T"]
    num_new: Int[Array, " 1"]

    def __call__(self, layer: int, inputs: DeltaInputs, cache: Any) -> tuple[Float[Array, "1 T N H"], Any]:
        """`jkv.model.layer_groups.LayerGroups.recur`."""
        states = cache.states[layer]
        old = (jnp.where(self.position[0, 0] == 0, 0, x[self.row]) for x in (states.memory, states.recent))  # an earlier row's
        out, new = delta_net.chunks(self.sizes, inputs, DeltaState(*old), self.num_new)
        memory, recent = states.memory.at[self.row].set(new.memory), states.recent.at[self.row].set(new.recent)
        return out, replaced(cache, layer, memory, recent)
