"""What people write who come from another library, and what they read then: the rule, and what to write instead."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

import jkv
from jkv.cli import main
from jkv.evaluation.choose import Choice, Row
from jkv.evaluation.problems import Problem, problems_of
from jkv.progress import counts_texts
from jkv.testing import TinyTokenizer, tiny_model

PLACES = [  # arguments of other libraries, and where their setting is here
    ("jkv.generate(model, [1], num_return_sequences=2)", "Write n=."),
    ("jkv.Rollout(model, jkv.full(), group_size=8)", "Write n=."),
    ("jkv.Rollout(model, jkv.full(), max_completion_length=8)", "Write max_new_tokens=."),
    ("jkv.generate(model, [1], max_length=8)", "Write max_new_tokens=."),
    ("jkv.generate(model, [1], do_sample=False)", "Write temperature=0"),
    ("jkv.generate(model, [1], return_full_text=False)", "`text` is the completion alone."),
    ("jkv.generate(model, [1], tokenizer=None)", "model.tokenizer."),
    (
        "jkv.Rollout(model, jkv.full(), max_new_tokens=4)([[1]], temperature=1.0)",
        "Write sampling=jkv.Sampling(temperature=...).",
    ),
]
WRONG = [  # arguments of another kind, or in another order
    ("jkv.load(model)", "name_or_folder must be a text or a path; got Model(tiny"),
    ("jkv.generate('b=3;?b', model)", "pass model first"),
    ("jkv.generate(model, [1], policy=jkv.r_kv)", "Call it, as in r_kv(budget=256); of a score, jkv.evict_by(r_kv"),
    ("jkv.save('folder', model.params)", "save takes the weights and then the folder, jkv.save(params, folder); got 'folder'"),
    ("jkv.save(model, 3)", "folder must be a text or a path; got 3."),
    ("jkv.rl.make_batch([1.0], None)", "make_batch takes rollouts first, then their advantages; got [1.0]"),
    ("jkv.evict_by(score, 48, needs=8)", "needs must be a jkv.Needs, such as jkv.Needs(window=8)"),
    ("jkv.evict_by(score, 48, window=8)", "needs=jkv.Needs(window=8)"),
    ("jkv.evict_by(score, 48, sink=8)", "Did you mean sinks?"),
    ("jkv.recall(model, ['a text'], [jkv.full()])", "texts must be pairs, (prompt, continuation)"),
    ("jkv.recall(model, [([1], [2])], ['r_kv'])", "Did you mean jkv.r_kv?"),
    ("jkv.recall(model, [([1], [2])], jkv.full())", "policies must be a list; got full(). Put it into brackets."),
    ("compare(letters, ['AB'], ['r_kv'], [64])", "problems must be pairs of texts, (prompt, answer), or Problems; got 'AB'"),
    ("compare(letters, [('AB', 'C')], 'r_kv', [64])", "policies must be a list; got 'r_kv'"),
    ("compare(letters, [('AB', 'C')], ['r_kv'], 64)", "budgets must be a list; got 64"),
    ("probe(letters, [('AB', 'C')], ['r_kv'])", "text_sets({'stream': {'budgets': [128]"),
    ("jkv.viz.Kept('').save('kept.png')", "Write kept.html."),
    ("jkv.choose(letters, texts=sys.executable)", f"Read the file: open({sys.executable!r}).read()."),
]


@pytest.fixture(scope="module")
def answers():
    """The error of each line, in a process without the test run's own checks of types."""
    lines = [
        "import json, sys, jkv",
        "from jkv.evaluation.compare import compare",
        "from jkv.evaluation.probe import probe",
        "from jkv.testing import TinyTokenizer, tiny_model",
        "model, letters, said = tiny_model(), tiny_model(tokenizer=TinyTokenizer()), []",
        "def score(view): return view.key[..., 0]",
        f"for line in {[line for line, _ in PLACES + WRONG]!r}:",
        "    try: said.append(f'no error, but {eval(line)}')",
        "    except (TypeError, ValueError) as error: said.append(str(error))",
        "print(json.dumps(said))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return dict(zip([line for line, _ in PLACES + WRONG], json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.everyday
@pytest.mark.parametrize(("line", "words"), PLACES + WRONG, ids=[line for line, _ in PLACES + WRONG])
def test_a_mistake_is_answered_with_what_to_write(answers, line, words):
    assert words in answers[line]
    assert len(answers[line]) < 450 or "Did you mean" in answers[line]


LINES = [  # of the terminal, and the end of what it answers
    (["chat", "tiny-reasoner"], "jkv chat: error: unrecognized arguments: tiny-reasoner. The model is named by --model. See"),
    (["generate", "tiny-reasoner", "b=3;?b"], "jkv generate: error: unrecognized arguments: b=3;?b. The model is named by"),
    (
        ["generate", "b=3;?b", "--budjet", "3"],
        "--set budjet=VALUE. See",
    ),
    (["generate", "b=3;?b", "--policy", "mine.own"], "Write mine:own."),
    (["eval", "--policies", "r_kv mine:own", "--budgets", "64"], "Separate names by commas."),
]


@pytest.mark.everyday
@pytest.mark.parametrize(("line", "words"), LINES, ids=[" ".join(line) for line, _ in LINES])
def test_a_wrong_command_line_is_answered_in_one_line(capsys, line, words):
    try:
        status = main(line)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert words in said


def test_a_score_named_as_a_policy_is_told_from_a_policy(tmp_path, monkeypatch, capsys):
    (tmp_path / "scores_only.py").write_text("def key_norm(view):\n    return view.key[..., 0]\n")
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "b=3;?b", "--policy", "scores_only.py:key_norm", "--budget", "48"]) == 2
    assert "It is a score: name a function of budget= that returns jkv.evict_by(score, budget)." in capsys.readouterr().err


