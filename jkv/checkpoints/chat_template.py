"""Renders the chat template of a tokenizer, in a process of its own whose time and memory are bounded.

A template is a program of whoever made the checkpoint. The sandbox of transformers lets it execute no Python, but it may loop
for ever, or build a number or text of any size inside of one operation, which nothing in this process could interrupt. So
`jkv/checkpoints/chat_worker.py` renders it, and every failure is a ValueError with the template's line.
"""

import json
import re
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jkv.checkpoints.json_files import printable
from jkv.errors import refused

SECONDS = 5.0  # for one conversation; real templates take less than a millisecond
START = 120.0  # seconds for the imports of the process on a busy machine
GRACE = 2.0  # seconds after which a process that did not end itself is killed
MAX_REPLY = 1 << 26  # characters
FRAME = re.compile(r'File "<template>", line (\d+)')

Conversation = Sequence[Mapping[str, Any]]
OWN, USER = "o", "u"  # marks of `jkv.checkpoints.marked_text`


class ChatText(str):
    """A rendered conversation, which knows what of it the template wrote.

    Args:
      text: the text.
      marks: a letter for each character: OWN for what the template wrote, and the tokenizer's special tokens in it; USER for
        what came from messages and variables. Another letter marks the results of operations that hide where a text comes from.
    """

    marks: str

    def __new__(cls, text: str, marks: str) -> "ChatText":
        self = super().__new__(cls, text)
        self.marks = marks
        return self

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # for pickle and copy
        return str(self), self.marks

    def after(self, mark: str) -> "ChatText":
        """What follows the first occurrence of a text that is in it."""
        begin = self.index(mark) + len(mark)
        return ChatText(self[begin:], self.marks[begin:])


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer; a context manager that ends its process.

    Args:
      tokenizer: of transformers, with a chat template.
      seconds: the limit for one conversation.

    Raises:
      ValueError: the tokenizer has several templates and none is the default.
    """

    def __init__(self, tokenizer: Any, seconds: float = SECONDS) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self.tokenizer, self.template = tokenizer, tokenizer.get_chat_template()
        self.tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        self.seconds = seconds
        self.lines: list[tuple[int, int]] = []  # of the template, and of the program compiled from it
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def __enter__(self) -> "ChatRenderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(self, conversation: Conversation, **options: Any) -> "ChatText":
        """The text of a conversation; `options` are the options of transformers' `apply_chat_template` that change the text.

        Raises:
          ValueError: the template fails, or takes too long or too much memory.
        """
        turns = [{name: value for name, value in turn.items() if value is not None} for turn in conversation]
        template = self.template_for(options.get("tools"))
        job: dict[str, Any] = {"template": template, "conversation": turns, "tokens": self.tokens, "options": options}
        job["seconds"] = self.seconds
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # told by the reply
        except BaseException:
            self.close()
            raise
        while True:
            reply = self.read_reply(self.seconds + GRACE)
            if "lines" not in reply:
                break
            self.lines = reply["lines"]
        if "text" in reply:
            return ChatText(reply["text"], reply["marks"])
        raise self.failure(reply["error"], reply["line"], template.count("\n") + 1)

    def template_for(self, tools: Any) -> str:
        """The template of a conversation; a tokenizer may have one of its own for conversations with tools."""
        return str(self.tokenizer.get_chat_template(tools=tools)) if tools else self.template

    def start(self) -> None:
        """Starts the process."""
        worker = str(Path(__file__).with_name("chat_worker.py"))
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 -- closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-P", worker],  # -P: the modules beside the worker hide no others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C ends this process, which then ends that one
        )
        weakref.finalize(self, end, self.process)
        reply = self.read_reply(START)
        if "missing" in reply:
            self.close()
            rule = f"A chat template needs jinja2: {reply['missing']}. Run: pip install jinja2."
            raise refused(rule, chat_template="unsupported")

    def read_reply(self, seconds: float) -> dict[str, Any]:
        """The next reply of the process. Kills it if there is none in time."""
        assert self.process is not None
        assert self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline(MAX_REPLY)
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else self.post_mortem()

    def post_mortem(self) -> dict[str, Any]:
        """Why the process ended: its stack was written when the time was over."""
        assert self.errors is not None
        errors, lines = self.errors, self.lines
        self.errors, process, self.process, self.lines = None, self.process, None, []
        assert process is not None
        status = end(process)
        with errors:
            errors.seek(0)
            text = errors.read(1 << 20)
        at = FRAME.search(text)
        before = [line for line, compiled in lines if at and compiled <= int(at[1])]
        if "Timeout" in text or status == -9:
            return {"error": f"it took more than {self.seconds:g} seconds", "line": max(before, default=None)}
        return {"error": f"its process ended with status {status}", "line": max(before, default=None)}

    def failure(self, error: str, line: int | None, num_lines: int) -> ValueError:
        """The error of a template."""
        place = f"line {line}" if line else f"lines 1 to {num_lines}, while it was compiled"
        return ValueError(
            f"The chat template of {self.name} must render a conversation; {place}: {printable(error)}. Correct "
            "chat_template in tokenizer_config.json (or chat_template.jinja), or leave the template out."
        )

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            end(self.process)
        if self.errors is not None:
            self.errors.close()
        self.process, self.errors, self.lines = None, None, []


def end(process: subprocess.Popen[str]) -> int:
    """Ends a process and returns its status."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except OSError:  # what was not yet written
            pass
    return process.wait()


def render_chats(tokenizer: Any, conversations: Sequence[Conversation], **options: Any) -> list[ChatText]:
    """The texts of conversations, as `ChatRenderer.render` returns them."""
    with ChatRenderer(tokenizer) as renderer:
        return [renderer.render(conversation, **options) for conversation in conversations]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))
