"""Random schedules of everything that may go wrong: `python -m tests.support.simulator --schedules 10000`.

A seed decides a schedule: requests submitted and cancelled, Ctrl-C at any call of a turn, several times, device programs that
fail, and in every second schedule repairs that fail, callbacks that raise or use the engine, other threads, sleeps, new
weights, small pools. Every request must have the
result that it has by itself, or the beginning of it and a reason that says so. Events must add up to the result. An engine that
cannot go on must say so. At the end no page, prefix or request may be left.
"""

import argparse
import collections
import dataclasses
import threading
import time

import jax
import numpy as np

import jkv
from jkv.engine.engine import Engine
from tests.support.faults import DeviceError, ctrl_c, with_failing_programs
from tests.support.mixes import Expected, assert_engine_is_consistent, draw_spec, make_engine

ROW = 2 * 2 * 16  # pages of a full row
NUM_ROWS = 3
POOLS = (ROW, 2 * ROW)  # of an engine of three rows; each size is a compiled shape
OPERATIONS = 40
CHANCES = {
    "submit": 0.2,
    "cancel": 0.05,
    "step": 0.35,
    "stream": 0.05,
    "interrupt": 0.12,
    "fail": 0.08,
    "sleep": 0.04,
    "update": 0.03,
    "finish": 0.02,
    "callback": 0.06,
}


