"""What a training run depends on: the stages of its curriculum and its learning rate at each step, read from a TOML file."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from research.tasks.batches import Stage, read_stage


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on.

    Attributes:
      model: the name of a file of `configs/models`.
      seed: of the first weights and of every batch.
      learning_rate: rates at steps, straight lines between them.
      weight_decay: the share of a matrix that a step takes away, times the learning rate.
      checkpoint_every: steps between two checkpoints.
      stages: the curriculum.
      task: a key of `research.tasks.batches.DRAWS`.
      start: a shipped model or a checkpoint folder with whose weights the run begins; None for fresh ones.
      optimizer: "adamw" or "muon".
      validate_every: steps between two lines of `research.tasks.validation`; 0 for none.
    """

    model: str
    seed: int
    learning_rate: tuple[tuple[int, float], ...]
    weight_decay: float
    checkpoint_every: int
    stages: tuple[Stage, ...]
    task: str = "chains"
    start: str | None = None
    optimizer: str = "adamw"
    validate_every: int = 0

    @property
    def num_steps(self) -> int:
        """Updates of the whole run."""
        return sum(stage.steps for stage in self.stages)

    @property
    def last_start(self) -> int:
        """The first step of the last stage."""
        return self.num_steps - self.stages[-1].steps

    @property
    def decay_start(self) -> int:
        """The step from which the learning rate goes to its last value: the last point but one."""
        return self.learning_rate[-2][0]

    def stage(self, step: int) -> Stage:
        """The stage of a step. The last one has no end here: workers make batches before the run's length is known."""
        for stage in self.stages[:-1]:
            if step < stage.steps:
                return stage
            step -= stage.steps
        return self.stages[-1]

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        steps, rates = zip(*self.learning_rate, strict=True)
        return float(np.interp(step, steps, rates))

    def with_steps(self, total: int) -> "TrainConfig":
        """The same run with another number of steps: its last stage is longer or shorter, and the rates of that stage with it.

        Raises:
          ValueError: no step is left for the last stage.
        """
        start = self.last_start
        if total <= start:
            raise ValueError(f"A run must have more steps than the {start} before its last stage; got {total}. Ask for more.")
        factor = (total - start) / self.stages[-1].steps
        rates = tuple(
            (step if step <= start else start + round((step - start) * factor), rate) for step, rate in self.learning_rate
        )
        last = dataclasses.replace(self.stages[-1], steps=total - start)
        return dataclasses.replace(self, learning_rate=rates, stages=(*self.stages[:-1], last))

    def fill(self, current: "TrainConfig", done: int, seconds_left: float, seconds_a_step: float) -> "TrainConfig":
        """The run with as many steps as fit in the time that is left after `done` of them; `current` is the last plan.

        The decay of the learning rate starts later or earlier than planned, but not before `done`: the rates of past steps stay
        what they were, so that the run is that of its final number of steps. Once the decay has started nothing changes.
        """
        if not self.last_start < done < current.decay_start:
            return current
        share = (self.decay_start - self.last_start) / self.stages[-1].steps  # of the last stage before the decay
        least = done + int((done - self.last_start) * (1 / share - 1)) + 2
        return self.with_steps(max(least, done + int(seconds_left / seconds_a_step)))


def read_config(path: Path) -> TrainConfig:
    """A `TrainConfig` from a TOML file."""
    fields: dict[str, Any] = tomllib.loads(path.read_text())
    rates = tuple((step, rate) for step, rate in fields["learning_rate"])
    stages = tuple(read_stage(stage) for stage in fields["stages"])
    return TrainConfig(**fields | {"learning_rate": rates, "stages": stages})


def check_can_stretch(config: TrainConfig) -> None:
    """Refuses a run whose rates would change in the past if its last stage became longer.

    Raises:
      ValueError: the rate does not stay the same from the last stage's start to the last point but one.
    """
    at = [config.rate(step) for step in (config.last_start, config.decay_start)]
    inside = [point for point in config.learning_rate if config.last_start < point[0] < config.decay_start]
    if config.decay_start <= config.last_start or at[0] != at[1] or inside or config.learning_rate[-1][0] != config.num_steps:
        raise ValueError(
            "A run by --seconds or --steps must keep one learning rate from the start of its last stage to the last point but "
            f"one, and end with the last point; got {config.learning_rate} and a last stage from step {config.last_start} to "
            f"{config.num_steps}. Move the points."
        )
