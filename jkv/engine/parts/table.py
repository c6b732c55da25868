"""The table of parts, in the order in which a step calls them."""

import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from jkv.engine.parts.adapters import Adapters
from jkv.engine.parts.alignment import Alignment
from jkv.engine.parts.bad_words import BadWords
from jkv.engine.parts.base import Rows, StepPart
from jkv.engine.parts.biases import Biases
from jkv.engine.parts.drafting import Drafting
from jkv.engine.parts.forced_tokens import ForcedTokens
from jkv.engine.parts.forms import Forms
from jkv.engine.parts.gating import Gating
from jkv.engine.parts.host_forms import HostForms
from jkv.engine.parts.penalties import Penalties
from jkv.engine.parts.returned import Experts, HiddenStates, OwnLogProbs, TopLogProbs
from jkv.engine.parts.steering import Steering


class Parts(NamedTuple):
    """The parts of an engine's steps; None for those that are not on."""

    adapters: Adapters | None = None
    forced: ForcedTokens | None = None
    biases: Biases | None = None
    bad_words: BadWords | None = None
    form: Forms | None = None
    host_form: HostForms | None = None
    penalties: Penalties | None = None
    align: Alignment | None = None
    steer: Steering | None = None
    gate: Gating | None = None
    experts: Experts | None = None
    hidden: HiddenStates | None = None
    own: OwnLogProbs | None = None
    top: TopLogProbs | None = None
    draft: Drafting | None = None

    @property
    def on(self) -> dict[str, StepPart]:
        """Those that are on, by name, in order."""
        return {name: part for name, part in self._asdict().items() if part is not None}

    @classmethod
    def from_names(cls, parts: Mapping[str, StepPart]) -> "Parts":
        """The parts with these names."""
        fields: Any = parts
        return cls(**fields)


KINDS: dict[str, type[StepPart]] = {
    name: next(kind for kind in typing.get_args(hint) if kind is not type(None))
    for name, hint in typing.get_type_hints(Parts).items()
}


def names_on(rows: Rows) -> set[str]:
    """The names of the parts that rows need."""
    return {name for name, kind in KINDS.items() if kind.is_on(rows)}
