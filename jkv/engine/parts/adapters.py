"""The low-rank adapter of each row (`jkv.model.adapter_stacks`), for prompts and decode steps alike."""

from typing import Annotated, Any

import numpy as np

from jkv.engine.parts.base import Rows, Step, StepPart
from jkv.model.adapter_stacks import by_row
from jkv.model.params import Params


class Adapters(StepPart):
    """The adapters of an engine, and the place of each row's adapter. It is on for all rows once an engine has had an adapter.

    If it were on only while a row has an adapter, the numbers of other rows could change with their neighbours.
    """

    sees_prompts = True

    stacks: Params
    place: Annotated[Any, "B"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.adapters is not None and rows.adapters.is_used

    @classmethod
    def of(cls, rows: Rows) -> "Adapters":
        assert rows.adapters is not None
        place = np.zeros(rows.num_rows, np.int32)
        for i, sample in rows.running.items():
            place[i] = rows.adapters.place_of(sample.request.adapter)
        return cls(rows.adapters.stacks, place)

    def at(self, rows: Rows) -> "Adapters":
        assert rows.adapters is not None
        return self.replace(stacks=rows.adapters.stacks)  # another adapter in a place is another array

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        return step._replace(params=by_row(step.params, self.stacks, self.place[step.row])), carry
