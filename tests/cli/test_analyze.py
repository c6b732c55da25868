"""`jkv analyze` as a newcomer meets it: files of traces, traces made now, and bad input."""

import json
import types

import pytest

import jkv
from jkv import cli
from jkv.cli.analyze import make_traces, read_traces
from jkv.evaluation.held_out import held_out

RIGHT = {"text": "<think>\n\na=1\n\na=1\n\n</think>\n\n\\boxed{a=1}", "answer": "a=1", "policy": "full"}
WRONG = {"text": "b=2\n\nc=3\n\n", "right": False, "policy": "r_kv 64"}


def run(capsys, *arguments):
    status = cli.main(["analyze", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def file(tmp_path):
    def write(name, *records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


def test_traces_of_files_are_grouped_by_policy_or_by_file(capsys, file):
    one, other = file("one.jsonl", RIGHT, WRONG, RIGHT), file("other.jsonl", {"text": "x"}, {"text": "y", "right": None})
    assert read_traces([one, other]) == {
        "full": ([RIGHT["text"]] * 2, [True, True]),
        "r_kv 64": ([WRONG["text"]], [False]),
        "other": (["x", "y"], [None, None]),
    }
    status, out, err = run(capsys, one, other)
    assert (status, err) == (0, "")
    assert run(capsys, one.parent) == (0, out, "")  # a folder of traces, such as `jkv eval` writes
    assert out.startswith("Words and signs; steps and sentences compared as tokens.")
    assert [line for line in out.splitlines() if line.startswith("##")] == ["## full", "## r_kv 64", "## other"]
    assert str(jkv.analyze([RIGHT["text"]] * 2, [True, True])) in out


def test_a_models_tokens_are_counted_where_one_is_named(capsys, file):
    status, out, err = run(capsys, file("one.jsonl", {"text": "a=1\n\n"}), "--model", "tiny-reasoner")
    assert status == 0
    assert "| tokens | 3.0 |" in out
    assert out.startswith("Tokens of tiny-reasoner;")
    assert "No trace is marked right or wrong" in err


def test_what_is_written_is_what_was_printed(capsys, file, tmp_path):
    status, out, err = run(capsys, file("one.jsonl", RIGHT, WRONG), "--out", tmp_path / "new" / "folder")
    assert status == 0
    names = {path.name: path for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(names) == {f"redundancy-one.{kind}" for kind in ("md", "json", "png")}
    assert names["redundancy-one.md"].read_text().split() == out.split()
    record = json.loads(names["redundancy-one.json"].read_text())
    assert record["groups"]["full"] == jkv.analyze([RIGHT["text"]], [True]).record()
    assert record["about"]["files"] == [str(tmp_path / "one.jsonl")]
    assert "redundancy-one.md and .json" in err
    assert "redundancy-one.png" in err


def test_traces_are_made_for_each_policy_and_budget(capsys, monkeypatch):
    asked = []

    def solve(model, problems, policy, **options):
        asked.append((policy, len(problems), options))
        return types.SimpleNamespace(text=[policy.name] * 2), [True, False]

    monkeypatch.setattr("jkv.evaluation.held_out.solve", solve)
    options = ("--problems", 2, "--policies", "full,streaming_llm", "--budgets", "64,96", "--page-size", 4)
    status, out, _ = run(capsys, *options, "--max-new-tokens", 160)
    assert status == 0
    heads = [line for line in out.splitlines() if line.startswith("##")]
    assert heads == ["## full", "## streaming_llm 64", "## streaming_llm 96"]
    knobs = {"max_new_tokens": 160, "page_size": 4, "max_running": 32}
    policies = (jkv.full(), jkv.streaming_llm(64), jkv.streaming_llm(96))
    assert asked == [(policy, 2, knobs) for policy in policies]
    assert out.count("right (1) | wrong (1)") == 3


def test_traces_made_now_are_marked_by_their_answers():
    chosen = {"model": "tiny-reasoner", "problems": 2, "policies": ["full"], "budgets": [], "settings": {}}
    traces, tokenizer = make_traces(chosen | {"max_new_tokens": None, "max_running": 32, "page_size": 4})
    texts, right = traces["full"]
    assert right == [f"\\boxed{{{problem.answer}}}" in text for problem, text in zip(held_out(2), texts, strict=True)]
    assert tokenizer.encode("a=") == [tokenizer.get_vocab()["a="]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "at least one trace"),
        (b"\n\n", "at least one trace"),
        (b'{"completion": "a"}\n', 'a JSON object with "text"; line 1 is not'),
        (b'{"text": "a"}\n\nno json\n', "line 3 is not"),
        (b'{"text": "\xff"}\n', "must be UTF-8 text"),
        (b'{"text": null}\n', "trace 1 of"),
        (b'{"text": "a", "right": "yes"}\n', "'yes'"),
        (b'{"text": "a", "policy": 3}\n', "trace 1 of"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_files_are_refused_in_one_line(capsys, tmp_path, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "")
    assert err.startswith("jkv: error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.jsonl",), "No such file"),
        (("empty",), "files that end in .jsonl; empty has none"),
        (("x.jsonl", "--problems", 3), "--problems is for traces that are made now"),
        (("x.jsonl", "--max-new-tokens", 3), "--max-new-tokens is for traces"),
        (("--problems", 0), "problems must be at least 1"),
        (("--policies", "foo"), "policy must be one of full"),
        (("--policies", ""), "at least one policy"),
        (("--policies", "r_kv"), "r_kv needs budget="),
        (("--policies", "r_kv", "--budgets", "25%"), "analyze takes budgets in slots"),
        (("--budgets", "x"), "A budget is a number of slots"),
        (("--encoder", "bert"), "encoder must be 'tokens'"),
        (("--encoder", "embedding"), "a table of a model"),
        (("--model", "no-such-model"), "tiny-reasoner"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else "",
)
def test_bad_options_are_refused_in_one_line_before_anything_is_made(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jkv.evaluation.held_out.solve", None)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty").mkdir()
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith("jkv: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_model_without_a_tokenizer_is_refused(capsys, file, tmp_path):
    status, _, err = run(capsys, file("one.jsonl", RIGHT), "--model", tmp_path)
    assert status == 2
    assert "has none. Leave it out to count words" in err
