"""The row of the oracle in tables: a policy for each text, which knows what will be read of it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jkv.analysis.recall import Text, future_reads
from jkv.engine.results import complete
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import full
from jkv.policies.oracle import FutureReads, oracle
from jkv.replay.score import round_up

ORACLE = "oracle"  # its name where policies are named; it is none of `jkv.POLICIES`, as nobody can run it
INTERVAL = 16  # tokens between its compactions, unless settings say otherwise


def oracles_of(model: Model, texts: Sequence[Text], settings: dict[str, dict[str, Any]]) -> Callable[[int, int], Policy]:
    """A function of an index and a budget that gives the oracle of that text; what it knows is computed at the first call.

    Raises:
      ValueError: settings that the oracle has not.
    """
    own = settings_of_oracle(settings)
    width = round_up(max(len(prompt) + len(rest) for prompt, rest in texts))
    known: list[FutureReads] = []

    def of_text(index: int, slots: int) -> Policy:
        if not known:
            known.extend(future_reads(model, text, own["interval"], width) for text in texts)
        return oracle(known[index], slots, **own)

    return of_text


def settings_of_oracle(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The oracle's own settings among the settings of policies.

    Raises:
      ValueError: one that it has not.
    """
    own = {"interval": INTERVAL} | settings.get(ORACLE, {})
    if unknown := sorted(set(own) - {"interval", "sinks", "recent"}):
        rule = f"The oracle has the settings interval, sinks and recent; got {', '.join(unknown)}."
        raise refused(rule, settings="unknown_name")
    return own


def greedy_texts(model: Model, prompts: Sequence[Any], max_new_tokens: int, options: dict[str, Any]) -> list[Text]:
    """Each prompt with what the model writes after it with the full cache."""
    greedy: Any = {"sampling": Sampling(temperature=0.0), "max_new_tokens": max_new_tokens, "progress": False}
    out = complete(generate(model, prompts, full(), **greedy, **options))
    return [
        (np.asarray(prompt).tolist(), row[:n].tolist()) for prompt, row, n in zip(prompts, out.tokens, out.lengths, strict=True)
    ]
