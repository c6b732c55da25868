"""The bars that `generate`, `Rollout`, `jkv eval` and `jkv choose` show."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jkv.engine.outputs import Event

DRAW_SECONDS = 0.2  # between two drawings


@contextlib.contextmanager
def bar_of(total: int, unit: str, title: str, progress: bool | None) -> Iterator[Any]:
    """A bar (tqdm's) that goes away at its end; with `progress=None`, only the main thread shows one, in a terminal."""
    from tqdm.auto import tqdm

    is_main = threading.current_thread() is threading.main_thread()
    disable = not progress if progress is not None else (None if is_main else True)
    with tqdm(total=total, unit=unit, desc=title, disable=disable, leave=False) as bar:
        yield bar


def counts_texts(bar: Any) -> dict[str, Any]:
    """The option of `generate` that shows in a bar how many texts of its present run are finished."""
    finished, drawn = 0, 0.0

    def show(event: Event) -> None:
        nonlocal finished, drawn
        finished += bool(event.finish_reason)
        if time.perf_counter() - drawn > DRAW_SECONDS:
            drawn = time.perf_counter()
            bar.set_postfix_str(f"{finished} texts")

    return {} if bar.disable else {"on_tokens": show}


@contextlib.contextmanager
def progress_bar(num_samples: int, progress: bool | None, title: str = "generate") -> Iterator[Callable[[list[Event]], None]]:
    """A bar of finished samples, with tokens a second; its clock starts after the first turn, which compiles the programs."""
    began = drawn = 0.0
    num_tokens = 0
    with bar_of(num_samples, "sample", f"{title}: compiling", progress) as bar:

        def show(events: list[Event]) -> None:
            nonlocal began, drawn, num_tokens
            now = time.perf_counter()
            if began:
                num_tokens += sum(len(event.tokens) for event in events)
                bar.set_postfix_str(f"{num_tokens / max(now - began, 1e-9):,.0f} tokens/s", refresh=False)
            else:
                began = now
                bar.set_description(title, refresh=False)
                bar.reset(num_samples)
            bar.update(sum(bool(event.finish_reason) for event in events))
            if now - drawn > DRAW_SECONDS and not bar.disable:
                drawn = now
                bar.refresh()

        yield show
