"""Advantages: how much better a completion is than the others of its prompt."""

from typing import Any

import numpy as np

from jkv.checks import typed
from jkv.errors import refused

EPSILON = 1e-4


def group_advantages(rewards: Any, n: int, scale: bool = True, prompt_index: Any = None) -> np.ndarray:
    """Each completion's reward less the mean of its prompt's `n`, in standard deviations of these: float32 `[N]`.

    GRPO's with outcome rewards (DeepSeekMath, 2402.03300). The deviation is that of a sample (n - 1), with 1e-4 added; a group
    of equal rewards gets zeros. `scale=False` leaves the division out (Dr. GRPO, 2503.20783), which weighs prompts of which
    nearly all or nearly no completions are right less.

    Args:
      rewards: `[N]`, prompt-major: the n completions of the first prompt, then of the second, as rollouts are.
      n: completions of each prompt.
      scale: whether to divide by the deviation.
      prompt_index: `[N]` which prompt each completion is of (`out.prompt_index`), to refuse groups that are not whole; for
        what an interrupt or `run(until_done=...)` returned.

    Raises:
      ValueError: groups of fewer than two, rewards that are no whole groups, or not finite.

    >>> [round(float(a), 3) for a in group_advantages([1, 0, 5, 5], 2)]
    [0.707, -0.707, 0.0, 0.0]
    """
    if typed("n", n, int) < 2:
        raise refused(
            f"A group must hold at least 2 completions of a prompt, since each is compared with the others; got {n=}. "
            "Draw more: rollout(prompts, n=8).",
            n="out_of_range",
        )
    values = np.asarray(rewards, np.float64)
    if values.ndim != 1 or len(values) == 0 or len(values) % n:
        rule = f"rewards must be one number a completion, {n} for each prompt in turn; got {values.shape}."
        raise refused(rule, rewards="wrong_type")
    if not np.isfinite(values).all():
        rule = f"rewards must be finite; got {values[~np.isfinite(values)][0]} at {int(np.argmin(np.isfinite(values)))}."
        raise refused(rule, rewards="out_of_range")
    if prompt_index is not None:
        check_groups(np.asarray(prompt_index), n, len(values))
    groups = values.reshape(-1, n)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale:
        centred = centred / (groups.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    return centred.reshape(-1).astype(np.float32)


def check_groups(prompt_index: np.ndarray, n: int, count: int) -> None:
    """Refuses completions that are not in groups: n completions of one prompt, then n of the next."""
    if prompt_index.shape != (count,):
        rule = f"prompt_index must be one number a reward, ({count},); got {prompt_index.shape}."
        raise refused(rule, prompt_index="wrong_type")
    names, sizes = np.unique(prompt_index, return_counts=True)
    if (sizes != n).any() or (prompt_index.reshape(-1, n) != prompt_index[::n, None]).any():
        wrong = names[sizes != n]
        got = f"prompt {wrong[0]} has {sizes[sizes != n][0]}" if len(wrong) else "prompts are not one after the other"
        raise refused(
            f"A group is compared within itself, so all {n} completions of each prompt must be here, in turn; {got}. Run to "
            "the end, or leave that prompt out.",
            prompt_index="invalid",
        )
