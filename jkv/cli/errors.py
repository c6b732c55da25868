"""How a command ends, whatever happens: one line for bad input, and no traceback of what a file or a number caused.

For `jkv` and `python -m research.grpo`.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from jkv.engine.interrupts import ending_at_interrupt, ignore_interrupts

BAD_INPUT = (ValueError, OSError, ImportError, MemoryError, RecursionError, OverflowError)
LONGEST = 1_200  # characters of the line


def run_safely(
    run: Callable[[], int],
    prefix: str,
    interrupted: str = "jkv: interrupted",
    *,
    returns_early: bool = False,
    is_program: bool = False,
) -> int:
    """The status of a command: its own; 2, after a line on the standard error, for bad input; 130 for Ctrl-C.

    Ctrl-C ends it by a KeyboardInterrupt, unless it `returns_early` by itself. Then the process ends, if it `is_program`, and
    later presses are ignored.
    """
    if sys.stdout is None:  # the next file that anything opens would take its place
        print(prefix, "The standard output must be open; it is closed. Send it to /dev/null.", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a text that the terminal cannot show is no reason to lose it
    try:
        with contextlib.nullcontext() if returns_early else ending_at_interrupt():
            status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `jkv generate ... | head`
        discard_output()
        return 0
    except KeyboardInterrupt:
        if is_program:
            ignore_interrupts()
        print(interrupted, file=sys.stderr)
        return 130
    except Exception as error:
        if not any(isinstance(one, BAD_INPUT) or is_of_the_device(one) for one in (error, error.__cause__)):
            raise
        discard_output()
        print(prefix, describe(error), file=sys.stderr)
        return 2


def is_of_the_device(error: BaseException | None) -> bool:
    """Whether JAX could not run a program, as where memory is not enough."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError)


def describe(error: Exception) -> str:
    """An error in one line, whatever a library raises."""
    text = " ".join(str(error)[: 2 * LONGEST].split()) or "there is not enough memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"  # without the number
    if isinstance(error, RecursionError):
        text = "the input is nested too deep"
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def discard_output() -> None:
    """Flushes the standard output; if it is full or its reader gone, so that the interpreter's last flush cannot fail."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
