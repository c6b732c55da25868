"""Policies of your own by name: what is found, with which settings, and what is refused."""

import subprocess
import sys

import pytest

import jkv
from jkv import cli
from jkv.evaluation.variants import build, by_name, seeds_of, takes_budget
from jkv.policies import accepts, has_setting, make
from jkv.resuming import digest_of_files
from jkv.serving.options import ServerOptions
from jkv.serving.requests import CompletionFields, policy_of

MODULE = """
import jkv

def key(view):
    return view.key[..., 0].astype("float32")

def mine(budget, interval=16, *, recent=8, seed=0):
    '''Keeps large first channels.'''
    return jkv.evict_by(key, budget, interval, recent=recent)

def open_ended(budget, **settings):
    return jkv.evict_by(key, budget, **settings)

fixed = jkv.evict_by(key, 48)
number = 3

def wrong(budget):
    return key

def fails(budget):
    return {}[budget]

def by_place(budget, /):
    return mine(budget)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file, whose folder is on Python's path under a name that no other test takes."""
    path = tmp_path / f"own_{tmp_path.name}.py".replace("-", "_")
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("form", ["module", "file"])
def test_a_name_is_a_policy_with_settings(file, form):
    place = file.stem if form == "module" else str(file)
    policy = make(f"{place}:mine", {"budget": 24, "recent": 4})
    assert (policy.name, policy.budget, policy.evict.recent) == (f"{place}:mine", 24, 4)
    assert repr(policy) == f"{file.stem}.mine(budget=24, recent=4)"
    assert policy == make(f"{place}:mine", {"budget": 24, "recent": 4})
    assert make(f"{place}:fixed", {}).budget == 48
    assert repr(make(f"{place}:fixed", {})) == f"{file.stem}.fixed"
    assert make(f"{place}:open_ended", {"budget": 9, "interval": 4}).schedule == jkv.Every(9, 4)
    assert [has_setting(f"{place}:mine", name) for name in ("budget", "seed", "window")] == [True, True, False]
    assert [accepts(f"{place}:{name}", "sinks") for name in ("mine", "open_ended", "fixed")] == [False, True, False]
    assert seeds_of(f"{place}:mine", {}, 2) == [0, 1]
    assert takes_budget(f"{place}:mine", {})
    assert not takes_budget(f"{place}:fixed", {})


def test_a_definition_is_the_same_in_every_process_and_changes_with_the_file(file):
    own = make(f"{file}:mine", {"budget": 24})
    assert f"source={digest_of_files([file])!r}" in own.definition
    code = f"from jkv.policies import make; print(make({str(file)!r} + ':mine', {{'budget': 24}}).definition)"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert again.stdout.strip() == own.definition, again.stderr
    file.write_text(MODULE.replace("[..., 0]", "[..., 1]"))
    changed = make(f"{file}:mine", {"budget": 24})
    assert changed.definition != own.definition
    assert changed.evict != own.evict


def test_the_code_of_a_plain_function_is_in_a_definition_and_addresses_are_not():
    def one(view):
        return view.key[..., 0]

    def other(view):
        return view.key[..., 1]

    other.__name__ = other.__qualname__ = "one"
    first, second = (jkv.evict_by(score, 48).definition for score in (one, other))
    assert "FunctionScore(one, code=" in first
    assert first != second
    share = jkv.Policy("mine", share=jkv.Share(jkv.Filter(encoder=one)))
    assert " at 0x" in repr(share.share)
    assert " at 0x" not in share.definition


