"""Thoughts that start on a page of their own, so that sharing compares whole pages (`jkv.reasoning.sharing`)."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jkv.cache import pool as pages
from jkv.engine.parts.base import Carried, Rows, Step, StepPart
from jkv.reasoning.token_text import facts_of


class Alignment(StepPart):
    """Which rows start each thought on a new page, and how far they are in a thought, which it carries on."""

    is_aligning: Annotated[Any, "B"]
    was_end: Annotated[Any, "B"]  # whether the last token ended a thought
    since: Annotated[Any, "B"]  # tokens since the last thought that started a page
    is_end: Annotated[Any, "V"]  # whether a token ends a thought

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.needs.aligning

    @classmethod
    def of(cls, rows: Rows) -> "Alignment":
        facts, no_row = facts_of(rows.model.tokenizer, rows.model.config.vocab_size), np.zeros(rows.num_rows, bool)
        return cls(no_row, no_row, np.zeros(rows.num_rows, np.int32), facts.ends_thought)

    def at(self, rows: Rows) -> "Alignment":
        is_aligning, was_end, since = (np.zeros(rows.num_rows, kind) for kind in (bool, bool, np.int32))
        for i, sample in rows.running.items():
            sharing = sample.sharing
            if sharing is not None and sharing.share.align_steps:
                is_aligning[i], was_end[i], since[i] = True, sharing.ended_thought, sharing.since_aligned
        return self.replace(is_aligning=is_aligning, was_end=was_end, since=since)

    def begin(self, carried: Carried) -> Any:
        return self.was_end, self.since

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        """Starts a new page in each row whose next token starts a thought; `Sharing.append` does the same on the host.

        After less than half a page of text, a thought continues in the same page, so that no row is more than half empty.
        """
        was_end, since = carry
        pool, is_end = step.cache.pool, self.is_end[step.token[:, 0]]
        starts = self.is_aligning & step.is_active & was_end & ~is_end & (2 * since >= pool.page_size)
        since = jnp.where(step.is_active, jnp.where(starts, 0, since) + 1, since)
        step = step._replace(cache=step.cache._replace(pool=pages.fill_page(pool, starts)))
        return step, (jnp.where(step.is_active, is_end, was_end), since)
