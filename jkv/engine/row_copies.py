"""Running rows as bytes, from which another engine goes on, also in another process or on another machine.

A copy has what a swapped-out row has (pages, block table, logits, last queries) and the sample's host records, without the
policy, which the other engine has already, and without callbacks. The other engine must have the same settings and weights of
the same shapes. A row that goes on there draws the tokens that it would have drawn here.
"""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

from jkv.engine.clocks import running_seconds
from jkv.engine.outputs import Event
from jkv.engine.samples import Prefix, Sample, stop_finder
from jkv.engine.swap import SwappedRow
from jkv.eviction import Policy
from jkv.policies import full


def can_move(sample: Sample) -> bool:
    """Whether another engine could go on with a running sample's row."""
    request = sample.request
    return not sample.is_finished and request.policy.share is None and not request.num_kept and not request.keep


def pack(sample: Sample, row: SwappedRow) -> bytes:
    """A running sample with a copy of its row, as one that is swapped out and belongs to no engine."""
    one = copy.copy(sample)
    if one.routes is not None:
        one.routes.land()
    one.request = dataclasses.replace(sample.request, policy=full())
    one.swapped, one.is_swapped, one.is_running = row, True, False
    one.shares, one.num_shared_pieces, one.pieces, one.prefix = False, 0, (), Prefix(None)
    one.on_tokens, one.stops, one.text, one.emitted = None, None, None, None
    one.submitted = sample.seconds  # since then: clocks of two processes differ
    return pickle.dumps(one)


def unpack(content: bytes, policy: Policy, tokenizer: Any, on_tokens: Callable[[Event], None] | None) -> Sample:
    """The sample that was packed, with what belongs to its new engine."""
    sample: Sample = pickle.loads(content)
    sample.request = dataclasses.replace(sample.request, policy=policy)
    sample.index, sample.submitted = 0, running_seconds() - sample.submitted
    sample.stops = stop_finder(tokenizer, sample.request)
    if sample.stops is not None:
        sample.stops.find(sample.completion.tokens)
    sample.on_tokens, sample.num_emitted, sample.num_emitted_tokens = on_tokens, 0, 0
    return sample
