"""The largest numbers that commands, config files and engines take: beyond them a number is a mistake.

A limit is far above what a run here takes, and far below what a list or an array of that many elements would need to exhaust a
machine. Whether a number makes sense for a model is the question of who uses it.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from jkv.checks import check_most, shown
from jkv.errors import InputError

MOST_SIZE = 1 << 31  # every size of a setting lies below; slots and pages are numbered in 32 bits
MOST_SAMPLES = 1 << 17  # of a call: prompts times samples of each
MOST_ROWS = 1 << 16  # decoded together
MOST_SLOTS = 1 << 24  # of a row in a layer and KV head, and tokens of a text
MOST = {
    **dict.fromkeys(("problems", "samples", "n", "prompts", "requests", "passages", "pass_at"), MOST_SAMPLES),
    **dict.fromkeys(("texts", "training", "calibration", "count", "evaluations"), MOST_SAMPLES),
    **dict.fromkeys(("max_running", "rows", "batch", "batches", "budget_batches", "most_rows", "num_devices"), MOST_ROWS),
    **dict.fromkeys(
        ("max_new_tokens", "max_positions", "new_tokens", "length", "lengths", "limit", "context", "prompt"), MOST_SLOTS
    ),
    **dict.fromkeys(("max_slots", "largest_prefill", "prefill_tokens", "prefix_piece", "chunk", "chunks"), MOST_SLOTS),
    **dict.fromkeys(("interval", "recent", "width", "mean"), MOST_SLOTS),
    "page_size": 1 << 16,
    "num_pages": (1 << 31) - 1,
    "max_stop_ids": 1 << 20,
    "max_adapters": 1 << 10,
    "adapter_rank": 1 << 12,
    "times": 1 << 16,  # that a text says a fact
    "seeds": 1_000,  # runs of a policy that draws at random
    "rounds": 10_000,  # timings
    "steps": 10_000_000,  # of training
    "hidden": 4_096,  # units
    "power": 16,  # of attention
    "workers": 1_000,
    "port": (1 << 16) - 1,
}
FREE = ("seed", "shuffle_seed")  # numbers that count nothing


def check_numbers(values: Mapping[str, Any]) -> None:
    """Refuses whole numbers above their limit in `MOST`, or in all other names `MOST_SIZE`, and numbers that are none (NaN).

    Values of other types pass; of a list, each element is looked at.

    Raises:
      InputError: the first one.

    >>> check_numbers({"problems": 10**30})
    Traceback (most recent call last):
    jkv.errors.InputError: problems must be at most 131,072; got 1000000000000000000000000000000. Lower it.
    """
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and number != number:
                raise InputError("{field} must be a number; got {got}.", field=name, code="wrong_type", got=shown(number))
            if isinstance(number, int) and name not in FREE:
                check_most(MOST.get(name, MOST_SIZE - 1), **{name: number})


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line; a number beyond its limit ends the program with a line, as other bad options do."""
    options = parser.parse_args(arguments)
    try:
        check_numbers(vars(options))
    except ValueError as error:
        parser.error(str(error))
    return options
