"""The command line as a newcomer meets it."""

import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jkv
from jkv import cli
from jkv.checkpoints import loading as checkpoint
from jkv.cli.generate import show_text, shown_text
from jkv.cli.inputs import expand_flags, read_prompts

ROOT = Path(__file__).parents[2]
PROBLEM = "b=3;c=7;d=b*c;e=d+b;f=e*c;g=f-d;?g"


def run(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_prompt_prints_its_reasoning_and_a_line_of_statistics_and_writes_a_page_of_what_was_kept(capsys, tmp_path):
    target = tmp_path / "kept.html"
    options = ("--policy", "r_kv", "--budget", 96, "--set", "interval=16", "-n", 2, "--html", target)
    status, out, err = run(capsys, "generate", PROBLEM, *options)
    assert status == 0
    first, *texts = out.split(f"--- {PROBLEM}\n")
    assert first == ""
    assert len(texts) == 2
    assert all(text.startswith("<think>") and "</think>" in text for text in texts)
    assert any(line.startswith("[r_kv] ") for line in err.splitlines())  # transformers may warn before it
    assert "finished by stop" in err
    assert "tokens evicted in" in err
    page = target.read_text(encoding="utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["title"] == "Kept tokens, r_kv"
    (samples,) = data["panels"]
    assert [sample["sample"] for sample in samples] == [0, 1]
    assert all("".join(sample["pieces"]).startswith(PROBLEM) for sample in samples)
    assert all(sample["ticks"] for sample in samples)  # something was evicted


def test_a_file_of_prompts_becomes_json_lines(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in (PROBLEM, "x=1;y=2;z=x+y;?z")))
    target = tmp_path / "out.jsonl"
    options = ("-n", 2, "--temperature", 1, "--seed", 3, "--out", target, "--max-new-tokens", 24)
    status, out, _ = run(capsys, "generate", "--file", prompts, *options)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert status == 0
    assert out == ""
    assert [(r["prompt"], r["sample"]) for r in records] == [(PROBLEM, 0), (PROBLEM, 1)] + [
        ("x=1;y=2;z=x+y;?z", i) for i in (0, 1)
    ]
    assert all(len(r["tokens"]) == len(r["logprobs"]) <= 24 and r["seed"] == 3 for r in records)


def test_policies_are_listed_with_their_settings(capsys):
    status, out, _ = run(capsys, "policies")
    assert status == 0
    assert "r_kv(budget, interval=128" in out
    assert "streaming_llm(" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--file", "missing.txt"), "error: missing.txt: No such file or directory"),
        ((), "one prompt or --file FILE; got neither"),
        (("", "--max-new-tokens", 3), "at least one token"),
        ((PROBLEM, "--file", "x.txt"), "got both"),
        ((PROBLEM, "--policy", "foo"), "policy must be one of full, ada_kv"),
        ((PROBLEM, "--policy", "r_kv"), "r_kv needs budget="),
        ((PROBLEM, "--policy", "r_kv", "--budget", 4), "must hold its sinks and recent slots"),
        ((PROBLEM, "--policy", "r_kv", "--budget", 96, "--set", "tau=1"), "r_kv has these settings"),
        ((PROBLEM, "--policy", "r_kv", "--budget", 96, "--set", "interval=often"), "interval must be a whole number"),
        ((PROBLEM, "--policy", "r_kv", "--budget", 96, "--set", "interval"), "--set takes NAME=VALUE"),
        ((PROBLEM, "--policy", "full", "--budget", 64), "full has no settings; got budget"),
        ((PROBLEM, "--policy", "h2o", "--budget", 96, "--set", "recent=half"), "recent must be a whole number or None"),
        ((PROBLEM, "--out", "no/such/folder/x.jsonl"), "a file in a folder that exists"),
        ((PROBLEM, "--out", "."), "a file in a folder that exists"),
        ((PROBLEM, "--html", "no/such/folder/x.html"), "--html must be a file in a folder that exists"),
        ((PROBLEM, "--html", "x", "--out", "./x"), "--html and --out must be two files"),
        ((PROBLEM, "-n", 0), "n must be at least 1"),
        ((PROBLEM, "--temperature", -1), "temperature must be 0"),
        ((PROBLEM, "--repetition-penalty", 0), "repetition_penalty must lie in [0.01, 100]"),
        ((PROBLEM, "--presence-penalty", 3), "presence_penalty must lie in [-2, 2]"),
        ((PROBLEM, "--model", "no-such-model"), "tiny-reasoner"),
        ((PROBLEM, "--model", ""), "got '', which is none of these"),
        ((PROBLEM, "--max-new-tokens", 10_000), "must fit the model's 2048 positions"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else "",
)
def test_each_error_is_one_line_that_says_what_to_do(capsys, arguments, words):
    status, out, err = run(capsys, "generate", *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("jkv: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_flags_set_penalties(capsys, tmp_path):
    target = tmp_path / "out.jsonl"
    flags = ("--frequency-penalty", 2, "--presence-penalty", 1.5, "--repetition-penalty", 20, "--max-new-tokens", 24)
    assert run(capsys, "generate", PROBLEM, *flags, "--out", target)[0] == 0
    sampling = jkv.Sampling(temperature=0.0, repetition_penalty=20.0, presence_penalty=1.5, frequency_penalty=2.0)
    out = jkv.generate(jkv.load("tiny-reasoner"), PROBLEM, sampling=sampling, max_new_tokens=24)
    assert json.loads(target.read_text())["tokens"] == out.tokens[0].tolist()
    assert out.tokens.tolist() != jkv.generate(jkv.load("tiny-reasoner"), PROBLEM, max_new_tokens=24).tokens.tolist()


def test_a_broken_json_line_is_named(capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    status, _, err = run(capsys, "generate", "--file", path)
    assert status == 2
    assert "line 2 is not" in err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert 'jkv generate "b=3;c=7' in capsys.readouterr().out
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", [*cli.commands_of(cli.make_parser()), "bench latency"])
def test_help_of_a_command_shows_its_own_examples(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert examples
    assert all(line.startswith(f"  jkv {command}") for line in examples)


def test_the_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jkv {jkv.__version__}\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.json", b'{"prompt": "a"}', "a file that ends in .jsonl"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": 3}\n', "prompt 1 of"),
        ("p.jsonl", b'\n\n{"text": 3}\n', "line 3 is not"),
        ("p.txt", b"caf\xe9\n", "must be UTF-8 text"),
    ],
)
def test_a_bad_file_of_prompts_is_named(capsys, tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    status, _, err = run(capsys, "generate", "--file", path)
    assert status == 2
    assert words in err
    assert name in err
    assert err.count("\n") == 1


def test_json_lines_may_hold_any_unicode_and_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "p.jsonl"
    text = '{"prompt": "a\u2028b\x85c"}\n'
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert read_prompts(None, path) == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = [", "must be TOML"),
        (b"# \xe9", "must be UTF-8 text"),
        (b"problems = true", "problems must be of type int; got True"),
        (b"polices = ['r_kv']", "got polices. Did you mean policies?"),
    ],
)
def test_a_bad_configuration_is_named(capsys, tmp_path, content, words):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    status, _, err = run(capsys, "eval", "--config", path)
    assert status == 2
    assert f"{path}" in err
    assert words in err
    assert err.count("\n") == 1


# Flags and names.


@pytest.mark.parametrize(
    "flags", [("--interval", 16, "--window=4"), ("--set", "interval=16", "--window", 4)], ids=["flags", "set"]
)
def test_a_setting_of_a_policy_is_a_flag(capsys, flags):
    same = ("--policy", "r_kv", "--budget", 48, "--max-new-tokens", 40, "--out", "-")
    pairs = ("--set", "interval=16", "--set", "window=4")
    orders = ((PROBLEM, *same, *pairs), (PROBLEM, *same, *flags), (*same, *flags, PROBLEM))
    tokens = [json.loads(run(capsys, "generate", *order)[1])["logprobs"] for order in orders]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0] != json.loads(run(capsys, "generate", PROBLEM, *same)[1])["logprobs"]


def test_a_flag_of_a_boolean_setting_needs_no_value(capsys):
    options = ("--policy", "r_kv", "--budget", 48, "--max-new-tokens", 8, "--released")
    assert run(capsys, "generate", PROBLEM, *options)[0] == 0
    assert run(capsys, "generate", PROBLEM, *options[:-1], "--released", "false")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("generate", PROBLEM, "--intervl", 3),
            "--intervl is neither an option of this command nor a setting of a policy. Did you mean --interval?",
        ),
        (("plan", "r1-qwen-7b", "--devise", "t4"), "Did you mean --device?"),
        (("recall", "--polices", "r_kv"), "--polices is no option of this command. Did you mean --policies?"),
        (
            ("bench", "latency", "--quik"),
            "jkv bench latency: error: --quik is no option of this command. Did you mean --quick?",
        ),
        (("generte", PROBLEM), "there is no command 'generte'. Did you mean generate?"),
    ],
    ids=["generate", "plan", "recall", "bench", "command"],
)
def test_a_flag_that_is_none_names_the_nearest(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        run(capsys, *arguments)
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "expanded"),
    [
        (["--policy", "rpc", "--released", "b=3;?b"], ["--policy", "rpc", "--set", "released=True", "b=3;?b"]),
        (["p", "--released", "-n", "4"], ["p", "--set", "released=True", "-n", "4"]),
        (["p", "--released", "FALSE"], ["p", "--set", "released=FALSE"]),
        (["--interval", "16", "p"], ["--set", "interval=16", "p"]),
        (["--over-group=mean", "p"], ["--set", "over_group=mean", "p"]),
        (["--importance", "-1", "p"], ["--set", "importance=-1", "p"]),
        (["-- b=3;c=7 ?x"], ["-- b=3;c=7 ?x"]),  # a prompt
        (["--interval", "16", "--", "--foo"], ["--set", "interval=16", "--", "--foo"]),
        (["--temperature", "1", "p"], ["--temperature", "1", "p"]),
    ],
    ids=str,
)
def test_flags_leave_prompts_and_values_alone(given, expanded):
    parser = cli.commands_of(cli.make_parser())["generate"]
    assert expand_flags(parser, given) == expanded


