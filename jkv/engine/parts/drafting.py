"""Guesses of the next tokens, for an engine whose steps append several: which rows may have any, and the tokens they follow.

The rows' last tokens stay on the device from chunk to chunk; `jkv.engine.speculation` adds those that a step keeps.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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
CREDIT = 1.0  # steps that a new row's guesses may lose before it makes fewer
MOST_CREDIT = 2.0
PRICE = 0.4  # of a step with guesses, in steps without: measured on a CPU
RECOVERY = 1 / 64  # of a step without guesses, so that one in 26 tries again
PENALTIES = "penalties of a token depend on the tokens before it"
FORM = "a form allows a token by the tokens before it"
BAD_WORDS = "bad words are known by the tokens before their last"


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
        return {"history": history, "credit": np.full(rows.num_rows, CREDIT, np.float32)}

    def begin(self, carried: Carried) -> Any:
        assert carried.history is not None
        assert carried.credit is not None
        return Drafts(carried.history, carried.credit)

    def end(self, carry: Any) -> dict[str, Any]:
        return carry._asdict()


class Drafts(NamedTuple):
    """What a row's guesses follow from, and how well they have done.

    The credit is what guesses have saved, in steps, less what they have cost, within limits. It grows slowly while a row makes
    no guess, so one that stopped tries again.
    """

    history: Int[Array, "B S"]
    credit: Float[Array, " B"]

    def after(self, token: Int[Array, "B T"], num_new: Int[Array, " B"], accepted: Int[Array, " B"]) -> "Drafts":
        """After a step with `num_new` tokens, of which `accepted` stay; none of a row that waits."""
        shown = jnp.concatenate([self.history, token], axis=1)
        at = jnp.arange(self.history.shape[1], dtype=jnp.int32) + accepted[:, None]
        gain = jnp.where(num_new > 1, accepted.astype(jnp.float32) - (1 + PRICE), jnp.where(num_new > 0, RECOVERY, 0.0))
        return Drafts(jnp.take_along_axis(shown, at, axis=1), jnp.minimum(self.credit + gain, MOST_CREDIT))


def why_no_guesses(request: Request) -> str | None:
    """Why a request takes one token a step where others are guessed; None for one that is guessed too."""
    if request.form is not None:
        return FORM
    if request.bad_words:
        return BAD_WORDS
    return PENALTIES if request.sampling.penalises else why_by_step(request.policy)


def why_by_step(policy: Policy) -> str | None:
    """Why a policy takes one token a step; None for one that takes several."""
    return next((f"{policy.name} {what}" for name, what in BY_STEP.items() if getattr(policy.needs, name)), None)


def drafting_bytes(drafter: Drafter | None, config: ModelConfig) -> int:
    """What a row's guesses keep on the device: its last tokens, and the credit."""
    return 0 if drafter is None else 4 * (history_of(drafter, config) + 1)


def history_of(drafter: Drafter | None, config: ModelConfig) -> int:
    """The tokens of a row that are kept for a drafter: no more than its model can have."""
    return 0 if drafter is None else min(drafter.history, max(config.max_positions, 2))
