"""A vector that is added to the hidden state at the end of each thought (`jkv.reasoning.steering`)."""

import functools
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.cache.attention import Cache
from jkv.engine.faults import blame
from jkv.engine.parts.base import Carried, Rows, Step, StepPart
from jkv.reasoning.steering import amounts, marks_of, push


class Steering(StepPart):
    """The steering of each row; it carries which rows are thinking, and the multiple of the vector that was added last."""

    strength: Annotated[Any, "B"]  # 0 for a row that is not steered
    layer: Annotated[Any, "B"]
    vector: Annotated[Any, "B D"]
    is_thinking: Annotated[Any, "B"]  # at the start of the chunk
    is_break: Annotated[Any, "V"]  # tokens that end a thought
    think: Annotated[Any, "2"]  # the tokens <think> and </think>, -1 for none

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.needs.steering

    @classmethod
    def of(cls, rows: Rows) -> "Steering":
        marks, layer = marks_of(rows.model.tokenizer, rows.model.config.vocab_size), np.zeros(rows.num_rows, np.int32)
        vector, zeros = np.zeros((rows.num_rows, rows.model.config.width), np.float32), np.zeros(rows.num_rows, np.float32)
        for i, sample in rows.running.items():
            steer = sample.request.policy.steer
            if steer is not None:
                layer[i], vector[i] = steer.layer, steer.values
        return cls(zeros, layer, vector, np.zeros(rows.num_rows, bool), marks.is_break, marks.think)

    def at(self, rows: Rows) -> "Steering":
        strength, is_thinking = np.zeros(rows.num_rows, np.float32), np.zeros(rows.num_rows, bool)
        marks = marks_of(rows.model.tokenizer, rows.model.config.vocab_size)
        for i, sample in rows.running.items():
            steer, progress = sample.request.policy.steer, sample.thinking
            if steer is not None:
                with blame(sample):
                    progress.follow(sample.request.prompt, sample.completion.tokens, marks)
                    if steer.growth and sample.clock % steer.interval == 0:
                        decode = rows.model.tokenizer.decode
                        progress.count(sample.completion.tokens, marks, decode, steer.keywords)
                strength[i], is_thinking[i] = steer.strength - steer.growth * progress.num_checks, progress.is_thinking
        return self.replace(strength=strength, is_thinking=is_thinking)

    def begin(self, carried: Carried) -> Any:
        return self.is_thinking, self.strength

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        steered, is_thinking = amounts(self.strength, self.is_break, self.think, step.token[:, 0], carry[0])
        enter = functools.partial(push, self.vector, self.layer, by_place(steered, step))
        return step._replace(enter=enter), (is_thinking, steered)

    def report(self, step: Step, hidden: Float[Array, "B T D"], cache: Cache, carry: Any) -> dict[str, Array]:
        return {"steered": by_place(carry[1], step)}


def by_place(amount: Float[Array, " B"], step: Step) -> Float[Array, "B T"]:
    """The amount at each place of a step: a row that is steered has a token at the first place alone."""
    return jnp.broadcast_to(amount[:, None], step.token.shape)