def test_a_setting_whose_name_is_an_option_is_explained_as_set(capsys):
    assert "--set seed= " in run(capsys, "policies", "random")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", PROBLEM, "--policy", "rkv"), "Did you mean r_kv?"),
        (("generate", PROBLEM, "--policy", "r_kv", "--budget", 8, "--set", "windw=3"), "Did you mean window?"),
        (("plan", "r1-qwen-7b", "--device", "h20"), "Did you mean h200?"),
        (("plan", "r1-qwen-7b", "--device", "H20"), "Did you mean h200?"),
        (("policies", "snapkv"), "Did you mean snap_kv?"),
        (("eval", "--policies", "r_kv,full", "--beta", 1), "No policy of this comparison has the setting beta"),
        (("generate", PROBLEM, "--kernels", "fast"), 'must be "auto", "reference"'),
        (("generate", PROBLEM, "--chat"), "need a tokenizer with a chat template"),
        (("chat",), "chat needs a model with a chat template"),
    ],
    ids=str,
)
def test_a_name_that_is_none_names_the_nearest_or_the_rule(capsys, arguments, words):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert words in err


@pytest.mark.parametrize("name", jkv.POLICIES)
def test_a_policy_explains_itself(capsys, name):
    status, out, _ = run(capsys, "policies", name)
    assert status == 0
    for setting in inspect.signature(jkv.POLICIES[name]).parameters:
        assert f"--{setting.replace('_', '-')} " in out or f"--set {setting}= " in out
    assert inspect.getdoc(jkv.POLICIES[name]).splitlines()[0] in out