class Schedule:
    """One engine under a random schedule, and what it has told so far."""

    def __init__(self, model, expected, seed, **options):
        self.rng, self.expected, self.counts = np.random.default_rng(seed), expected, collections.Counter()
        self.engine: Engine = make_engine(model, NUM_ROWS, int(self.rng.choice(POOLS)), return_trace=True, **options)
        self.programs = with_failing_programs(self.engine)
        self.specs = {}  # of open requests, by ticket
        self.events = collections.defaultdict(list)  # tokens that events carried, by ticket and sample
        self.is_updated, self.fails_repairs = False, seed % 2 == 0

    def run(self):
        """Runs the schedule and checks everything at its end; returns how often each operation ran."""
        names, chances = zip(*CHANCES.items(), strict=True)
        for _ in range(OPERATIONS):
            name = str(self.rng.choice(names, p=np.array(chances) / sum(chances)))
            self.counts[name] += 1
            getattr(self, name)()
            self.take_results()
        self.programs.fail(None, False)
        self.collect(self.engine.step())
        while not self.engine.is_idle:
            self.collect(self.engine.step())
        self.take_results()
        assert not self.specs, "a request is left"
        assert_engine_is_consistent(self.engine)
        self.engine.step()  # frees the rows of the last
        assert self.engine.runner.num_held_pages == 0
        assert not self.engine.scheduler.prefixes
        assert not self.engine.tickets
        return self.counts

    # Operations.

    def submit(self, on_tokens=None):
        """A random request."""
        if len(self.specs) < 3 * NUM_ROWS:
            spec, n = draw_spec(self.rng), int(self.rng.choice([1, 1, 2, 3]))
            self.specs[self.engine.submit(**spec.arguments, n=n, on_tokens=on_tokens)] = spec

    def cancel(self):
        """Ends a random request."""
        if self.specs:
            self.engine.cancel(int(self.rng.choice(list(self.specs))))

    def step(self):
        """A turn or a few."""
        for _ in range(int(self.rng.integers(1, 4))):
            self.collect(self.engine.step())

    def stream(self):
        """A stream that its reader leaves early."""
        for i, event in enumerate(self.engine.stream()):
            self.collect([event])
            if i == 3:
                break

    def interrupt(self):
        """Ctrl-C, any number of times, anywhere in a turn."""
        with ctrl_c(int(self.rng.integers(0, 400)), int(self.rng.integers(1, 5))) as where:
            try:
                self.collect(self.engine.step())
            except KeyboardInterrupt:
                self.counts["interrupted"] += 1
        self.counts["presses"] += len(where)

    def fail(self):
        """A device program fails in a step or another call, which is repaired; if that fails, the engine asks for a reset."""
        self.programs.fail(int(self.rng.integers(0, 6)), bool(self.rng.integers(2)))
        if self.fails_repairs and self.rng.integers(2):
            self.engine.runner.wake = no_pool
        try:
            for _ in range(3):
                self.collect(self.engine.step())
            self.counts["failed"] += self.programs.failing is None
            if self.rng.integers(2):
                self.programs.fail(0, bool(self.rng.integers(2)))
                self.engine.sleep()
                self.engine.wake()
        except DeviceError:
            self.counts["told"] += 1
            vars(self.engine.runner).pop("wake", None)
            for call in (
                self.engine.step,
                self.engine.sleep,
                lambda: self.engine.submit([1], max_new_tokens=3),
                self.engine.run,
            ):
                assert raised(call, RuntimeError, "reset()")
            self.take_results()  # what is finished stays
            self.engine.reset()
        vars(self.engine.runner).pop("wake", None)
        self.programs.fail(None, False)

    def sleep(self):
        """The pool is freed for a while."""
        self.engine.sleep()
        if self.specs and self.engine.scheduler.has_unfinished:
            assert raised(self.engine.step, ValueError, "wake()")
        self.engine.wake()

    def update(self):
        """Equal weights of a new version: samples that are started again afterwards tell their tokens anew."""
        self.engine.update(jax.tree.map(lambda x: x.copy(), self.engine.model.params))
        self.is_updated = True

    def finish(self):
        """Everything to its end."""
        self.engine.run(self.collect)

    def callback(self):
        """A request whose callback raises, uses the engine, or lets another thread use it."""
        kind = int(self.rng.integers(4))

        def on_tokens(event):
            if kind == 0:
                raise OSError("the socket is closed")
            if kind == 1:
                assert raised(self.engine.step, RuntimeError, "A callback may submit, extend and cancel")
            if kind == 2:
                self.engine.cancel(event.ticket)
            if kind == 3:
                problems = []
                thread = threading.Thread(target=lambda: problems.append(raised(self.engine.step, RuntimeError, "one thread")))
                thread.start()
                thread.join()
                assert problems == [True]

        self.submit(on_tokens)

    # Checks.

    def collect(self, events):
        """Adds up the events."""
        for event in events:
            self.events[event.ticket, event.sample] += event.tokens

    def take_results(self):
        """Checks the finished requests."""
        self.collect(self.engine.outputs.take())
        done = [ticket for ticket, group in self.engine.tickets.items() if all(sample.is_finished for sample in group)]
        for ticket in done:
            spec, out = self.specs.pop(ticket), self.engine.result(ticket)
            self.counts["results"] += 1
            for sample, (length, reason) in enumerate(zip(out.lengths.tolist(), out.finish_reason, strict=True)):
                tokens, log_probs, ended = self.expected(spec, sample)
                got, told = out.tokens[sample, :length].tolist(), self.events.pop((ticket, sample), [])
                assert got == tokens[:length], (ticket, sample, reason)
                np.testing.assert_allclose(out.logprobs[sample, :length], log_probs[:length], atol=1e-4)
                assert reason in ("cancelled", "error") or (length, reason) == (len(tokens), ended), (reason, ended, length)
                error = out.samples[sample].error
                assert not isinstance(error, AssertionError), error
                ended_early = reason in ("cancelled", "error")  # a traced sample that restarted has what its trace has
                assert told == got or (self.is_updated and told[len(told) - length :] == got) or ended_early, (told, got)


def no_pool():
    """A repair that fails."""
    raise DeviceError("wake")


def raised(call, error, text):
    """Whether a call raises an error whose message has a text."""
    try:
        call()
    except error as problem:
        return text in str(problem)
    return False


def simulate(model, expected, seeds):
    """Runs schedules; returns how often each operation ran."""
    counts = collections.Counter()
    for seed in seeds:
        try:
            counts += Schedule(model, expected, seed).run()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
    return counts


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count up")
    options = parser.parse_args()
    model, began = dataclasses.replace(jkv.testing.tiny_model()), time.perf_counter()
    expected, total = Expected(model), collections.Counter()
    for start in range(options.seed, options.seed + options.schedules, 100):
        total += simulate(model, expected, range(start, min(start + 100, options.seed + options.schedules)))
        print(f"{start + 100 - options.seed} schedules, {time.perf_counter() - began:.0f} s: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
