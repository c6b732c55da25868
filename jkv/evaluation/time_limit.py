"""A time limit that is always kept: work is done in a process of its own, which is killed when its time is over.

The process is started at the first question and reused until it is killed or ends, so an ordinary question costs what sending
it through a pipe costs. Works in any thread.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # for its imports, on a busy machine


class TimeLimited:
    """A process that answers questions, one JSON line each; None where it takes longer than the limit, or crashes.

    Args:
      script: the file that it runs. It prints "ready", then an answer for each line; the last item of a question is the limit.
      seconds: the limit of one question.
    """

    def __init__(self, script: Path, seconds: float) -> None:
        self.script, self.seconds = script, seconds
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # a fork has no share in its parent's process
        self._lock = threading.Lock()

    def ask(self, *question: Any) -> Any:
        """The answer to a question; None if there is none in time.

        Raises:
          RuntimeError: the process cannot start.
        """
        with self._lock:
            try:
                process = self._running()
                answer = self._send(process, json.dumps([*question, self.seconds]), self.seconds)
            except BaseException:  # Ctrl-C included: the answer to come would be taken for the next one's
                self._stop()
                raise
            if answer is None:
                self._stop()
            return None if answer is None else json.loads(answer)

    def close(self) -> None:
        """Ends the process; the next question starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> "subprocess.Popen[str]":
        """The process, started if there is none."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._stop()
        path = os.pathsep.join(entry for entry in sys.path if entry)  # what this process imports, it imports
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(self.script)],  # -P: files beside the script are no modules of its own
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": path},
        )
        self._owner = os.getpid()
        atexit.register(self.close)
        if self._send(self._process, None, START_SECONDS) != "ready":
            raise RuntimeError(f"{self.script.name} cannot start: run {sys.executable} -P {self.script} to see why.")
        return self._process

    def _send(self, process: "subprocess.Popen[str]", line: str | None, seconds: float) -> str | None:
        """The next line of the process, after one is sent to it; None where it is killed, or has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                if line is not None:
                    process.stdin.write(line + "\n")
                    process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # an answer that came just in time is one, but of a process that is gone
            if is_late.is_set():
                self._stop()
        return answer.strip() if answer.endswith("\n") else None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a line that was never read
                    pipe.close()
