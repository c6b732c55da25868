"""Penalties on tokens that a row already holds: the counts that they read, which stay on the device (`jkv.model.sampling`)."""

from typing import Annotated, Any

from jaxtyping import Array

from jkv.engine.parts.base import Carried, Draw, Rows, Step, StepPart
from jkv.engine.samples import Sample
from jkv.model.sampling import TokenCounts, count_next, count_tokens


class Penalties(StepPart):
    """Which tokens each row's prompt holds; it carries how often its completion holds each."""

    is_prompted: Annotated[Any, "B V"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.sampling.penalises for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "Penalties":
        prompts = {i: sample.request.prompt.tolist() for i, sample in rows.running.items() if penalises(sample)}
        counts = count_tokens([(prompts.get(i, ()), ()) for i in range(rows.num_rows)], rows.model.config.vocab_size)
        return cls(counts.is_prompted)

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
        tokens = {i: sample.completion.tokens for i, sample in rows.running.items() if penalises(sample)}
        counts = count_tokens([((), tokens.get(i, ())) for i in range(rows.num_rows)], rows.model.config.vocab_size)
        return {"generated": counts.generated}

    def begin(self, carried: Carried) -> Any:
        return carried.generated

    def draw(self, draw: Draw, carry: Any) -> Draw:
        return draw._replace(counts=TokenCounts(self.is_prompted[:, None], carry[:, None]))

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        return step, count_next(carry, step.token[:, 0], step.is_active)

    def end(self, carry: Any) -> dict[str, Array]:
        return {"generated": carry}


def penalises(sample: Sample) -> bool:
    """Whether a sample's request has penalties; other rows count nothing."""
    return sample.request.sampling.penalises
