"""Many random operations on engines with NaN-poisoned pools: `python -m tests.support.soak --operations 100000`.

Requests are submitted, cancelled, swapped out and finished at random. Nothing may leak, no freed page may be read (its NaN
would end a request), reference counts must be exact, and every request must have the result that it has by itself.
"""

import argparse
import time

import numpy as np

import jkv
from jkv.engine.engine import Engine
from tests.support.mixes import Expected, Spec, assert_engine_is_consistent, draw_spec, make_engine

ROW = 2 * 2 * 16  # pages of a full row
SHAPES = {1: ROW, 3: ROW, 8: ROW + ROW // 4}  # rows -> pages


def soak(engine: Engine, expected: Expected, rng: np.random.Generator, operations: int, check_every: int) -> dict[str, int]:
    """Runs random operations on one engine until it is empty; raises at the first error."""
    counts = {"submit": 0, "cancel": 0, "step": 0, "result": 0, "check": 0}
    open_requests: dict[int, tuple[Spec, set[int]]] = {}  # ticket -> the request, and its finished samples
    for i in range(operations):
        choice = rng.random()
        if choice < 0.25 and len(open_requests) < 3 * engine.capacity.max_running + 4:
            spec, n = draw_spec(rng), int(rng.choice([1, 1, 1, 2, 4]))
            open_requests[engine.submit(**spec.arguments, n=n)] = (spec, set())
            counts["submit"] += 1
        elif choice < 0.3 and open_requests:
            engine.cancel(int(rng.choice(list(open_requests))))
            counts["cancel"] += 1
        else:
            for event in engine.step():
                if event.finish_reason and event.ticket in open_requests:
                    open_requests[event.ticket][1].add(event.sample)
            counts["step"] += 1
            counts["result"] += take_results(engine, expected, open_requests)
        if i % check_every == 0:
            assert_engine_is_consistent(engine)
            counts["check"] += 1
    engine.run()
    for ticket in list(open_requests):
        check_result(engine, expected, ticket, open_requests.pop(ticket)[0])
    assert_engine_is_consistent(engine)
    assert int(engine.runner.state.cache.pool.free_top) == engine.num_pages
    assert not engine.scheduler.prefixes
    assert not engine.tickets
    return counts


def take_results(engine: Engine, expected: Expected, open_requests: dict[int, tuple[Spec, set[int]]]) -> int:
    """Checks and removes the requests whose samples are all finished."""
    done = [ticket for ticket, (_, ended) in open_requests.items() if len(ended) == len(engine.tickets[ticket])]
    for ticket in done:
        check_result(engine, expected, ticket, open_requests.pop(ticket)[0])
    return len(done)


def check_result(engine: Engine, expected: Expected, ticket: int, spec: Spec) -> None:
    """A finished request has the result that it has by itself, a cancelled one the beginning of that."""
    out = engine.result(ticket)
    for sample, (length, reason) in enumerate(zip(out.lengths, out.finish_reason, strict=True)):
        tokens, _, ended = expected(spec, sample)
        assert out.tokens[sample, :length].tolist() == tokens[:length]
        assert reason == "cancelled" or (length, reason) == (len(tokens), ended), (reason, ended)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=20, help="operations between checks of the whole pool")
    options = parser.parse_args()
    model = jkv.testing.tiny_model()
    expected, rng = Expected(model), np.random.default_rng(options.seed)
    for rows, num_pages in SHAPES.items():
        engine, began = make_engine(model, rows, num_pages), time.perf_counter()
        counts = soak(engine, expected, rng, options.operations // len(SHAPES), options.check_every)
        stats = engine.stats
        summary = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"{rows} rows, {num_pages} pages: {summary}; {stats.tokens} tokens, {stats.forks} forks, "
            f"{stats.preemptions} preemptions in {time.perf_counter() - began:.0f} s: nothing leaked, nothing freed was read",
            flush=True,
        )


if __name__ == "__main__":
    main()
