"""Learned gates (DMS, arXiv 2506.05345; KVzap, arXiv 2601.07891; Fast KVzip, arXiv 2601.17668): tokens judged when written."""

import dataclasses
from pathlib import Path

from jaxtyping import Array, Float

from jkv.checks import check_known
from jkv.errors import InputError
from jkv.eviction.evict import Evict, protection
from jkv.eviction.gate import Gate
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every, Schedule, Threshold
from jkv.eviction.scores import default_recent
from jkv.eviction.view import CacheView

SCOPES = ("head", "compete")


@dataclasses.dataclass(frozen=True)
class GateValue:
    """What the gate computed of each slot's token when it was written."""

    needs = Needs(gate=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.gate is not None
        return view.gate


@recipe(
    "KVzap, DMS, Fast KVzip",
    idea="keeps what a trained gate on hidden states marked when it was written, by budget or by threshold",
    arxiv="2601.07891",
)
def learned_gate(
    weights: Gate | Path | str,
    budget: int | None = None,
    threshold: float | None = None,
    window: int | None = None,
    interval: int = 128,
    sinks: int = 4,
    recent: int | None = None,
    protect_prompt: bool = False,
    scope: str = "head",
) -> Policy:
    """A trained gate, with `budget` slots for each layer and KV head or with a `threshold` of what the gate says of a token.

    `weights` are a `jkv.Gate` or a safetensors file; its tensors decide which gate it is (`jkv.Gate.load` lists them). With a
    budget, the slots of the largest numbers stay; with `scope="compete"`, the KV heads of a layer compete for its slots. With a
    threshold, a slot is dropped if its number is below it: no budget bounds a row, heads hold different numbers of slots, and
    memory follows the text. Take 0 for DMS; the authors of KVzap take about -4. A row is compacted every `interval` generated
    tokens. The last `window` tokens stay, by default as many as the gate's authors keep (DMS 512, KVzap 128, Fast KVzip 8), but
    with a budget at most 64 or a quarter of it. The first `sinks` tokens, the last `recent` (by default the window) and, with
    `protect_prompt`, the prompt stay too. Each slot carries 4 bytes more.

    Rule:
      x = hidden state at the input of the layer's attention, after its norm; h = the same before the norm
      DMS         gate = 5 - 100 * (W . RMSNorm(h) + b), with a norm of its own
      KVzap       gate = W . x + b, or W2 . GELU(W1 . x + b1) + b2: the logarithm of the expected importance
      Fast KVzip  gate = mean over the query heads of 1 / (1 + sum over sinks of exp(q . sink / sqrt(E) - q . k / sqrt(E) - b))
          with q and k normed projections of x to E channels
      budget      the slots of the largest gates stay
      threshold   a slot stays if its gate >= threshold or its age < window

    Departures:
      - The authors drop a token in the step in which it leaves the window; here all that left it go at the next compaction, so
        a row holds up to `interval` tokens more.
      - The authors of DMS drop where W . RMSNorm(h) * 100 - 5 > 0; its negative is stored, so that larger is better.
      - Fast KVzip meets a budget over all layers together; here each layer has the same budget.
      - Gates are computed in float32; the authors use the type of the model.
      - A model that was trained with its gate (DMS) must have those weights; a gate alone does not make it one.

    Raises:
      ValueError: a file that holds no gate, both or neither of budget and threshold, or a setting out of its range. The gate of
        another model is refused when an engine meets it.
    """
    gate = weights if isinstance(weights, Gate) else Gate.load(weights)
    check_known(SCOPES, scope=scope)
    schedule: Schedule
    if budget is not None and threshold is None:
        schedule = Every(budget, interval)
        window = min(gate.window, default_recent(budget)) if window is None else window
    elif threshold is not None and budget is None:
        window = gate.window if window is None else window
        schedule = Threshold(threshold, window, interval)
    else:
        rule = "learned_gate takes exactly one of a {field} (slots) and a threshold (of what its gate computes); got {got}."
        raise InputError(rule, field="budget", code="conflict", got=f"budget={budget}, threshold={threshold}")
    evict = Evict(GateValue(), scope=scope, **protection(window, sinks, recent, protect_prompt))
    return Policy("learned_gate", evict, schedule, calibration=gate)
