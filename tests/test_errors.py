"""Errors as data: field, code and rule survive, and a message has the caller's names."""

import ast
import copy
import pickle
import string
from pathlib import Path

import pytest

import jkv
from jkv.errors import CODES, InputError
from jkv.serving.errors import NAMES
from jkv.testing import tiny_model

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
