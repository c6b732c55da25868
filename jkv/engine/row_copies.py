"""Running rows as bytes, from which another engine goes on, also in another process or on another machine.

A copy has what a swapped-out row has (pages, block table, logits, last queries) and the sample's host records, without the
policy, which the other engine has already, and without callbacks. The other engine must have the same settings and weights of
the same shapes. A row that goes on there draws the tokens that it would have drawn here.
"""

import copy
import dataclasses
import pickle
from typing import Any

from jkv.engine import swap
from jkv.engine.samples import Prefix, Sample, stop_finder
from jkv.engine.timing import running_seconds
from jkv.eviction import Policy
from jkv.policies import full


def copy_rows(engine: Any) -> dict[int, bytes]:
    """A copy of each running row, by the ticket of its request; the engine goes on as if nothing had happened.

    Left out are rows that another engine could not go on with: those whose pages are shared by similarity (the record of
    thoughts belongs to one engine), later turns of conversations, and requests of several samples. What is left out, or waits,
    starts again elsewhere, with the same draws.

    Raises:
      ValueError: the engine sleeps.
    """
    if engine.is_asleep:
        raise ValueError("Rows are copied from the pool, and a sleeping engine has none. Call wake() first.")
    with engine._guard.turn("copy_rows"):
        engine._collect()  # a chunk that was dispatched ahead
        engine.runner.fill(to_end=True)
        runner = engine.runner
        with runner.meter.clock("swap_seconds"):
            return {
                sample.ticket: pickle.dumps(detached(sample, swap.swap_out(runner.programs, runner.state, row, None)))
                for row, sample in engine.scheduler.running.items()
                if can_move(sample) and len(engine.tickets[sample.ticket]) == 1
            }


def can_move(sample: Sample) -> bool:
    """Whether another engine could go on with a running sample's row."""
    request = sample.request
    return not sample.is_finished and request.policy.share is None and not request.num_kept and not request.keep


def detached(sample: Sample, row: swap.SwappedRow) -> Sample:
    """A sample that is swapped out and belongs to no engine; it shares lists with the one given: to be pickled at once."""
    one = copy.copy(sample)
    if one.routes is not None:
        one.routes.land()
    one.request = dataclasses.replace(sample.request, policy=full())
    one.swapped, one.is_swapped, one.is_running = row, True, False
    one.shares, one.num_shared_pieces, one.pieces, one.prefix = False, 0, (), Prefix(None)
    one.on_tokens, one.stops, one.text, one.emitted = None, None, None, None
    one.submitted = sample.seconds  # since then: clocks of two processes differ
    return one


def resume_row(engine: Any, content: bytes, policy: Policy, on_tokens: Any = None) -> int:
    """Queues a copied row, to be swapped in as soon as it fits, and returns its request's new ticket.

    Args:
      content: of `copy_rows`, from an engine of the same settings. It is unpickled: take none from strangers.
      policy: that of the sample.
      on_tokens: receives an `Event` for each chunk; the first has all tokens so far.
    """
    sample: Sample = pickle.loads(content)
    sample.request = dataclasses.replace(sample.request, policy=policy)
    engine.check(sample.request)
    with engine._guard.changing("resume_row"):
        sample.ticket, sample.index = next(engine._ticket), 0
        sample.submitted = running_seconds() - sample.submitted
        sample.stops = stop_finder(engine.model.tokenizer, sample.request)
        if sample.stops is not None:
            sample.stops.find(sample.completion.tokens)
        sample.on_tokens, sample.num_emitted, sample.num_emitted_tokens = on_tokens, 0, 0
        engine.tickets[sample.ticket] = [sample]
        engine.scheduler.add(sample)
    return sample.ticket


def renumber(engine: Any, version: int) -> None:
    """Lets the weights that a new engine was built with count as a later version than 0; before its first request.

    Raises:
      ValueError: it has had requests.
    """
    if engine.tickets or engine.scheduler.prefixes:
        raise ValueError("An engine's weights are numbered before its first request; this one has had some. Make a new one.")
    with engine._guard.turn("renumber"):
        engine.runner.version = version
        engine.runner.free(engine.scheduler.renew(version))
