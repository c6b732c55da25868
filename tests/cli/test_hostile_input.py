"""Hostile command lines: whatever a file or a number is, one line says what is wrong, and the status is 2."""

import os
from pathlib import Path

import pytest

from jkv import cli

DEEP = 100_000
FILES = {
    "empty": b"",
    "blank": b"\n\n  \n",
    "binary": bytes(range(256)) * 40,
    "latin": b"caf\xe9 = 1\n",
    "utf16": "prompt = 'x'\n".encode("utf-16"),
    "null": b"\x00" * 5000,
    "deep_json": b'{"a": ' + b"[" * DEEP,
    "deep_toml": b"a = " + b"[" * DEEP,
    "deep_tables": b"a = " + b"{a=" * DEEP,
    "dotted": b".".join([b"a"] * 5_000) + b" = 1\n",
    "number": b'{"prompt": [' + b"9" * 6_000 + b"]}\n",
    "toml_number": b"problems = " + b"9" * 6_000,
    "list": b"[1, 2, 3]\n",
    "scalar": b"3\n",
    "nan": b'{"prompt": [NaN], "text": NaN, "about": NaN, "outcomes": NaN}\n',
    "odd_json": b'{"about": {}, "records": 3, "outcomes": [3], "prompt": {"a": 1}, "text": [1], "policy": 3}\n',
    "surrogate": b'{"prompt": "\\ud800", "text": "\\ud800", "policy": "\\ud800", "answer": "\\ud800"}\n',
    "control": b'{"prompt": "\\u0000\\u001b[2J", "text": "\\u0000", "policy": "a|b\\n<script>$x^{$"}\n',
}
PLACES = ("missing", "folder", "fifo", "unreadable", "device", "huge", *FILES)


@pytest.fixture
def place(tmp_path):
    """A function from a kind of file and an ending to its path."""

    def make(kind: str, ending: str) -> Path:
        path = tmp_path / f"{kind}{ending}"
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "unreadable":  # also for root, who may read any file: a link to itself
            path.symlink_to(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        elif kind in FILES:
            path.write_bytes(FILES[kind])
        return path

    return make


def assert_one_line(capsys, main, *arguments):
    """The status is 2, and all that is written is one line of at most 1,500 characters."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse, after its usage
        assert error.code == 2
        assert "error: " in capsys.readouterr().err.splitlines()[-1]
        return
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert status == 2, captured
    assert len(lines) == 1, captured.err[-2000:]
    assert lines[0].startswith(("jkv: error: ", "grpo: "))
    assert len(lines[0]) < 1_500
    assert captured.out == ""


READERS = {
    "prompts": (".txt", ("generate", "--max-new-tokens", 1, "--file")),
    "prompt lines": (".jsonl", ("generate", "--max-new-tokens", 1, "--file")),
    "configuration": (".toml", ("eval", "--config")),
    "data set": (".jsonl", ("eval", "--dataset")),
    "data set in columns": (".csv", ("eval", "--dataset")),
    "parquet": (".parquet", ("eval", "--dataset")),
    "traces": (".jsonl", ("analyze",)),
    "traces' configuration": (".toml", ("analyze", "--config")),
    "steering prompts": (".txt", ("steer", "--max-new-tokens", 1, "--out", os.devnull, "--file")),
    "steering vector": (".safetensors", ("generate", "a", "--policy", "seal", "--set")),
    "shape": (".toml", ("plan", "--device", "h100")),
    "bench shape": (".toml", ("bench", "cost", "--quick", "--model")),
    "page": (".md", ("policies", "--page")),
    "results page": (".md", ("bench", "tables", "--results", "results", "--page")),
}
RIGHT = {  # what is no error there
    ("prompts", "control"), ("prompts", "surrogate"), ("prompts", "list"), ("prompts", "scalar"), ("prompts", "null"),
    ("traces", "control"), ("traces", "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("reader", READERS)
def test_a_bad_file_is_refused_in_a_line(capsys, place, reader, kind):
    ending, arguments = READERS[reader]
    path = place(kind, ending)
    if reader == "steering vector":
        path = f"vector={path}"
    print(reader, kind)
    capsys.readouterr()
    assert_one_line(capsys, cli.main, *arguments, path)
