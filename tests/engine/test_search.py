"""Which sample makes steps fail: random batches on paper, in which some rows break every step at a token of theirs."""

import dataclasses

import numpy as np
import pytest

from jkv.engine.faults import Search, working_for

CHUNK, ROWS = 8, 8


@dataclasses.dataclass(eq=False)
class Row:
    """A sample on paper."""

    length: int
    breaks_at: int | None  # the token at which every step with it fails
    generated: int = 0
    reason: str = ""

    @property
    def is_finished(self):
        return bool(self.reason)


def run(rows, rng, transient=0.0):
    """Runs all rows; returns how many steps failed. A failed step may be noted as another row's work."""
    search, running, num_failed = Search(CHUNK), [], 0
    for _ in range(20_000):
        waiting = [row for row in rows if not row.is_finished and row not in running and search.may_run(row)]
        running = [row for row in running if not row.is_finished]
        running += waiting[: ROWS - len(running)]
        if not running:
            if all(row.is_finished for row in rows):
                return num_failed
            assert search.passed(), "rows wait for ever"
            continue
        broken = [row for row in running if row.breaks_at is not None and row.generated + CHUNK > row.breaks_at]
        if broken or rng.random() < transient:
            num_failed += 1
            error = OSError("the device")
            if rng.random() < 0.5:
                with pytest.raises(OSError, match="the device"), working_for([running[int(rng.integers(len(running)))]]):
                    raise error
            for row in search.failed(error, running):
                row.reason = "error"
            for row in running:
                row.generated = 0
            running = []
            continue
        for row in running:
            row.generated += min(CHUNK, row.length - row.generated)
            row.reason = "length" if row.generated == row.length else ""
        search.passed()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("transient", [0.0, 0.01])
def test_whoever_breaks_steps_is_found_and_nobody_else(transient):
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = [
            Row(int(rng.integers(1, 100)), int(rng.integers(0, 100)) if rng.random() < 0.2 else None)
            for _ in range(int(rng.integers(1, 25)))
        ]
        num_failed = run(rows, rng, transient)
        guilty = [row for row in rows if row.breaks_at is not None and row.breaks_at < -(-row.length // CHUNK) * CHUNK]
        found = [row for row in rows if row.reason == "error"]
        if not transient:
            assert found == guilty
            assert num_failed <= 8 * len(guilty)
        assert all(row in found for row in guilty)


def test_one_failure_ends_nobody():
    rows, search = [Row(20, None) for _ in range(3)], Search(CHUNK)
    assert search.failed(OSError(), rows) == []
    assert all(search.may_run(row) for row in rows)


def test_a_failure_beyond_the_last_one_is_another_one():
    """A row that has come further than at its last failure is no suspect."""
    row, search = Row(100, None), Search(CHUNK)
    for generated in (0, CHUNK + 1, 2 * CHUNK + 2):
        row.generated = generated
        assert search.failed(OSError(), [row]) == []
    row.generated = 0
    assert search.failed(OSError(), [row]) == [row]
