"""Whose fault it is when something fails: a sample's, whose request ends with the reason "error" while the others go on.

- `blame`: the host works for one sample (its text, its trace, a caller's function). It keeps the error, and `Outputs` ends it.
- `accuse`: the device has counted scores that are no numbers, of one sample's row or of a prompt that several start from.
- `working_for`: the device works for some samples alone. What fails then has taken the state of all, so the step fails.
- `Search`: a step has failed, and all rows start again. If it fails again, it finds the sample that makes it fail.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from jkv.engine.samples import Prefix, Sample
from jkv.eviction.evict import fault_of

NOTE = "_jkv_samples"  # the attribute of an exception
MOST_ALONE = 3  # steps that may fail in a row although no sample runs


@contextlib.contextmanager
def blame(sample: Sample) -> Iterator[None]:
    """What the block raises, exits included, is the sample's error; the caller goes on after the block."""
    try:
        yield
    except BaseException as error:
        sample.completion.error = sample.completion.error or error


def accuse(owner: Sample | Prefix, kinds: Any) -> None:
    """If no slot can be ranked by an owner's scores, that is the error of the sample, or of all that start from the prompt.

    Samples that start from the prompt later get it as their rows start.

    Args:
      owner: whose row was compacted.
      kinds: `Evict.kinds` of it, on the host.
    """
    samples = list(owner.samples) if isinstance(owner, Prefix) else [owner]
    fault = fault_of(kinds, samples[0].request.policy.name) if samples else None
    if isinstance(owner, Prefix):
        owner.error = owner.error or fault
    for sample in samples:
        if not sample.is_finished:
            sample.completion.error = sample.completion.error or fault


@contextlib.contextmanager
def working_for(samples: Iterable[Sample]) -> Iterator[None]:
    """Adds to an exception of the block the samples that the device works for; in nested blocks, the outermost counts."""
    samples = list(samples)
    try:
        yield
    except BaseException as error:
        vars(error)[NOTE] = samples
        raise


def take_note(error: BaseException) -> list[Sample]:
    """The samples for which the device worked when it failed; none where it was for all that run."""
    return vars(error).pop(NOTE, [])


class Search:
    """Finds the sample that makes steps fail.

    After the first failure all rows start again, with the same tokens. A sample is a suspect until it has more tokens than it
    had when a step with it failed. If a step with suspects fails again, half of its samples run without the others, which
    wait; or those for which the device worked when it failed. Whoever fails alone is guilty; once none of those that run is a
    suspect, half of the suspects that wait join them. So nobody is guilty because another row has broken the device.

    Args:
      chunk: the most tokens of a step; a sample is no suspect any more so many after those that it had.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._marks: dict[Sample, int] = {}  # the most tokens of unfinished samples when a step with them failed
        self._suspects: list[Sample] = []
        self._group: set[Sample] | None = None  # who may run, as long as it searches
        self._num_alone = 0  # failures in a row with no sample

    @property
    def is_on(self) -> bool:
        """Whether some samples wait for others to be tried."""
        return self._group is not None

    def may_run(self, sample: Sample) -> bool:
        """Whether a sample need not wait."""
        return self._group is None or sample in self._group

    @property
    def is_complete(self) -> bool:
        """Whether whoever may run does so already, or is finished."""
        return self._group is not None and all(sample.is_running or sample.is_finished for sample in self._group)

    def failed(self, error: BaseException, running: Iterable[Sample]) -> list[Sample]:
        """A step has failed; returns the guilty sample, or none. Before the next step all must start again.

        Args:
          error: what it raised, perhaps with a note of `working_for`.
          running: the samples of the step.

        Raises:
          BaseException: the error, if steps fail again and again though no sample runs.
        """
        noted = take_note(error)
        samples = [sample for sample in dict.fromkeys((*running, *noted)) if not sample.is_finished]
        self._num_alone = 0 if samples else self._num_alone + 1
        if self._num_alone >= MOST_ALONE:
            raise error
        again = any(sample.generated <= self._marks.get(sample, -1) for sample in samples)
        self._marks |= {one: max(self._marks.get(one, 0), one.generated + self._chunk) for one in samples}
        if not again:
            return []
        if len(samples) == 1:
            self._forget(samples[0])
            return samples
        if self.is_on:  # others have come further than where they were suspects
            samples = [sample for sample in samples if sample in self._suspects] or samples
        self._suspects = list(dict.fromkeys((*self._suspects, *samples)))
        likely = [sample for sample in noted if sample in samples]
        self._group = set(likely if 0 < len(likely) < len(samples) else samples[: max(1, len(samples) // 2)])
        return []

    def passed(self) -> bool:
        """A step has not failed; returns whether samples that waited may run now."""
        self._num_alone = 0
        if not self._marks and not self.is_on:
            return False
        for sample in [one for one in self._marks if one.is_finished]:
            self._forget(sample)
        self._suspects = [one for one in self._suspects if one.generated <= self._marks[one]]
        if self._group is None or self._group.intersection(self._suspects):
            return False
        waiting = self._suspects[: (len(self._suspects) + 1) // 2]
        self._group = self._group.union(waiting) if waiting else None
        return True

    def _forget(self, sample: Sample) -> None:
        self._marks.pop(sample, None)
        self._suspects = [one for one in self._suspects if one is not sample]