def test_verbose_says_where_and_with_what_it_runs(capsys, caplog):
    with caplog.at_level(logging.INFO, "jkv"):
        assert run(capsys, "generate", PROBLEM, "--max-new-tokens", 4, "--verbose", "--kernels", "reference")[0] == 0
    told = " ".join(caplog.messages)
    for words in (
        "tiny-reasoner: float32 weights on",
        "pages of 16 slots, 132 kB, for 1 row of",
        "compiled in",
        "paged_attention by",
    ):
        assert words in told
    logging.getLogger("jkv").setLevel(logging.NOTSET)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_says_why_there_is_no_text_yet(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with shown_text() as show:
        assert capsys.readouterr().err.endswith("compiles its programs ...") == is_terminal
        show(jkv.Event(0, 0, [1], [0.0], "b=", ""))
        show(jkv.Event(0, 0, [2], [0.0], "3", "length"))
    assert capsys.readouterr() == ("b=3\n", "\r\x1b[K" * is_terminal)  # the line is gone, once
    with pytest.raises(ValueError, match="refused"), shown_text():
        raise ValueError("refused")
    assert capsys.readouterr().err.endswith("\r\x1b[K") == is_terminal
    with shown_text(streams=False) as show:
        assert show is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["eval", "recall", "probe"])
