"""Prompts that fit the engine in pieces alone, and the longest text that a server takes."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from jkv.engine.engine import Engine
from jkv.engine.memory import most_slots
from jkv.engine.requests import Request
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.model.sampling import Sampling


def fitted(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """The samples of a prompt as they are, or with the prompt in pieces where it fits in pieces alone.

    A piece is as large as the row grows between two compactions of a short prompt: a prompt of any length then needs no more
    memory than its completion does. A client's own pieces stay.

    Raises:
      ValueError: a request that the engine can never serve.
    """
    try:
        engine.check(requests[0])
    except ValueError as error:
        pieces = [in_pieces(engine, request) for request in requests]
        try:
            engine.check(pieces[0])
        except ValueError:
            raise error from None
        if requests[0].first:
            rule = "{field} must be smaller, such as {piece}, or left out: {why}"
            raise InputError(rule, field="prompt_piece", code="does_not_fit", piece=pieces[0].first, why=error) from None
        return pieces
    return list(requests)


def in_pieces(engine: Engine, request: Request) -> Request:
    """A request whose prompt is compacted for the first time after its first piece, if its policy evicts at all."""
    policy, most = request.policy, engine.model.config.max_positions
    if policy.evict is None and not policy.evicts_in_steps:
        return request
    short = dataclasses.replace(request, prompt=request.prompt[:1], first=0, num_kept=0, max_new_tokens=most)
    piece = min(most_slots(engine.model.params, short), engine.max_slots)
    return dataclasses.replace(request, first=piece) if piece < len(request.prompt) else request


def longest_text(engine: Engine, policy: Policy) -> int:
    """The most tokens that prompt and completion may have together, whatever part of them is the prompt."""

    def is_too_long(length: int) -> bool:
        if length - 1 > policy.longest_prompt:
            return True
        prompt = np.zeros(length - 1, np.int32)
        try:
            fitted(engine, [Request(prompt, policy, Sampling(temperature=0.0), 0, 0, 0, 1, ())])
        except ValueError:
            return True
        return False

    return 1 + bisect.bisect_left(range(2, engine.model.config.max_positions + 1), True, key=is_too_long)
