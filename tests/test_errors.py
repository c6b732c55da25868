"""Errors as data: field, code and rule survive, and a message has the caller's names."""

import ast
import copy
import pickle
import string
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.checkpoints.families import find_family
from jkv.checkpoints.json_files import parse_object
from jkv.engine.mesh import read_mesh
from jkv.errors import CODES, InputError
from jkv.evaluation.budgets import parse_budget
from jkv.evaluation.contrasts import check_contrasts
from jkv.evaluation.datasets import read_rows
from jkv.evaluation.graders import grader_of
from jkv.evaluation.problems import preset_of
from jkv.eviction.view import check_score
from jkv.reasoning.steering import load_vector
from jkv.replicas.options import RayOptions
from jkv.rl.loss import parse_clip
from jkv.rl.ratios import check_mean
from jkv.serving.errors import NAMES
from jkv.serving.options import ServerOptions
from jkv.testing import random_view, tiny_model
from jkv.text_files import read_toml

ONES, MASK = -np.ones((1, 4), np.float32), np.ones((1, 4), bool)
PACKAGE = Path(jkv.__file__).parent
REFUSED = [  # a call, the argument that it names, and the kind of mistake
    (lambda: jkv.Sampling(top_p=0.0), "top_p", "out_of_range"),
    (lambda: jkv.RequestOptions(n=0), "n", "out_of_range"),
    (lambda: jkv.EngineOptions(order="shortest"), "order", "unknown_name"),
    (lambda: jkv.EngineOptions(kv_memory="2GB"), "kv_memory", "wrong_type"),
    (lambda: jkv.r_kv(64, importance=1.5), "importance", "out_of_range"),
    (lambda: jkv.r_kv(64, similarity=-2.0), "similarity", "out_of_range"),
    (lambda: jkv.r_kv("much"), "budget", "wrong_type"),
    (lambda: jkv.snap_kv(64, when="always"), "when", "unknown_name"),
    (lambda: jkv.published("r_kv"), "budget", "missing"),
    (lambda: jkv.published("r_kv", buget=64), "buget", "unknown_name"),
    (lambda: jkv.generate(tiny_model(), [1] * 10**6), "prompt", "does_not_fit"),
    (lambda: jkv.generate(tiny_model(), [99]), "prompt", "out_of_range"),
    (lambda: jkv.generate(tiny_model(), [1], stop_ids=[99]), "stop_ids", "out_of_range"),
    (lambda: jkv.generate(tiny_model(), [1], stop_strings=["a"]), "stop_strings", "unsupported"),
    (lambda: jkv.generate("tiny", [1]), "model", "wrong_type"),
    (lambda: jkv.Policy("half", evict=None, schedule=jkv.Every(64, 16)), "schedule", "conflict"),
    (lambda: jkv.Policy("wide", pyramid=3.0), "pyramid", "out_of_range"),
    (lambda: jkv.Needs(window=-1), "window", "wrong_type"),
    (lambda: jkv.Needs(in_step="all"), "in_step", "unknown_name"),
    (lambda: check_score(max), "score", "wrong_type"),
    (lambda: jkv.chain(), "policies", "wrong_type"),
    (lambda: jkv.full().select(random_view(np.random.default_rng(0), 8)), "policy", "unsupported"),
    (lambda: jkv.load("nowhere", weight_dtype="int2"), "weight_dtype", "unknown_name"),
    (lambda: jkv.load("tiny-reasoner", dtype="int8"), "dtype", "unknown_name"),
    (lambda: jkv.restore(Path(__file__).parent), "folder", "not_found"),
    (lambda: jkv.quantise_weights(tiny_model().params, None), "weight_dtype", "missing"),
    (lambda: jkv.split_by_width(tiny_model()), "model", "unsupported"),
    (lambda: jkv.Gate.load(Path(__file__)), "path", "invalid"),
    (lambda: load_vector(Path(__file__)), "path", "invalid"),
    (lambda: jkv.QueryStatistics.load(Path(__file__)), "path", "invalid"),
    (lambda: jkv.Rollout(tiny_model(), jkv.full(), max_new_tokens=4, pad_id=99), "pad_id", "out_of_range"),
    (lambda: jkv.Replicas(tiny_model()), "num_replicas", "conflict"),
    (lambda: jkv.Replicas(tiny_model(), num_replicas=1, carrier="post"), "carrier", "unknown_name"),
    (lambda: jkv.score(tiny_model(), [[1]], trace="none"), "trace", "wrong_type"),
    (lambda: jkv.score(tiny_model(), [[1]]), "prompts", "missing"),
    (lambda: jkv.score(tiny_model(), [[1]], prompts=[[]]), "prompts", "missing"),
    (lambda: jkv.score(tiny_model(), [[99]], prompts=[[1]]), "tokens", "out_of_range"),
    (lambda: jkv.score(tiny_model(), [[1]], prompts=[[1]], max_tokens=0), "max_tokens", "out_of_range"),
    (lambda: jkv.rl.group_advantages([1.0, 2.0], n=1), "n", "out_of_range"),
    (lambda: jkv.rl.group_advantages([1.0, float("nan")], n=2), "rewards", "out_of_range"),
    (lambda: jkv.rl.correct(ONES, ONES, MASK, mode="all"), "mode", "unknown_name"),
    (lambda: check_mean("row", None), "mean", "unknown_name"),
    (lambda: parse_clip((1.5, 0.2)), "clip", "out_of_range"),
    (lambda: jkv.rl.mismatch(ONES, ONES, MASK, buckets=(5, 1)), "buckets", "invalid"),
    (lambda: jkv.Device("mine", "npu", 1), "platform", "unknown_name"),
    (lambda: jkv.Device("mine", "gpu", -1), "memory", "out_of_range"),
    (lambda: jkv.plan(tiny_model(), "abacus"), "device", "unknown_name"),
    (lambda: jkv.plan(tiny_model(), "h200", length=10**6), "length", "out_of_range"),
    (lambda: jkv.plan(tiny_model(), "h200", memory_share=2.0), "memory_share", "out_of_range"),
    (lambda: jkv.plan(tiny_model(), "h200", dtype="int3"), "dtype", "unknown_name"),
    (lambda: jkv.analyze([]), "texts", "missing"),
    (lambda: jkv.analyze(["a"], right=[1, 2]), "right", "does_not_fit"),
    (lambda: jkv.calibrate(tiny_model(), []), "texts", "missing"),
    (lambda: jkv.calibrate(tiny_model(), ["text"]), "model", "unsupported"),
    (lambda: jkv.recall(tiny_model(), [], [jkv.r_kv(64)]), "texts", "missing"),
    (lambda: jkv.foresee(tiny_model(), [], without=["time"]), "without", "unknown_name"),
    (lambda: jkv.viz.kept([]), "out", "too_long"),
    (lambda: parse_budget("many"), "budget", "invalid"),
    (lambda: grader_of("kind"), "grader", "unknown_name"),
    (lambda: preset_of("exam"), "preset", "unknown_name"),
    (lambda: check_contrasts([["r_kv"]], ["r_kv"]), "contrasts", "invalid"),
    (lambda: read_rows(Path("nowhere")), "source", "not_found"),
    (lambda: RayOptions(timeout=0.0), "timeout", "out_of_range"),
    (lambda: ServerOptions(max_waiting=-1), "max_waiting", "out_of_range"),
    (lambda: read_toml(Path(__file__)), "path", "invalid"),
    (lambda: find_family("gpt"), "family", "unknown_name"),
    (lambda: parse_object(b"{", "config.json"), "file", "bad_json"),
    (lambda: read_mesh("tensor=x"), "mesh", "invalid"),
]


