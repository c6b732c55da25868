"""Checkpoints of a run: weights, the optimiser's state and what was written down, so that the same command resumes."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import orbax.checkpoint as ocp


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
        self.folder, self.about = folder, about
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = None if folder is None else ocp.CheckpointManager(folder.absolute(), options=options)
        self.kept = History()

    def close(self) -> None:
        """Waits for what is being written."""
        if self.manager is not None:
            self.manager.wait_until_finished()
            self.manager.close()

    def save(self, progress: Progress) -> None:
        """Keeps what a run is, unless it is kept; in place of the same step without its evaluation."""
        params, state, history = progress
        if self.manager is None or history == self.kept:
            return
        step = len(history.steps)
        if self.manager.latest_step() == step:
            self.manager.wait_until_finished()
            self.manager.delete(step)
        written = {"about": self.about, **dataclasses.asdict(history)}
        parts = {"state": ocp.args.StandardSave({"params": params, "state": state}), "history": ocp.args.JsonSave(written)}
        self.manager.save(step, args=ocp.args.Composite(**parts))
        self.kept = history

    def restore(self, start: Progress, most: int) -> Progress:
        """The last checkpoint of a run of at most so many steps; the start where there is none.

        Raises:
          ValueError: the folder holds another run, or more steps of this one.
        """
        if self.manager is None or self.manager.latest_step() is None:
            return start
        step = self.manager.latest_step()
        target = {"params": start.params, "state": start.state}
        parts = {"state": ocp.args.StandardRestore(target), "history": ocp.args.JsonRestore()}
        saved = self.manager.restore(step, args=ocp.args.Composite(history=parts["history"]))["history"]
        if saved["about"] != self.about:
            differ = sorted(name for name in self.about if saved["about"].get(name) != self.about[name])
            raise ValueError(
                f"{self.folder} holds the checkpoints of another run, by {', '.join(differ)}. Give another --checkpoints, or "
                "remove the folder."
            )
        if step > most:
            raise ValueError(f"{self.folder} holds {step} steps, and {most} are asked for. Ask for more, or remove the folder.")
        found = self.manager.restore(step, args=ocp.args.Composite(state=parts["state"]))["state"]
        self.kept = History(saved["steps"], saved["evaluations"])
        return Progress(found["params"], found["state"], self.kept)
