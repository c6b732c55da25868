"""Faults that tests inject: device programs that fail, and presses of Ctrl-C at a chosen moment."""

import contextlib
import functools
import signal
import sys
from pathlib import Path

PACKAGE = str(Path(__file__).parents[2] / "jkv")
TRACED = ("programs.py", "mesh.py", "chunk_inputs.py")  # of the engine, called when something compiles


class DeviceError(Exception):
    """What an injected failure raises."""


class FailingPrograms:
    """An engine's programs, of which the `failing`-th call from now on raises.

    It raises before the program runs, or afterwards: then the program has the state that was donated to it, and nobody else.
    """

    def __init__(self, programs):
        self.programs, self.failing, self.is_before = programs, None, False

    def fail(self, count, is_before):
        """Lets the call after `count` others raise; None lets none."""
        self.failing, self.is_before = count, is_before

    def __getattr__(self, name):
        program = getattr(self.programs, name)

        def run(*arguments, **settings):
            is_failing = self.failing == 0
            if self.failing is not None:
                self.failing = None if is_failing else self.failing - 1
            if is_failing and self.is_before:
                raise DeviceError(name)
            out = program(*arguments, **settings)
            if is_failing:
                raise DeviceError(name)
            return out

        return run


def with_failing_programs(engine):
    """Replaces an engine's programs by ones that can fail."""
    failing = FailingPrograms(engine.runner.programs)
    engine.runner.programs = engine.runner.sharer.programs = failing
    return failing


class PoisonedPrograms:
    """An engine's programs, of which one fails whenever a sample that is poison runs: before it has run, or afterwards."""

    def __init__(self, engine, name, is_poison, is_before, error):
        self.engine, self.programs, self.name, self.is_poison = engine, engine.runner.programs, name, is_poison
        self.is_before, self.error, self.num_failures = is_before, error, 0

    def __getattr__(self, name):
        program = getattr(self.programs, name)
        return functools.partial(self.run, program) if name == self.name else program

    def run(self, program, *arguments, **settings):
        """Fails, or calls the program."""
        is_failing = any(self.is_poison(sample) for sample in self.engine.scheduler.running.values() if not sample.is_finished)
        self.num_failures += is_failing
        if is_failing and self.is_before:
            raise self.error
        out = program(*arguments, **settings)
        if is_failing:
            raise self.error
        return out


def with_poison(engine, name, is_poison, is_before=False, error=None):
    """Replaces an engine's programs by ones of which `name` fails while a sample that `is_poison` runs."""
    poisoned = PoisonedPrograms(engine, name, is_poison, is_before, DeviceError(name) if error is None else error)
    engine.runner.programs = engine.runner.sharer.programs = poisoned
    return poisoned


@contextlib.contextmanager
def ctrl_c(at, presses=1):
    """Presses Ctrl-C when the functions of the host loop were called `at` times, and at the `presses - 1` calls that follow.

    Yields a list of the names of the functions that were interrupted.
    """
    count, where = 0, []

    def profile(frame, event, argument):
        nonlocal count
        if not is_counted(frame, event):
            return
        count += 1
        if at < count <= at + presses:
            where.append(frame.f_code.co_qualname)
            signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield where
    finally:
        sys.setprofile(before)


def is_counted(frame, event):
    """Whether this is a call of the package's host loop; what compiling calls is left out, so that counts repeat."""
    folder, _, name = frame.f_code.co_filename.rpartition("/")
    is_host = folder in (PACKAGE, f"{PACKAGE}/engine") and name not in TRACED
    return event == "call" and is_host and frame.f_code.co_name not in ("handle", "__bool__", "listen")


def num_calls(function):
    """How many functions of the host loop a call of `function` calls."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += is_counted(frame, event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
