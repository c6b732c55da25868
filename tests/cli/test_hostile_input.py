"""Hostile command lines: whatever a file or a number is, one line says what is wrong, and the status is 2."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jkv import cli
from jkv.checkpoints import loading as checkpoint
from jkv.cli.bench import whole
from jkv.cli.generate import for_terminal
from jkv.cli.options import counts
from research.bench import device
from research.bench.__main__ import TABLES
from research.evaluation import formats, gpu_plan
from research.grpo import __main__ as grpo
from research.tasks import tune
from tests.support import commands

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "configs/experiments/grpo-counting.toml"
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
    """The status is 2, and the last of what is written is one line of at most 1,500 characters; only transformers may warn."""
    with contextlib.suppress(SystemExit):  # argparse, after its usage
        status = main([str(argument) for argument in arguments])
        assert status == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert not any("Traceback" in line for line in lines)
    assert "error: " in lines[-1] or lines[-1].startswith("grpo: ")
    assert len(lines[-1]) < 6_000  # argparse repeats a value
    assert not any("error: " in line for line in lines[:-1])


TEXT = ("missing", "folder", "fifo", "unreadable", "device", "huge", "empty", "blank", "binary", "latin", "utf16")
READERS = {  # by what is read: the ending, the command, and the kinds of files that are right
    "prompts": (".txt", ("generate", "--max-new-tokens", 1, "--file"), set(PLACES) - set(TEXT)),
    "prompt lines": (".jsonl", ("generate", "--max-new-tokens", 1, "--file"), {"control"}),
    "configuration": (".toml", ("eval", "--config"), {"empty", "blank"}),
    "data set": (".jsonl", ("eval", "--dataset"), set()),
    "data set in columns": (".csv", ("eval", "--dataset"), set()),
    "parquet": (".parquet", ("eval", "--dataset"), set()),
    "traces": (".jsonl", ("analyze",), {"control", "surrogate"}),
    "traces' configuration": (".toml", ("analyze", "--config"), {"empty", "blank"}),
    "steering prompts": (".txt", ("steer", "--max-new-tokens", 1, "--out", os.devnull, "--file"), set(PLACES) - set(TEXT)),
    "steering vector": (".safetensors", ("generate", "a", "--policy", "seal", "--set"), set()),
    "query statistics": (".safetensors", ("generate", "a", "--policy", "tri_attention", "--budget", 64, "--set"), set()),
    "calibration text": (
        ".txt",
        ("calibrate", "--tokens", 1, "--out", os.devnull, "--text"),
        set(PLACES) - set(TEXT) | {"blank"},
    ),
    "foresight's text": (".txt", ("foresee", "--out", os.devnull, "--text"), set()),
    "foresight's network": (".safetensors", ("generate", "a", "--policy", "foresight", "--budget", 64, "--set"), set()),
    "recall's text": (".txt", ("recall", "--passages", 100_000, "--text"), set()),
    "recall's configuration": (".toml", ("recall", "--passages", 2**40, "--config"), set()),
    "text to choose by": (".txt", ("choose", "tiny-reasoner", "--length", 100_000, "--texts"), set()),
    "problems to choose by": (".jsonl", ("choose", "tiny-reasoner", "--problems"), set()),
    "probe's configuration": (".toml", ("probe", "--config"), set()),
    "shape": (".toml", ("plan", "--device", "h100"), set()),
    "bench shape": (".toml", ("bench", "cost", "--quick", "--model"), set()),
    "page": (".md", ("policies", "--page"), set()),
    "results page": (".md", ("bench", "tables", "--results", "results", "--page"), {*FILES, "folder"} - {"binary", "latin"}),
    "course": (".toml", (), set()),
}
EACH_DAY = ("fifo", "device", "deep_toml", "deep_json", "number", "odd_json")  # of each reader; the others by name
CASES = [
    pytest.param(
        reader, kind, marks=() if kind in EACH_DAY or reader in ("configuration", "prompt lines") else pytest.mark.slow
    )
    for reader, (_, _, right) in READERS.items()
    for kind in PLACES
    if kind not in right
]


@pytest.mark.parametrize(("reader", "kind"), CASES)
def test_a_bad_file_is_refused_in_a_line(capsys, place, reader, kind):
    ending, arguments, _ = READERS[reader]
    path = place(kind, ending)
    main = grpo.main if reader == "course" else commands.main
    setting = {"steering vector": "vector=", "query statistics": "statistics=", "foresight's network": "network="}.get(reader)
    assert_one_line(capsys, main, *arguments, f"{setting}{path}" if setting else path)


NONSENSE = [
    ("generate", "a", "-n", 2**64),
    ("generate", "a", "-n", "9" * 5_000),
    ("generate", "a", "--max-new-tokens", 2**70),
    ("generate", "a", "--max-running", 2**40),
    ("generate", "a", "--page-size", 2**40),
    ("generate", "a", "--page-size", "nan"),
    ("generate", "a", "--temperature", "nan"),
    ("generate", "a", "--temperature", "1e400"),
    ("generate", "a", "--top-p", "-inf"),
    ("generate", "a", "--top-k", 2**31),
    ("generate", "a", "--seed", -1),
    ("generate", "a", "--stop-strings", ""),
    ("generate", "a", "--stop-strings", "x" * 2_000),
    ("generate", "a" * 10**6),
    ("generate", "\ud800"),
    ("generate", "a", "--policy", "r_kv", "--budget", 2**80),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "window=" + "9" * 5_000),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "importance=1e999"),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "importance=1e300"),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "pool=2147483647"),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "window=" + "(" * 100_000),
    ("generate", "a", "--policy", "r_kv", "--budget", 64, "--set", "window=9**9**9"),
    ("generate", "a", "--policy", "skip_kv", "--budget", 64, "--set", "keywords='wait'"),
    ("generate", "a", "--model", "\0"),
    ("generate", "a", "--model", "x" * 5_000),
    ("eval", "--problems", 0),
    ("eval", "--budgets", "nan%"),
    ("eval", "--budgets", "9" * 5_000),
    ("eval", "--pass-at", "1,x"),
    ("eval", "--samples", 2**62),
    ("eval", "--policies", "a|b"),
    ("eval", "--resume"),
    ("analyze", "--problems", -1),
    ("analyze", "--encoder", "sentence:"),
    ("analyze", "--policies", ","),
    ("steer", "--problems", 0, "--out", os.devnull),
    ("steer", "--temperature", "inf", "--out", os.devnull),
    ("foresee", "--hidden", 2**40, "--out", os.devnull),
    ("foresee", "--passages", 2**40, "--out", os.devnull),
    ("calibrate", "--problems", 2**40, "--out", os.devnull),
    ("recall", "--passages", 2**40),
    ("recall", "--policies", ","),
    ("recall", "--budgets", "25% each"),
    ("recall", "--recent", -1),
    ("plan", "tiny-reasoner", "--device", "h100", "--length", 2**70),
    ("plan", "tiny-reasoner", "--device", "h100", "--memory", "nan"),
    ("plan", "tiny-reasoner", "--device", "h100", "--memory", "inf"),
    ("plan", "tiny-reasoner", "--device", "h100", "--bandwidth", "-1"),
    ("plan", "tiny-reasoner", "--device", "h100", "--batch", 10**30),
    ("plan", "tiny-reasoner", "--device", "h100", "--num-devices", 10**30),
    ("plan", "tiny-reasoner", "--device", "h100", "--page-size", 10**30),
    ("plan", "tiny-reasoner", "--device", "h100", "--memory-share", "nan"),
    ("plan", "tiny-reasoner", "--device", "h100", "--dtype", "float0"),
    ("plan", "tiny-reasoner", "--device", "\0"),
    ("bench", "throughput", "--scale", "nan"),
    ("bench", "throughput", "--scale", "1e300"),
    ("bench", "throughput", "--requests", 10**30),
    ("bench", "papers", "--scale", "inf"),
    ("bench", "cost", "--lengths", "0"),
    ("bench", "cost", "--batches", ","),
    ("bench", "cost", "--budgets", "9" * 5_000),
    ("bench", "cost", "--rounds", -1),
    ("bench", "peers", "--contenders", "nobody"),
    ("bench", "rollouts", "--models", "none"),
    ("bench", "eviction", "--budget", 10**30),
]


@pytest.mark.parametrize(
    "arguments", NONSENSE, ids=lambda arguments: " ".join(map(str, arguments))[:70].encode("unicode_escape").decode()
)
def test_a_nonsense_value_is_refused_in_a_line(capsys, arguments):
    assert_one_line(capsys, commands.main, *arguments)


def commands_with_numbers():
    """Each command, as words, with its options that take whole numbers or lists of them."""
    required = {"--out": os.devnull, "--config": "none.toml"}
    parser = cli.make_parser()
    for name, command in cli.commands_of(parser).items():
        for words, one in [([name], command), *(([name, inner], own) for inner, own in cli.commands_of(command).items())]:
            needed = [word for action in one._actions if action.required for word in required_words(action, required)]
            for action in one._actions:
                if action.type in (int, whole, counts):
                    yield [*words, *needed], action.option_strings[-1]


def required_words(action, known):
    """What a required option or argument is given."""
    return [action.option_strings[0], known[action.option_strings[0]]] if action.option_strings else ["tiny-reasoner"]


def test_no_whole_number_of_any_command_is_without_a_limit(capsys, monkeypatch):
    """Nothing runs: the numbers are looked at before."""
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    tried = [*commands_with_numbers()]
    assert len(tried) > 60
    for words, option in tried:
        if option in ("--seed", "--shuffle-seed"):
            continue
        assert_one_line(capsys, commands.main, *words, option, 10**30)


FILES_WITH_NUMBERS = {
    "eval": 'policies = ["full"]\nproblems = {}',
    "recall": "passages = {}",
    "analyze": 'policies = ["full"]\nmax_running = {}',
    "probe": 'policies = ["r_kv"]\n[texts.chains]\nbudgets = [48]\ncount = 1\npasses = [0]\nsteps = {}',
}


@pytest.mark.parametrize("command", FILES_WITH_NUMBERS)
def test_no_whole_number_of_a_file_is_without_a_limit(capsys, tmp_path, monkeypatch, command):
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    (tmp_path / "x.toml").write_text(FILES_WITH_NUMBERS[command].format(10**15))
    assert_one_line(capsys, commands.main, command, "--config", tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (formats.main, ("--texts", 10**30)),
        (gpu_plan.main, ("--problems", 10**30, "--out", "none")),
        (tune.main, ("tiny-reasoner", "--rows", 10**30, "--out", "none")),
        (device.main, ("--batches", 10**30)),
    ],
    ids=["formats", "gpu_plan", "tune", "device"],
)
def test_no_whole_number_of_a_module_is_without_a_limit(capsys, main, arguments):
    assert_one_line(capsys, main, *arguments)
    assert not Path("none").exists()


def test_a_course_has_limits_too(capsys, tmp_path):
    text = COURSE.read_text()
    (tmp_path / "x.toml").write_text(re.sub(r"(?m)^prompts = \d+", f"prompts = {10**15}", text))
    assert (tmp_path / "x.toml").read_text() != text
    assert_one_line(capsys, grpo.main, tmp_path / "x.toml")
    assert_one_line(capsys, grpo.main, COURSE, "--steps", 10**30)


@pytest.mark.parametrize(
    "record", ['{"about": {}}', '{"about": 3}', '{"about": {}, "records": 7}', '{"about": [], "records": [3]}']
)
def test_a_record_of_something_else_is_refused_by_its_name(capsys, tmp_path, record):
    (tmp_path / "p.md").write_text("<!-- bench cost -->\n<!-- /bench cost -->\n")
    for bench in TABLES:
        folder = tmp_path / bench
        folder.mkdir()
        (folder / f"{bench}.json").write_text(record)
        assert commands.main(["bench", "tables", "--results", str(folder), "--page", str(tmp_path / "p.md")]) == 2
        error = capsys.readouterr().err
        assert f"{folder / bench}.json must be a record of the benchmark {bench}" in error


def test_a_record_or_a_page_that_is_too_large_is_not_read(capsys, tmp_path):
    page, record = tmp_path / "p.md", tmp_path / "cost.json"
    page.write_text("")
    for path in (record, page):
        with path.open("wb") as file:
            file.truncate(900_000_000)
        assert commands.main(["bench", "tables", "--results", str(tmp_path), "--page", str(page)]) == 2
        assert f"{path} must have at most 67,108,864 bytes" in capsys.readouterr().err
        record.write_bytes((ROOT / "results" / "cost.json").read_bytes())


@pytest.mark.parametrize(
    "options",
    [("--seeds", "9" * 5_000), ("--seeds", 2**40), ("--seeds", ""), ("--arms", "no\narm"), ("--steps", -1), ("--steps", "x")],
    ids=lambda options: str(options)[:30],
)
def test_a_nonsense_value_of_a_course_is_refused_in_a_line(capsys, options):
    assert_one_line(capsys, grpo.main, COURSE, *options)


OUTPUTS = [
    (commands.main, ("generate", "a", "--max-new-tokens", 1, "--out")),
    (commands.main, ("generate", "a", "--max-new-tokens", 1, "--html")),
    (commands.main, ("eval", "--problems", 1, "--out")),
    (commands.main, ("analyze", "--problems", 1, "--out")),
    (commands.main, ("steer", "--problems", 1, "--out")),
    (commands.main, ("plan", "tiny-reasoner", "--device", "h100", "--out")),
    (commands.main, ("bench", "cost", "--quick", "--out")),
    (grpo.main, (COURSE, "--out")),
    (grpo.main, (COURSE, "--checkpoints")),
]


@pytest.mark.parametrize(
    ("main", "arguments"),
    OUTPUTS,
    ids=lambda value: " ".join(Path(str(word)).name for word in value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("kind", ["below a file", "a pipe that nobody reads", "a name that is too long", "no folder"])
def test_a_target_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, main, arguments, kind):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo")
    targets = {
        "below a file": "file/x/y",
        "a pipe that nobody reads": "fifo",
        "a name that is too long": "x" * 300,
        "no folder": "/proc/none/x",
    }
    target = targets[kind]
    assert_one_line(capsys, main, *arguments, tmp_path / target)


@pytest.mark.parametrize(
    ("redirection", "status", "words"),
    [
        (">&-", 2, "must be open; it is closed"),
        ("> /dev/full", 2, "No space left"),
        ("2>&-", 0, ""),
        ("| true", 0, ""),
        ("< /dev/null", 0, ""),
    ],
)
def test_an_output_that_is_closed_full_or_not_read_ends_without_a_traceback(redirection, status, words):
    if redirection == "> /dev/full" and not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    command = f"set -o pipefail; {sys.executable} -m jkv policies {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stderr.count("\n") == (1 if words else 0), done.stderr


def test_a_terminal_that_cannot_show_a_text_gets_its_code_points():
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "jkv", "policies", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_gets_no_codes_of_a_text(monkeypatch):
    text = "a\tb\x1b]0;title\x07\n\u202ec"
    assert for_terminal(text) == text  # a file or a pipe gets it as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert for_terminal(text) == "a    b␛]0;title␇\n<U+202E>c"
