"""Padded prompts, as a tokenizer returns a batch: taken with their mask, and refused where they look padded without one.

A padding token that is read as text changes every token after it, and nothing in a result shows that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.checks import shown
from jkv.errors import refused
from jkv.model.params import Model

RULE = "A prompt mask must have a 1 for each token and a 0 for each padding token, as a tokenizer's attention_mask"
FIX = (
    "Pass the tokenizer's attention_mask as prompt_mask=, or lists of ids without padding; a mask of ones takes the rows as "
    "they are"
)


def parts_of(prompts: Any, mask: Any = None) -> tuple[Any, Any]:
    """Prompts and their mask: of what a tokenizer of Hugging Face returns, its `input_ids` and `attention_mask`."""
    if mask is None and isinstance(prompts, Mapping) and {"input_ids", "attention_mask"} <= prompts.keys():
        return prompts["input_ids"], prompts["attention_mask"]
    return prompts, mask


def without_padding(prompts: Any, mask: Any) -> list[np.ndarray]:
    """The tokens of each row that its mask keeps; a single row is a list of one.

    >>> without_padding([[1, 1, 5, 6], [5, 6, 7, 1]], [[0, 0, 1, 1], [1, 1, 1, 0]])
    [array([5, 6]), array([5, 6, 7])]

    Raises:
      ValueError: a mask of other numbers or of another shape, or one with a gap between two tokens.
    """
    try:
        ids, kept = np.asarray(prompts), np.asarray(mask)
    except (ValueError, TypeError, OverflowError):
        rule = f"{RULE}, for rows of equally many token ids; got rows of several lengths. {FIX}."
        raise refused(rule, mask="wrong_type") from None
    if ids.shape != kept.shape or ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise refused(
            f"{RULE}, for rows of equally many token ids; got {ids.dtype}{list(ids.shape)} with a mask {list(kept.shape)}. "
            f"{FIX}.",
            mask="wrong_type",
        )
    if kept.dtype == object or not np.isin(kept, (0, 1)).all():
        rule = f"{RULE}; got {shown(np.unique(kept)[:4].tolist() if kept.dtype != object else mask)}. {FIX}."
        raise refused(rule, mask="wrong_type")
    rows = []
    for i, (row, ones) in enumerate(zip(np.atleast_2d(ids), np.atleast_2d(kept) == 1, strict=True)):
        places = np.flatnonzero(ones)
        if not len(places):
            raise refused(f"{RULE}, and at least one token; row {i} has none. Leave the row out.", mask="missing")
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 != len(places):
            gap = first + int(np.argmin(ones[first:]))
            rule = f"{RULE}, and padding only before or after the tokens; row {i} has some at {gap}. Join the tokens."
            raise refused(rule, mask="invalid")
        rows.append(row[first : last + 1])
    return rows


def check_not_padded(model: Model | None, prompts: Sequence[Any], pad_id: int | None = None) -> None:
    """Refuses rows of equally many ids of which one begins or ends with the padding token: nobody says that it is text.

    Args:
      model: gives the padding token of its tokenizer. One that has none is padded with an end token, if at all: rows that begin
        or end with two of these are refused.
      prompts: any list; texts, conversations and lists of several lengths are not looked at.
      pad_id: the padding token, where the caller knows it.

    Raises:
      ValueError: the row, the token, and what to pass.
    """
    tokenizer = None if model is None else model.tokenizer
    pad_id = getattr(tokenizer, "pad_token_id", None) if pad_id is None else pad_id
    if pad_id is None and (model is None or tokenizer is None):
        return
    if any(isinstance(row, str | bytes | Mapping) or not hasattr(row, "__len__") for row in prompts):
        return
    try:
        if len({len(row) for row in prompts}) != 1 or len(prompts[0]) < 2:
            return
        rows = (np.asarray(row) if hasattr(row, "shape") else row for row in prompts)
        table = np.asarray([[row[i] for i in (0, 1, -2, -1)] for row in rows])  # not whole rows, which may have any length
    except (ValueError, TypeError, KeyError, OverflowError):
        return  # `check_ids` says what it is
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        return
    pads: Any = list(model.config.end_ids) if pad_id is None and model is not None else [pad_id]
    begins = pad_id is not None and pad_id == getattr(tokenizer, "bos_token_id", None)  # then every text may begin with one
    is_pad = np.isin(table, pads)
    left = is_pad[:, 0] & (is_pad[:, 1] | (pad_id is not None and not begins))
    right = is_pad[:, -1] & (is_pad[:, -2] | (pad_id is not None))
    if (left | right).any():
        row = int(np.argmax(left | right))
        where, token = ("begins", table[row, 0]) if left[row] else ("ends", table[row, -1])
        raise refused(
            f"Prompts must have no padding, which would be read as text; row {row} of {len(table)} {where} with the padding "
            f"token {token}. {FIX}.",
            prompts="invalid",
        )
