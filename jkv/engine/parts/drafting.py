"""Guesses of the next tokens, for an engine whose steps append several: which rows may have any, and the tokens they follow.

The rows' last tokens stay on the device from chunk to chunk; `jkv.engine.speculation` adds those that a step keeps.
"""

from typing import Annotated, Any

import numpy as np

from jkv.engine.drafters import NOTHING, Drafter
from jkv.engine.parts.base import Carried, Rows, StepPart
from jkv.model.params import ModelConfig


class Drafting(StepPart):
    """Which rows may have drafts, and which rows have the same prompt."""

    may_draft: Annotated[Any, "B"]
    prompt: Annotated[Any, "B"]  # the first row with the same prompt, -1 for a row that does not run

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.drafter is not None

    @classmethod
    def of(cls, rows: Rows) -> "Drafting":
        may_draft, prompt = np.zeros(rows.num_rows, bool), np.full(rows.num_rows, -1, np.int32)
        firsts: dict[Any, int] = {}
        for i, sample in rows.running.items():
            request = sample.request  # what penalties and bad words do at a draft follows from those before it
            may_draft[i] = not (request.sampling.penalises or request.bad_words)
            prompt[i] = firsts.setdefault(sample.request.prompt.tobytes(), i)
        return cls(may_draft, prompt)

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
        assert rows.drafter is not None
        history = np.full((rows.num_rows, history_of(rows.drafter, rows.model.config)), NOTHING, np.int32)
        for i, sample in rows.running.items():
            tokens = np.concatenate([sample.request.prompt, np.asarray(sample.completion.tokens, np.int32)])
            tokens = tokens[-history.shape[1] :]
            history[i, history.shape[1] - len(tokens) :] = tokens
        return {"history": history}

    def begin(self, carried: Carried) -> Any:
        return carried.history

    def end(self, carry: Any) -> dict[str, Any]:
        return {"history": carry}


def history_of(drafter: Drafter, config: ModelConfig) -> int:
    """The tokens of a row that are kept for a drafter: no more than its model can have."""
    return min(drafter.history, max(config.max_positions, 2))
