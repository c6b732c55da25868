"""What a part of a decode step is: some inputs by row, and what it does at each moment of a step.

The fields of a part are its inputs, arrays: other values compile nothing. (Their axes are not checked as types, because JAX
also builds pytrees whose leaves are not arrays.) What a part carries from one step to the next is a pytree of its own.
`jkv.engine.programs.decode_chunk` calls the parts that an engine has in the order of the table, and a plain step has none.

To add a part, write a `StepPart` in a file of its own, and add its field to `jkv.engine.parts.table.Parts`. A part that keeps
arrays on the device from chunk to chunk also needs a field of `Carried`, and one that reports to the host a field of
`ChunkOutputs`. A part whose inputs follow from the tokens drawn so far
must be known to `Sample.can_plan`, because chunks may be dispatched before the last one is read. A part whose draws depend on
the tokens before them, such as a grammar, must keep guesses from its rows (`jkv.engine.parts.drafting`): at a guess, it has not
seen those before it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jkv.cache.attention import Cache
from jkv.engine.adapter_store import AdapterStore
from jkv.engine.drafters import Drafter
from jkv.engine.form_store import FormStore
from jkv.engine.requests import Request
from jkv.engine.samples import Sample
from jkv.eviction import Needs
from jkv.model.experts import Choose
from jkv.model.params import Model, Params
from jkv.model.sampling import TokenCounts
from jkv.pytrees import PyTree

Observe = Callable[[int, Array, Any], Any]  # see `jkv.model.decoder.forward`
Enter = Callable[[int, Array], Array]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of the batch, from which a part makes its inputs on the host.

    Attributes:
      running: the samples that decode, by row.
      num_rows: rows of the batch, B.
      model: the model.
      needs: what the device keeps for the engine's policies.
      gate: the arrays of the gate that all steps compute, on the device; None without one.
      routed_experts: whether programs return the experts that tokens go through.
      drafter: proposes tokens to steps that append several; None without such steps.
      forms: the tables of forms on the device.
      adapters: the adapters on the device; None for an engine without places for any.
    """

    running: Mapping[int, Sample]
    num_rows: int
    model: Model
    needs: Needs
    gate: Any = None
    routed_experts: bool = False
    drafter: Drafter | None = None
    forms: FormStore | None = None
    adapters: AdapterStore | None = None

    @property
    def requests(self) -> Sequence[Request]:
        """The requests of the samples."""
        return [sample.request for sample in self.running.values()]


class Carried(NamedTuple):
    """What parts keep on the device from chunk to chunk, each in the memory of the last one; None for parts that are not on."""

    generated: Int[Array, "B V"] | None = None  # how often each row's completion holds each token: see `penalties`
    latest: Int[Array, "B W"] | None = None  # the last tokens of each completion: see `bad_words`
    form_state: Int[Array, " B"] | None = None  # of each row's form: see `forms`
    history: Int[Array, "B S"] | None = None  # the last tokens of each row: see `drafting`
    credit: Float[Array, " B"] | None = None  # of each row's guesses: see `drafting`


class Draw(NamedTuple):
    """What the next tokens of each row are drawn from, at one place or at several."""

    logits: Float[Array, "B T V"]  # a part may mask or change them
    own: Float[Array, "B T V"]  # the model's, which no part changes
    number: Int[Array, "B T"]  # of each token, among those that its row draws in the chunk
    counts: TokenCounts | None = None  # [B, 1, V]
    forced: Int[Array, "B T"] | None = None  # tokens in place of draws, -1 for none
    is_own: bool = False  # whether the log-probability of the draw is already the one of the model's own distribution


class Step(NamedTuple):
    """New tokens, of a decode step or of a prompt, before they go through the model.

    A decode step has one token of each row, or one at each of T places, of which guesses may be rejected afterwards.
    """

    params: Params
    cache: Cache
    row: Int[Array, " B"]
    token: Int[Array, "B T"]
    num_new: Int[Array, " B"]
    is_active: Bool[Array, " B"]
    enter: Enter | None = None  # the functions that the decoder calls in each layer
    observe: Observe | None = None
    choose: Choose | None = None


class StepPart(PyTree):
    """A part of a decode step; a moment that a part leaves out does nothing, but `is_on` and `of` must be written.

    Attributes:
      sees_prompts: whether `take` is called for the tokens of prompts too.
    """

    sees_prompts: ClassVar[bool] = False

    # On the host.

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        """Whether these rows need it. Once on, it stays on (until `Runner.lower`), because programs would compile again."""
        raise NotImplementedError

    @classmethod
    def of(cls, rows: Rows) -> "StepPart":
        """The inputs that stay the same while the rows do; they stay on the device."""
        raise NotImplementedError

    def at(self, rows: Rows) -> "StepPart":
        """The inputs of the next chunk: with what changes from chunk to chunk."""
        return self

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
        """Its fields of `Carried` where the rows have changed, NumPy arrays."""
        return {}

    # On the device.

    def begin(self, carried: Carried) -> Any:
        """What it carries into the first step of a chunk."""
        return ()

    def draw(self, draw: Draw, carry: Any) -> Draw:
        """Before tokens are drawn: change the logits here, such as by the mask of a grammar."""
        return draw

    def drawn(self, draw: Draw, token: Int[Array, "B T"]) -> dict[str, Array]:
        """After they are drawn: its fields of `ChunkOutputs` that follow from what tokens were drawn from, each [B, T, ...]."""
        return {}

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        """Once the tokens are known; also returns what it carries on."""
        return step, carry

    def report(self, step: Step, hidden: Float[Array, "B T D"], cache: Cache, carry: Any) -> dict[str, Array]:
        """After the tokens went through the model: its fields of `ChunkOutputs`, each [B, T, ...]."""
        return {}

    def end(self, carry: Any) -> dict[str, Array]:
        """Its fields of `Carried` after the last step."""
        return {}