@pytest.mark.parametrize(("call", "field", "code"), REFUSED, ids=[f"{field}-{code}" for _, field, code in REFUSED])
def test_a_refusal_has_its_field_and_its_kind(call, field, code):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    error = caught.value
    assert isinstance(error, InputError)
    assert (error.field, error.code) == (field, code)
    assert error.code in CODES


def test_what_a_caller_wrote_is_never_a_template():
    error = InputError("{field} must be known; got {got}.", field="policy", got="{field} {0.__class__} {")
    assert str(error) == "policy must be known; got {field} {0.__class__} {."


def test_an_error_within_another_has_the_same_names():
    inner = InputError("Lower {max_new_tokens}.")
    outer = InputError("{field} must be smaller: {why}", field="prompt_piece", why=inner)
    assert outer.told({"max_new_tokens": "max_tokens"}) == "prompt_piece must be smaller: Lower max_tokens."


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_a_copy_of_another_process_is_the_same(copied):
    error = InputError("{field} holds {got}.", field="prompt", code="wrong_type", got="}{")
    same = copied(error)
    assert (str(same), vars(same)) == (str(error), vars(error))


def texts_of(node):
    """The text of a string expression, without what is no literal; None if an f-string may bring a caller's braces in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.BinOp):
        return [*texts_of(node.left), *texts_of(node.right)]
    return texts_of(node.body) if isinstance(node, ast.IfExp) else []


def rules_of(function):
    """The literal rules of a function, and the names of the values that its errors have; None where they cannot be known."""
    rules, names = [], {"field", *NAMES}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any("rule" in ast.unparse(target) for target in node.targets):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            rules += [text for value in values[:1] for text in texts_of(value)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("InputError", "error"):
            rules += [text for argument in node.args for text in texts_of(argument)]
            names |= {keyword.arg for keyword in node.keywords}
        if isinstance(node, ast.Dict):
            names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return rules, names


def test_every_name_in_a_rule_has_a_value_or_is_an_argument():
    """A name that is misspelt would be shown as it is."""
    checked = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            if "InputError(" not in ast.unparse(function):
                continue
            rules, names = rules_of(function)
            for rule in rules:
                used = {name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(rule) if name}
                assert used <= names, (str(path), function.name, rule, used - names)
                checked += bool(used)
    assert checked > 50


def test_no_rule_is_an_f_string_of_a_callers_value():
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "InputError" and node.args:
                assert not any(isinstance(one, ast.JoinedStr) for one in ast.walk(node.args[0])), (str(path), node.lineno)


def test_every_plain_refusal_names_one_argument_and_a_known_code():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refused":
                (keyword,) = node.keywords
                code = keyword.value if keyword.arg else keyword.value.values[0]
                assert code.value in CODES, (str(path), node.lineno)
