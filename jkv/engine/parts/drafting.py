"""Guesses of the next tokens, for an engine whose steps append several: which rows may have any, and the tokens they follow.

The rows' last tokens stay on the device from chunk to chunk; `jkv.engine.speculation` adds those that a step keeps.
"""

from typing import Annotated, Any

import numpy as np

from jkv.engine.drafters import NOTHING, Drafter
from jkv.engine.parts.base import Carried, Rows, StepPart
from jkv.engine.requests import Request
from jkv.eviction import Policy
from jkv.model.params import ModelConfig

BY_STEP = {  # needs of a policy that decides with each token, and what it does
    "mass": "evicts by the attention of each step",
    "bounds": "chooses pages in each step",
    "moving_sinks": "moves its sinks in each step",
    "steering": "steers by each token",
    "aligning": "starts thoughts on pages of their own",
}
PENALTIES = "penalties of a token depend on the tokens before it"


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
            may_draft[i] = why_no_guesses(sample.request) is None
            prompt[i] = firsts.setdefault(sample.request.prompt.tobytes(), i)
        return cls(may_draft, prompt)

    @classmethod
    def carried(cls, rows: Rows) -> dict[str, Any]:
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


def why_no_guesses(request: Request) -> str | None:
    """Why a request takes one token a step where others are guessed; None for one that is guessed too."""
    return PENALTIES if request.sampling.penalises else why_by_step(request.policy)


def why_by_step(policy: Policy) -> str | None:
    """Why a policy takes one token a step; None for one that takes several."""
    return next((f"{policy.name} {what}" for name, what in BY_STEP.items() if getattr(policy.needs, name)), None)


def history_of(drafter: Drafter | None, config: ModelConfig) -> int:
    """The tokens of a row that are kept for a drafter: no more than its model can have."""
    return 0 if drafter is None else min(drafter.history, max(config.max_positions, 2))
