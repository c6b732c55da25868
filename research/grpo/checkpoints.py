"""Checkpoints of a run: weights, the optimiser's state and what was written down, so that the same command resumes.

A checkpoint is complete or not there, whenever the process dies, and the last one stays until the next is complete. Each has
the SHA-256 of its arrays and of its history; a damaged one is dropped for the one before. A folder has one run at a time.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jkv.reports import only_writer
from jkv.resuming import check_same


@dataclasses.dataclass
class History:
    """What a run wrote down: a record for each step, and one for each evaluation."""

    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Progress(NamedTuple):
    """What a run is after whole steps: weights, the optimiser's state and its history, none of them changed in place."""

    params: Any
    state: Any
    history: History = History()

    def stepped(self, params: Any, state: Any, record: dict[str, Any]) -> "Progress":
        """After one more step."""
        return Progress(params, state, dataclasses.replace(self.history, steps=[*self.history.steps, record]))

    def evaluated(self, record: dict[str, Any]) -> "Progress":
        """With one more evaluation."""
        return self._replace(history=dataclasses.replace(self.history, evaluations=[*self.history.evaluations, record]))


class Checkpoints:
    """The checkpoints of one run in a folder; None keeps none."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        """Raises ValueError where another process keeps its checkpoints in the folder."""
        self.folder, self.about = folder, about
        self.manager: Any = None
        self.kept, self.lock = History(), contextlib.ExitStack()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock.enter_context(only_writer(folder))
            self.manager = ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def close(self) -> None:
        """Waits for what is being written."""
        with self.lock:
            if self.manager is not None:
                with contextlib.closing(self.manager):
                    self.manager.wait_until_finished()

    def save(self, progress: Progress) -> None:
        """Keeps what a run is, unless it is kept."""
        params, state, history = progress
        if self.manager is None or history == self.kept:
            return
        arrays = {"params": params, "state": state}
        written = {"about": self.about, **dataclasses.asdict(history), "sha256": digests(arrays)}
        parts = {"state": ocp.args.StandardSave(arrays), "history": ocp.args.JsonSave(written | {"seal": digest_of(written)})}
        self.manager.save(number_of(history), args=ocp.args.Composite(**parts))
        self.kept = history

    def restore(self, start: Progress, most: int) -> Progress:
        """The last checkpoint of a run of at most so many steps; the start where there is none.

        Damaged ones are removed, with a line on stderr.

        Raises:
          ValueError: the folder holds another run, or more steps of this one, or only damaged checkpoints.
        """
        if self.manager is None or not (numbers := sorted(self.manager.all_steps(), reverse=True)):
            return start
        for number in numbers:
            try:
                saved = self.read_history(number)
            except Exception as error:  # orbax raises many kinds
                self.drop(number, error)
                continue
            self.check(saved, most)
            try:
                found = self.read_arrays(number, {"params": start.params, "state": start.state}, saved["sha256"])
            except Exception as error:
                self.drop(number, error)
                continue
            for damaged in (other for other in numbers if other > number):
                self.manager.delete(damaged)
            self.kept = History(saved["steps"], saved["evaluations"])
            return Progress(found["params"], found["state"], self.kept)
        raise ValueError(
            f"{self.folder} must hold a checkpoint that is whole; all are damaged. Remove the folder to start anew."
        )

    def check(self, saved: Mapping[str, Any], most: int) -> None:
        """Refuses the history of another run, or of more steps."""
        fix = "Give another --checkpoints, or remove the folder."
        check_same(f"{self.folder} holds the checkpoints of another run", saved["about"], self.about, fix)
        if (steps := len(saved["steps"])) > most:
            raise ValueError(
                f"{self.folder} holds {steps} steps, and {most} are asked for. Ask for more, or remove the folder."
            )

    def read_history(self, number: int) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        saved = self.manager.restore(number, args=ocp.args.Composite(history=ocp.args.JsonRestore()))["history"]
        if saved.pop("seal", None) != digest_of(saved):
            raise ValueError("the history does not have the SHA-256 that it was saved with")
        return saved

    def read_arrays(self, number: int, target: Any, known: Mapping[str, str]) -> Any:
        """The weights and the optimiser's state of a checkpoint."""
        found = self.manager.restore(number, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
        got = digests(found)
        if damaged := [name for name in got if got[name] != known.get(name)]:
            raise ValueError(f"{damaged[0]} does not have the SHA-256 that it was saved with")
        return found

    def drop(self, number: int, error: Exception) -> None:
        """Reports a damaged checkpoint."""
        reason = " ".join(str(error).split())[:300]
        print(f"grpo: {self.folder}: checkpoint {number} is damaged, and the one before is used: {reason}", file=sys.stderr)


def number_of(history: History) -> int:
    """A checkpoint's number: even after a step, the next after that step's evaluation. A later state has a higher number."""
    done = len(history.steps)
    return 2 * done + bool(history.evaluations and history.evaluations[-1]["step"] == done)


def digests(arrays: Any) -> dict[str, str]:
    """The SHA-256 of each array, by its place in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in leaves}


def digest_of(written: Mapping[str, Any]) -> str:
    """The SHA-256 of a record as JSON."""
    return hashlib.sha256(json.dumps(written).encode()).hexdigest()