def test_a_budget_in_bytes_is_divided_by_the_bytes_of_a_slot(file, capsys):
    arguments = ["plan", "r1-llama-8b", "--device", "h200", "--length", "16384", "--policy", f"{file}:mine"]
    assert cli.main([*arguments, "--budget", "640MiB", "--set", "interval=64"]) == 0
    assert f"{(640 << 20) // (32 * 8 * 516) + 64:,}" in capsys.readouterr().out  # slots before a compaction


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("no_such_module_here:mine", {}, "names the module 'no_such_module_here', which is not on Python's path"),
        ("{folder}/nothing.py:mine", {}, "nothing.py, and there is none"),
        ("{file}:mone", {}, "'mone' of .*, which has no such name. Did you mean mine?"),
        ("{file}:", {}, "which has no such name"),
        ("{file}:number", {}, r"must be of a jkv.Policy, or of a function .*:number is 3\."),
        ("{file}:by_place", {}, "must be of a jkv.Policy, or of a function of named settings"),
        (
            "{file}:wrong",
            {"budget": 4},
            r"wrong must return a jkv.Policy, such as jkv.evict_by\(score, budget=48\); got <function",
        ),
        ("{file}:fails", {"budget": 4}, r"fails failed with the settings {'budget': 4}: KeyError: 4 at own_.*\.py:\d+"),
        ("{file}:mine", {}, "needs budget="),
        ("{file}:mine", {"budget": 4, "recant": 1}, "Did you mean recent?"),
        (
            "{file}:mine",
            {"budget": 4, "published": True},
            "has these settings: budget, interval, recent, seed; got 'published'",
        ),
        ("{file}:mine", {"budget": 4}, "must hold its sinks and recent slots"),
        ("{file}:fixed", {"budget": 4}, "has no settings; got budget"),
    ],
)
def test_names_and_settings_that_mean_nothing_are_refused(file, name, settings, words):
    with pytest.raises(jkv.InputError, match=words):
        make(name.format(file=file, folder=file.parent), settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero at own_.*py:1"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3"),
        ("import no_such_module_here", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_here'"),
    ],
)
@pytest.mark.parametrize("form", ["module", "file"])
def test_a_module_that_fails_is_refused_by_its_error(file, form, text, words):
    file.write_text(text)
    with pytest.raises(jkv.InputError, match=words):
        make(f"{file.stem if form == 'module' else file}:mine", {})


def test_objects_stand_for_names(file):
    own = jkv.evict_by(lambda view: view.key[..., 0], 48, name="own")
    names, settings = by_name([own, "r_kv", jkv.snap_kv], {"r_kv": {"interval": 8}})
    assert names == ["own", "r_kv", "snap_kv"]
    assert build("own", None, settings) is not own
    assert build("own", None, settings) == own
    assert build("snap_kv", 24, settings) == jkv.snap_kv(24)
    assert not takes_budget("own", settings)
    for policies, words in (
        ([own, own], "own is taken"),
        ([jkv.r_kv(48), "r_kv"], "r_kv is taken"),
        ([jkv.full()], "full is taken"),
        ([3], "A policy is a name, a jkv.Policy, or a function that returns one; got 3"),
    ):
        with pytest.raises(jkv.InputError, match=words):
            by_name(policies, {})


def test_a_client_of_a_server_names_no_module_that_the_server_does_not(file):
    mine, other = f"{file}:mine", f"{file}:open_ended"
    fields = CompletionFields(prompt="", policy=mine, settings={"budget": 24})
    with pytest.raises(jkv.InputError, match=r"policy must be one of full, .*ada_kv.* on this server; got '.*:mine'"):
        policy_of(fields, ServerOptions())
    with pytest.raises(jkv.InputError, match="must be one of full, r_kv on this server"):
        policy_of(fields, ServerOptions(own=(mine,), allowed=("r_kv",)))
    for options in (ServerOptions(own=(mine,)), ServerOptions(policy=mine), ServerOptions(own=(mine,), allowed=(mine,))):
        assert policy_of(fields, options).budget == 24
    with pytest.raises(jkv.InputError, match="one of"):
        policy_of(CompletionFields(prompt="", policy=other), ServerOptions(own=(mine,)))
    with pytest.raises(jkv.InputError, match="allowed must be"):
        ServerOptions(allowed=(mine,))
    with pytest.raises(jkv.InputError, match="no such name"):
        ServerOptions(own=(f"{file}:nothing",))
