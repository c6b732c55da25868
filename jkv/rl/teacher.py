"""What a teacher must be of: the completions that are learnt from, and the student's vocabulary."""

from typing import Any

import numpy as np

from jkv.checks import shown
from jkv.engine.results import Result
from jkv.errors import refused
from jkv.replay.score import Scores
from jkv.rl.ratios import check_values

FIX = "Pass what jkv.score(teacher, out, top=k) returned for these completions."
MOST_MASS = 1.001  # that probabilities add up to, with their rounding


def check_teacher(teacher: Any, out: Result, mask: np.ndarray) -> None:
    """Refuses a teacher of other completions than `out`, of another vocabulary, and what is no log-probability.

    Raises:
      ValueError: the rule that the teacher breaks.
    """
    if not isinstance(teacher, Scores):
        raise refused(f"teacher must be scores; got {shown(teacher)}. {FIX}", teacher="wrong_type")
    if not mask.any():
        raise refused("A teacher needs drawn tokens, at least one; the mask is False everywhere.", teacher="missing")
    if out.vocab_size and teacher.vocab_size != out.vocab_size:
        raise refused(
            f"A teacher must have the student's vocabulary, {out.vocab_size} tokens; it has {teacher.vocab_size}. Take one "
            "with the same tokenizer.",
            teacher="does_not_fit",
        )
    top = teacher.top
    shapes = [np.shape(teacher.logprobs), *([] if top is None else [np.shape(top.tokens)[:2], np.shape(top.rest)])]
    if any(shape != mask.shape for shape in shapes):
        raise refused(f"A teacher must have scored completions {mask.shape}; got {shapes[0]}. {FIX}", teacher="does_not_fit")
    check_values("teacher", np.asarray(teacher.logprobs), mask, may_be_cut=True)
    if top is None:
        return
    classes = np.asarray(top.classes, np.float64)
    check_values("teacher", classes, np.broadcast_to(mask[..., None], classes.shape), may_be_cut=True)
    best = classes[..., 0]
    if (mask & np.isneginf(best)).any():
        i, t = (int(index) for index in np.argwhere(mask & np.isneginf(best))[0])
        rule = f"A teacher must have scored every drawn token; it has no likely token at [{i}, {t}]: its completion is shorter."
        raise refused(f"{rule} {FIX}", teacher="does_not_fit")
    total = np.where(mask, np.exp(np.where(mask[..., None], classes, 0.0)).sum(axis=-1), 0.0)
    if total.max() > MOST_MASS:
        rule = f"A teacher's probabilities of different tokens must add up to at most 1; got {total.max():.4g}. {FIX}"
        raise refused(rule, teacher="out_of_range")
