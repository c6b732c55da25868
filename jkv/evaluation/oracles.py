"""The row of the oracle in tables: a policy for each text, which knows what will be read of it."""

from collections.abc import Callable, Sequence
from typing import Any

from jkv.analysis.recall import Text, future_reads
from jkv.model.params import Model
from jkv.policies import Policy
from jkv.policies.oracle import FutureReads, oracle
from jkv.replay.score import round_up

ORACLE = "oracle"  # its name where policies are named; it is none of `jkv.POLICIES`, as nobody can run it
INTERVAL = 16  # tokens between its compactions, unless settings say otherwise


def oracles_of(
    model: Model, texts: Sequence[Text], settings: dict[str, dict[str, Any]]
) -> Callable[[Sequence[int]], list[Policy]]:
    """A function that gives the oracle of each text with so many slots.

    Raises:
      ValueError: settings that the oracle has not.
    """
    own = {"interval": INTERVAL} | settings.get(ORACLE, {})
    if unknown := sorted(set(own) - {"interval", "sinks", "recent"}):
        raise ValueError(f"The oracle has the settings interval, sinks and recent; got {', '.join(unknown)}.")
    width = round_up(max(len(prompt) + len(rest) for prompt, rest in texts))
    known: list[FutureReads] = []

    def with_slots(slots: Sequence[int]) -> list[Policy]:
        if not known:
            known.extend(future_reads(model, text, own["interval"], width) for text in texts)
        return [oracle(reads, count, **own) for reads, count in zip(known, slots, strict=True)]

    return with_slots
