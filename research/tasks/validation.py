"""Figures that a training run prints of unseen problems: which tokens the model gets right if all before them are right.

They predict the gate (`research.tasks.gate`) early: greedy decoding solves a trail of which every token is right, with the full
cache (`full`) or with the live set alone (`trimmed`).
"""

import collections
import dataclasses
from typing import Any

import numpy as np

from research.tasks.batches import Stage, make_batch
from research.tasks.live_set import statements

SEED = 5_000_011  # of problems that no training draws
BATCHES = 4  # of the last stage's rows
SHOWN = 4  # tokens that are missed most


@dataclasses.dataclass(frozen=True)
class Validation:
    """Fixed batches of unseen problems: one kind for each key of `batches`."""

    tokenizer: Any
    batches: dict[str, list[dict[str, np.ndarray]]]

    @classmethod
    def draw(cls, tokenizer: Any, stage: Stage, task: str) -> "Validation":
        """Batches of a stage without drills; trails also with each one trimmed to its live set."""
        kinds = {"full": 0.0, "trimmed": 1.0} if task == "trails" else {"full": 0.0}
        batches = {}
        for name, live in kinds.items():
            own = dataclasses.replace(stage, drills=0.0, live=live)
            batches[name] = [make_batch(tokenizer, own, (SEED, i), task) for i in range(BATCHES)]
        return cls(tokenizer, batches)

    def measure(self, pick: Any) -> dict[str, Any]:
        """For each kind: `whole`, the share of problems with every token right; the share of tokens right by what they are, a
        `value`, a `name` or `other`; and the tokens missed most, with the share of them that is missed.

        `pick` gives the model's tokens for a batch, `[rows, length]`.
        """
        found: dict[str, Any] = {}
        for kind, batches in self.batches.items():
            right: dict[str, list[bool]] = {"value": [], "name": [], "other": []}
            whole: list[bool] = []
            missed: collections.Counter[str] = collections.Counter()
            asked: collections.Counter[str] = collections.Counter()
            for batch, picked in zip(batches, [pick(batch) for batch in batches], strict=True):
                for row in range(len(batch["token"])):
                    self._count(batch, row, np.asarray(picked)[row], right, whole, missed, asked)
            worst = sorted(missed, key=lambda token: -missed[token] / asked[token])[:SHOWN]
            found[kind] = {
                **{name: round(float(np.mean(hits)), 5) for name, hits in {"whole": whole, **right}.items() if hits},
                "missed": {token: round(missed[token] / asked[token], 3) for token in worst},
            }
        return found

    def _count(
        self,
        batch: dict[str, np.ndarray],
        row: int,
        picked: np.ndarray,
        right: dict[str, list[bool]],
        whole: list[bool],
        missed: collections.Counter[str],
        asked: collections.Counter[str],
    ) -> None:
        """Adds one row."""
        token, segment = batch["token"][row], batch["segment"][row]
        names = self.tokenizer.convert_ids_to_tokens(token.tolist())
        kinds = {at: fact.rpartition(" ")[2] for fact, at in statements(names)}
        is_target = batch["is_target"][row, 1:] & (segment[1:] == segment[:-1])
        hit = picked == token[1:]
        for problem in np.unique(segment):
            of_problem = np.flatnonzero(is_target & (segment[1:] == problem))
            if len(of_problem):
                whole.append(bool(hit[of_problem].all()))
            for at in of_problem.tolist():
                right[kinds.get(at + 1, "other")].append(bool(hit[at]))
                asked[names[at + 1]] += 1
                missed.update([names[at + 1]] * (not hit[at]))
