"""The process that renders chat templates for `jkv.checkpoints.chat_template`: JSON lines in, JSON lines out.

It is started as a script, so that it imports no JAX. Its memory is bounded where the system can do that. A render that
takes too long is interrupted; one that does not return from an operation ends the process, with the stack on standard error.
"""

import faulthandler
import importlib.util
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

MEMORY = 1 << 29  # bytes beyond what the imports take
MAX_TEXT = 1 << 23  # characters
GRACE = 0.5  # seconds from the interrupt to the end of the process
TEMPLATES: dict[str, Any] = {}  # compiled


class TooLongError(BaseException):
    """The time is over. No Exception, which Jinja's compiler would ignore."""


def main() -> None:
    """Renders until standard input ends."""
    try:
        from jinja2 import sandbox
        from transformers.utils import chat_template_utils

        marked_text = load_beside("marked_text")
    except ImportError as error:
        reply(missing=str(error))
        return

    class Environment(marked_text.MarkingEnvironment):  # type: ignore[misc, name-defined]
        # The compiler then leaves these operations to the program, where they have a line.
        intercepted_binops = frozenset(sandbox.SandboxedEnvironment.default_binop_table)

        def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Any:
            template = TEMPLATES[source] = super().from_string(source, *args, **kwargs)
            reply(lines=template.debug_info)
            return template

    chat_template_utils.ImmutableSandboxedEnvironment = Environment  # type: ignore[attr-defined]
    limit_memory()
    reply(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        set_alarm(job["seconds"])
        try:
            options = job["tokens"] | job["options"]
            marked_text.MarkingTemplate.own_names = frozenset(job["tokens"]) - frozenset(job["options"])
            found = chat_template_utils.render_jinja_template(
                conversations=[job["conversation"]], chat_template=job["template"], **options
            )
            text = found[0][0]
            if len(text) > MAX_TEXT:
                raise ValueError(f"the text must have at most {MAX_TEXT:,} characters, got {len(text):,}")
            set_alarm(0)
        except BaseException as error:
            set_alarm(0)
            reply(error=message(error, job["seconds"]), line=line_of(error, TEMPLATES.get(job["template"])))
        else:
            reply(text=text, marks=marked_text.marks_of(text).decode())


def load_beside(name: str) -> Any:
    """A module in the folder of this script, without the package that it is in, which would import JAX."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_alarm(seconds: float) -> None:
    """Interrupts the render after these seconds, and ends the process if that is to no avail; 0 takes this back."""

    def interrupt(*_: Any) -> None:
        raise TooLongError

    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    if seconds:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """Limits the address space, which only Linux counts."""
    status = Path("/proc/self/statm")
    if status.exists():
        import resource

        pages = int(status.read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def reply(**fields: Any) -> None:
    """Writes a line."""
    print(json.dumps(fields), flush=True)


def message(error: BaseException, seconds: float) -> str:
    """An error in a line."""
    if isinstance(error, TooLongError):
        return f"it took more than {seconds:g} seconds"
    if isinstance(error, MemoryError):
        return f"it took more than {MEMORY >> 20} MiB"
    return f"{type(error).__name__}: {error}"[:500]


def line_of(error: BaseException, template: Any) -> int | None:
    """The line of the template; None if it failed before a line was reached."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    if isinstance(error, Exception):  # Jinja replaced the frames of its program by frames with the template's lines
        return getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return template.get_corresponding_lineno(lines[-1]) if lines and template is not None else None


if __name__ == "__main__":
    main()