def test_problems_are_pairs_or_problems():
    assert problems_of([("a", "b"), Problem("c", "d")]) == [Problem("a", "b"), Problem("c", "d")]


def test_recall_reads_texts_as_their_tokens():
    model = tiny_model(tokenizer=TinyTokenizer())
    tokens = model.tokenizer.encode("ABCDEFGHIJ" * 3)
    texts, ids = (
        jkv.recall(model, [pair], [jkv.streaming_llm(12, interval=4)], page_size=4)
        for pair in (("ABCDEF", "GHIJ" + "ABCDEFGHIJ" * 2), (tokens[:6], tokens[6:]))
    )
    np.testing.assert_array_equal(texts[1].by_layer, ids[1].by_layer)


def test_a_score_that_finds_nothing_to_read_is_told_how_to_ask_for_it():
    policy = jkv.evict_by(lambda view: view.mass, budget=8, interval=4)
    with pytest.raises(ValueError, match=r"got NoneType.*no mass.*jkv.Needs\(mass=True\) for the attention so far"):
        jkv.generate(tiny_model(), [1, 2, 3], policy=policy, max_new_tokens=4)


def test_weights_of_a_model_are_saved_as_its_params(tmp_path):
    model = tiny_model()
    jkv.save(model, tmp_path / "of_model")
    restored = jkv.restore(tmp_path / "of_model")
    np.testing.assert_array_equal(restored.embedding, model.params.embedding)


@pytest.mark.parametrize(("nats", "is_said"), [(math.log(32) + 0.1, True), (math.log(32) - 0.1, False)])
def test_texts_that_a_model_cannot_read_rank_nothing(nats, is_said):
    rows = [Row("random", jkv.random(32), 32, np.array([-0.2, -0.1]))]
    found = Choice("a model", jkv.cache.slot_size.slot_size_of(tiny_model().params), [64, 64], nats, 0.05, rows, [], None, 32)
    assert ("the ranking says nothing" in " ".join(str(found).split())) == is_said


class Bar:
    """What a bar shows."""

    disable, shown = False, ""

    def set_postfix_str(self, text):
        self.shown = text


def test_a_bar_counts_the_texts_of_a_run():
    bar = Bar()
    jkv.generate(tiny_model(), [[1, 2], [3, 4]], max_new_tokens=2, **counts_texts(bar))
    assert bar.shown.endswith("texts")
    bar.disable = True
    assert counts_texts(bar) == {}