def test_unknown_policies_are_refused_before_a_model_is_loaded(capsys, tmp_path, monkeypatch, command):
    monkeypatch.setattr(checkpoint, "load", lambda name: pytest.fail("it was loaded"))
    config = tmp_path / "p.toml"
    config.write_text("[texts.chains]\nbudgets = [64]\ncount = 1\n" if command == "probe" else "")
    status, out, err = run(capsys, command, "--config", config, "--policies", "rkv", "--out", tmp_path / "out")
    assert (status, out) == (2, "")
    assert "Did you mean r_kv?" in err
    assert not (tmp_path / "out").exists()


def test_a_streamed_text_ends_its_line_before_anything_else_is_said(capsys):
    show_text(jkv.Event(0, 0, [1], [0.0], "b=", ""))
    show_text(jkv.Event(0, 0, [2], [0.0], "3", "length"))
    assert capsys.readouterr().out == "b=3\n"


def test_a_seed_that_changes_nothing_is_named(capsys, recwarn):
    assert run(capsys, "generate", PROBLEM, "--max-new-tokens", 1, "--temperature", 0.5, "--seed", 3)[0] == 0
    assert not any("--seed" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match="--seed changes nothing.*--temperature above 0"):
        run(capsys, "generate", PROBLEM, "--max-new-tokens", 1, "--seed", 3)


# Chat models.


@pytest.fixture
def chat_folder(tmp_path):
    """tiny-reasoner as a chat model."""
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "chat")
    file = folder / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def failing(*arguments):
    """A policy whose scores are all NaN."""
    return jkv.evict_by(lambda view: jnp.full(view.position.shape, jnp.nan), budget=16, interval=8, name="mine")


def test_a_sample_that_fails_is_no_success(capsys, chat_folder, monkeypatch):
    monkeypatch.setattr("jkv.policies.make", failing)
    with pytest.warns(UserWarning, match="mine's scores must be numbers"):
        status, _, err = run(capsys, "generate", PROBLEM, "--max-new-tokens", 40)
    assert status == 1
    assert "finished by error" in err
    lines = iter([PROBLEM, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    status, _, err = run(capsys, "chat", "--model", chat_folder, "--max-new-tokens", 40)
    assert status == 0
    assert "this answer failed: ValueError: mine's scores must be numbers" in err


def test_a_chat_has_several_turns(capsys, chat_folder, monkeypatch):
    lines = iter(["b=3;c=7;d=b*c;?d", "", "x" * 10**5, "/new", PROBLEM, "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    options = ("--model", chat_folder, "--policy", "r_kv", "--budget", 64, "--interval", 16)
    status, out, err = run(capsys, "chat", *options)
    assert status == 0
    assert out.count("</think>") == 2
    assert err.count("[r_kv] ") == 2
    assert "must fit the model's" in err  # the conversation goes on
    assert "policy r_kv, budget 64" in err
    assert next(lines) == "never read"
    model = jkv.load(chat_folder)
    expected = jkv.generate(model, "b=3;c=7;d=b*c;?d", policy=jkv.r_kv(64, 16), progress=False).text[0]
    assert out.startswith(expected)
    assert run(capsys, "generate", "b=3;c=7;d=b*c;?d", "--chat", *options)[1] == expected + "\n"


def test_programs_are_kept_for_the_next_call(tmp_path):
    kept = {name: os.environ[name] for name in ("PATH", "JAX_PLATFORMS", "XLA_FLAGS")}
    places = kept | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "jkv", "generate", "b=3;?b", "--max-new-tokens", "4"]
    told = [subprocess.run(command, env=places, capture_output=True, text=True, check=True, cwd=ROOT).stderr for _ in range(2)]
    assert not [line for text in told for line in text.splitlines() if "PyTorch" in line]
    programs = list((tmp_path / "jkv" / "programs").rglob("*-cache"))
    assert programs
    assert (tmp_path / "jkv").stat().st_mode & 0o777 == 0o700
    first, second = (float(re.search(r"compiled in ([\d.]+) s", text)[1]) for text in told)
    assert second < first


def test_a_model_may_run_with_fewer_positions(capsys):
    status, _, err = run(capsys, "generate", PROBLEM, "--max-positions", 8)
    assert status == 2
    assert "8 positions" in err
    status, _, err = run(capsys, "generate", PROBLEM, "--max-positions", 0)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "max_positions must be from 1 to" in err.replace("--max-positions", "max_positions")
