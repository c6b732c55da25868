"""How much of the source a stranger must read to follow one step: `python -m tests.support.reading`.

Each line is a thing that the library does. Its files, functions and lines are those that a profiler saw entered: all lines of a
file in which any function ran, and the lines of the functions themselves.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import jax
from starlette.testclient import TestClient

import jkv
import pallas_kernels
from jkv.serving.app import make_app

FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (jkv, pallas_kernels))
PROMPT = "b=3;c=7;d=b*c;?d"
SIZES = {"max_running": 2, "max_slots": 64, "page_size": 4, "chunk": 1}


class Read(NamedTuple):
    """What a call entered: its files with their lines, its functions with theirs."""

    files: dict[str, int]
    functions: dict[CodeType, int]

    def __str__(self) -> str:
        return (
            f"{len(self.files):>3} files of {sum(self.files.values()):>6,} lines, "
            f"{len(self.functions):>4} functions of {sum(self.functions.values()):>6,} lines"
        )


class Reader:
    """Notes the functions of the library that all threads enter which it has seen start; `seen` may be cleared."""

    def __init__(self) -> None:
        self.seen: set[CodeType] = set()

    def __enter__(self) -> "Reader":
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def profile(self, frame: Any, event: str, _: Any) -> None:
        """Notes a call."""
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            self.seen.add(frame.f_code)

    def result(self) -> Read:
        """What was entered since `seen` was cleared."""
        named = {code for code in self.seen if not code.co_name.startswith("<")}  # comprehensions are in their function
        files = sorted({code.co_filename for code in named})
        return Read(
            {file: len(Path(file).read_text().splitlines()) for file in files}, {code: num_lines(code) for code in named}
        )


def read(call: Callable[[], Any]) -> Read:
    """What a call enters."""
    with Reader() as reader:
        call()
    return reader.result()


def num_lines(code: CodeType) -> int:
    """The lines of a function."""
    return len(inspect.getsourcelines(code)[0])


def running(policy: jkv.Policy, **settings: Any) -> jkv.Engine:
    """An engine with one row that decodes."""
    engine = jkv.Engine(jkv.testing.tiny_model(), **SIZES, **settings)
    engine.submit([5, 6, 7], policy=policy, max_new_tokens=40, stop_ids=())
    for _ in range(4):
        engine.step()
    return engine


def first_step() -> Read:
    """The first step of a new engine, with all that is traced."""
    jax.clear_caches()
    engine = jkv.Engine(jkv.testing.tiny_model(), **SIZES)
    engine.submit([5, 6, 7], max_new_tokens=4, stop_ids=())
    return read(engine.step)


def with_compactions() -> Read:
    """A whole generation with R-KV and its trace, compiled."""
    model, policy = jkv.testing.tiny_model(), jkv.r_kv(budget=16, interval=8, window=4)

    def call() -> None:
        jkv.generate(model, [[5, 6, 7]], policy=policy, max_new_tokens=40, stop_ids=(), return_trace=True, progress=False)

    call()
    return read(call)


def request() -> Read:
    """One completion over HTTP, of a server that is warm."""
    engine = jkv.Engine(jkv.load("tiny-reasoner"), **SIZES | {"max_slots": 256})
    with Reader() as reader, jkv.Service(engine) as service, TestClient(make_app(service)) as client:
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        reader.seen.clear()
        client.post("/v1/completions", json=body)
        return reader.result()


LINES: dict[str, Callable[[], Read]] = {
    "a decode step, one row, full cache": lambda: read(running(jkv.full()).step),
    "the first step, with tracing": first_step,
    "generate with R-KV, compactions and a trace": with_compactions,
    "a warm POST /v1/completions": request,
}


def main() -> None:
    """Prints the table."""
    for name, measure in LINES.items():
        print(f"{name:<45}{measure()}", flush=True)


if __name__ == "__main__":
    main()
