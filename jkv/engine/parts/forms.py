"""Forms that answers must have: only tokens that can still lead to the form are drawn (`jkv.forms`).

A row's state stays on the device, so chunks are dispatched before the last one is read. The table by which it moves is in the
engine's `FormStore`; the next step's mask is one gather of it, by the class of each token.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jkv.engine.parts.base import Carried, Draw, Rows, Step, StepPart
from jkv.engine.requests import MOST_ENDS
from jkv.engine.samples import Sample
from jkv.forms import host_walks
from jkv.forms.automaton import DEAD
from jkv.forms.host_walks import HostWalk
from jkv.forms.tables import END, Walk
from jkv.pytrees import static

NONE = -1  # in place of where a table begins


class Forms(StepPart):
    """The tables, where each row's begins, and the tokens that end it, which may come where the form is complete."""

    tables: Annotated[Any, "entries"]
    start: Annotated[Any, "B"]  # NONE for a row without a form
    num_classes: Annotated[Any, "B"]
    ends: Annotated[Any, "B E"]  # padded with V
    num_tokens: int = static()  # V

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.form is not None and not request.form_on_host for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "Forms":
        size, count = rows.model.config.vocab_size, rows.num_rows
        start, num_classes = np.full(count, NONE, np.int32), np.zeros(count, np.int32)
        ends = np.full((count, MOST_ENDS), size, np.int32)
        tables = {i: walk.table for i, walk in walks_of(rows).items()}
        assert rows.forms is not None
        array, places = rows.forms.place(list(tables.values()))
        for i, table in tables.items():
            start[i], num_classes[i] = places[table], table.next.shape[1]
            stop_ids = rows.running[i].request.stop_ids
            ends[i, : len(stop_ids)] = stop_ids
        return cls(array, start, num_classes, ends, size)

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
        state = np.zeros(rows.num_rows, np.int32)
        for i, walk in walks_of(rows).items():
            state[i] = walk.after(rows.running[i].completion.tokens)
        return {"form_state": state}

    def begin(self, carried: Carried) -> Any:
        assert carried.form_state is not None
        row = jnp.arange(len(self.start), dtype=jnp.int32)[:, None]
        at = jnp.maximum(self.start, 0)[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)
        class_of = self.tables[at].astype(jnp.int32).at[row, self.ends].set(END, mode="drop")
        return FormRows(carried.form_state, class_of)

    def draw(self, draw: Draw, carry: Any) -> Draw:
        can_come = (self.after(carry.state, carry.class_of) != DEAD) | (self.start == NONE)[:, None]
        can_come = jax.lax.optimization_barrier(can_come)  # else XLA gathers again for each use of the logits
        return draw._replace(logits=jnp.where(can_come[:, None], draw.logits, -jnp.inf))

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        following = self.after(carry.state, jnp.take_along_axis(carry.class_of, step.token[:, :1], axis=1))[:, 0]
        goes_on = step.is_active & (self.start != NONE) & (following != DEAD)
        return step, carry._replace(state=jnp.where(goes_on, following, carry.state))

    def end(self, carry: Any) -> dict[str, Array]:
        return {"form_state": carry.state}

    def after(self, state: Int[Array, " B"], class_of: Int[Array, "B I"]) -> Int[Array, "B I"]:
        """The states after tokens of some classes."""
        first = self.start + self.num_tokens + state * self.num_classes
        return self.tables.at[first[:, None] + class_of].get(mode="clip").astype(jnp.int32)


class FormRows(NamedTuple):
    """What rows carry from step to step: their state, and the class of each token, which stays as it is."""

    state: Int[Array, " B"]
    class_of: Int[Array, "B V"]


def walks_of(rows: Rows) -> dict[int, Walk]:
    """The walks of the samples whose form has a table, by row."""
    found = {i: walk_of(rows, sample) for i, sample in rows.running.items() if sample.request.form is not None}
    return {i: walk for i, walk in found.items() if isinstance(walk, Walk)}


def walk_of(rows: Rows, sample: Sample) -> Walk | HostWalk:
    """A sample's walk through its form, whose table or rules were made when the request was checked."""
    if sample.walk is None:
        request, model = sample.request, rows.model
        assert request.form is not None
        sample.walk = host_walks.walk_of(request.form, model.tokenizer, model.config.vocab_size, request.form_start)
    return sample.walk
