"""Steering: which tokens are pushed and by how much, by the text alone; vectors from traces; exact replay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.analysis.steering_vectors import KINDS, extract, thoughts
from jkv.model import decoder
from jkv.reasoning.steering import Steer, SteeringVector, label, load_vector, marks_of, num_checks
from jkv.testing import TINY, TinyTokenizer, tiny_model
from jkv.verify import Case

THINK, END, BREAK, FULL_STOP_BREAK = range(4)  # tokens of the tiny tokenizer
VECTOR = SteeringVector(np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32))
SAMPLING = jkv.Sampling(temperature=3.0, seed=2)  # nearly any token, breaks among them
KNOBS = {"max_new_tokens": 150, "stop_ids": (), "page_size": 4, "progress": False}


def new_talker():
    return tiny_model(tokenizer=TinyTokenizer())


@pytest.fixture(scope="module")
def talker():
    return new_talker()


def generate(model, policy, **options):
    prompts = [[5, THINK, 9], [7, 8], [THINK, END, 6]]
    return jkv.generate(model, prompts, policy=policy, sampling=SAMPLING, return_trace=True, **KNOBS | options)


def amounts_of(out, i, strength_at):
    """By the definition: a break token that the model made while it thinks."""
    expected, is_thinking = [], False
    tokens = [*out.prompts[i].tolist(), *out.tokens[i].tolist()]
    for at, token in enumerate(tokens):
        is_thinking = token == THINK or (is_thinking and token != END)
        made = at - len(out.prompts[i])
        is_pushed = is_thinking and token in (BREAK, FULL_STOP_BREAK) and made >= 0
        expected.append(strength_at(tokens[len(out.prompts[i]) :], made) if is_pushed else 0.0)
    return np.array(expected, np.float32)


def test_breaks_that_the_model_makes_while_it_thinks_are_pushed(talker):
    out = generate(talker, jkv.seal(VECTOR, layer=1, strength=-0.7))
    assert (out.trace.steer.layer == 1).all()
    np.testing.assert_array_equal(out.trace.steer.vector, np.tile(VECTOR.values[1], (3, 1)))
    pushed = 0
    for i in range(3):
        expected = amounts_of(out, i, lambda tokens, made: -0.7)
        np.testing.assert_array_equal(out.trace.steer.amount[i, : len(expected)], expected)
        pushed += (expected != 0).sum()
    assert pushed > 5


def test_the_strength_falls_with_each_check_when_it_is_looked_at(talker, monkeypatch):
    """Looked at every 8 tokens, by the text of the thoughts that were finished then; the letter E stands for a check."""
    monkeypatch.setattr("jkv.reasoning.steering.num_checks", lambda text, keywords: text.count("E"))
    out = generate(talker, jkv.seal(VECTOR, strength=-1.0, growth=0.25, interval=8))
    letter = TinyTokenizer.pieces.index("E")

    def strength_at(tokens, made):
        looked = tokens[: made // 8 * 8]
        finished = max((i for i, token in enumerate(looked) if token in (BREAK, FULL_STOP_BREAK)), default=-1)
        return -1.0 - 0.25 * looked[: finished + 1].count(letter)

    strengths = set()
    for i in range(3):
        expected = amounts_of(out, i, strength_at)
        np.testing.assert_allclose(out.trace.steer.amount[i, : len(expected)], expected)
        strengths |= set(expected.tolist())
    assert len(strengths) > 3


def test_replay_is_exact_and_a_push_one_token_late_is_not(talker):
    policies = [jkv.seal(VECTOR, strength=-2.0), jkv.r_kv(24, 8, window=4), jkv.seal(VECTOR, layer=0, growth=0.3, interval=16)]
    out = generate(talker, policies)
    replayed = np.asarray(jkv.score(talker, out, trace=out.trace).logprobs)
    assert np.abs(replayed - out.logprobs).max() <= 1e-4
    late = out.trace.steer._replace(amount=np.roll(out.trace.steer.amount, 1, axis=1))
    difference = np.abs(np.asarray(jkv.score(talker, out, trace=out.trace.replace(steer=late)).logprobs) - out.logprobs)
    assert difference[0].max() > 1e-3
    assert difference[1].max() <= 1e-4
    alone = jkv.generate(talker, [7, 8], policy=policies[1], sampling=SAMPLING, max_running=4, **KNOBS)
    np.testing.assert_array_equal(alone.tokens[0], out.tokens[1])


def test_thoughts_are_what_follows_a_break_until_the_next():
    tokenizer = TinyTokenizer()
    marks = marks_of(tokenizer, 32)
    text = "A\n\nB<think>C\n\nWAIT A.\n\nLET ME CHECK IT\n\nD</think>\n\nE\n\n"
    tokens = np.array(tokenizer.encode(text.replace(" ", "")))
    found = list(thoughts(tokenizer, tokens, marks.is_break, marks.think))
    starts = [i for i, token in enumerate(tokens.tolist()) if token in (BREAK, FULL_STOP_BREAK)]
    assert [at for at, _ in found] == starts[1:4]  # the last one ends with thinking
    assert [label(text) for _, text in found] == ["check", "go on", "go on"]
    inside = np.array(tokenizer.encode("A\n\nB\n\nC</think>D\n\n"))  # a completion whose prompt opened its thinking
    assert list(thoughts(tokenizer, inside, marks.is_break, marks.think, is_thinking=True)) == [(1, "B"), (3, "C")]
    assert list(thoughts(tokenizer, inside, marks.is_break, marks.think)) == []


def test_labels_and_checks_go_by_the_papers_words():
    assert [label(text) for text in ("Wait.", "so I verify", "ALTERNATIVELY, x", "in another way", "x=1, wait")] == [
        "check",
        "check",
        "switch",
        "switch",
        "go on",
    ]
    assert num_checks("a\n\nWait\n\nagainst\n\nso again\n\nWaiting\n\nAlternatively") == 2  # the last is not finished


def test_a_vector_is_the_difference_of_means_at_every_layers_input(talker):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 32, 5) for _ in range(3)]
    words = {kind: TinyTokenizer().encode(text) for kind, text in (("check", "WAIT"), ("go on", "HELLO"))}
    completions, kinds = [], []
    for _ in prompts:
        kinds.append([str(rng.choice(["check", "go on"])) for _ in range(6)])
        completions.append([THINK, BREAK, *(t for kind in kinds[-1] for t in [*words[kind], BREAK]), END])
    vector = extract(talker, prompts, completions)
    hidden = {kind: [[] for _ in range(2)] for kind in KINDS}
    for prompt, completion, labels in zip(prompts, completions, kinds, strict=True):
        tokens = jnp.asarray([*prompt, *completion], jnp.int32)[None]
        seen = []

        def attend(layer, query, key, value, cache):
            return jax.nn.dot_product_attention(query, key, value, is_causal=True), cache

        def enter(layer, x, seen=seen):
            seen.append(np.asarray(x[0]))
            return x

        decoder.forward(talker.params, tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], attend, None, enter)
        starts = [len(prompt) + i for i, token in enumerate(completion) if token == BREAK]
        for start, kind in zip(starts, labels, strict=False):
            for layer in range(2):
                hidden[kind][layer].append(seen[layer][start])
    expected = [np.mean(hidden["check"][layer], axis=0) - np.mean(hidden["go on"][layer], axis=0) for layer in range(2)]
    np.testing.assert_allclose(vector.values, expected, atol=1e-5)
    assert vector.about["check"] == str(sum(kind == "check" for row in kinds for kind in row))


def test_a_vector_survives_its_file(tmp_path):
    path = tmp_path / "vector.safetensors"
    dataclasses.replace(VECTOR, about={"model": "tiny"}).save(path)
    loaded = load_vector(path)
    np.testing.assert_array_equal(loaded.values, VECTOR.values)
    assert loaded.about == {"model": "tiny"}
    assert jkv.seal(path) == jkv.seal(loaded)
    assert hash(jkv.seal(path)) == hash(jkv.seal(loaded))


def test_the_command_extracts_a_vector_that_steers(tmp_path, capsys):
    from jkv import cli

    path = tmp_path / "steer.safetensors"
    assert cli.main(["steer", "--problems", "4", "--max-new-tokens", "320", "--out", str(path)]) == 0
    assert "from thoughts" in capsys.readouterr().err
    assert load_vector(path).values.shape == (4, 256)
    arguments = ["generate", "b=3;c=7;d=b*c;?d", "--policy", "seal", "--set", f"vector={path}", "--max-new-tokens", "40"]
    assert cli.main(arguments) == 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.seal(VECTOR, layer=2), "layer must lie in"),
        (lambda: jkv.seal(VECTOR, interval=0), "interval must be at least 1"),
        (lambda: jkv.seal(SteeringVector(np.zeros((2, 32), np.float32))), "finite and not zero"),
        (lambda: jkv.seal(SteeringVector(np.full((2, 32), np.nan, np.float32))), "finite and not zero"),
        (lambda: jkv.seal("no-such-file.safetensors"), "made by `jkv steer`"),
        (lambda: jkv.seal(__file__), "made by `jkv steer`"),
        (lambda: generate(tiny_model(), jkv.seal(VECTOR)), "has no tokenizer"),
        (
            lambda: generate(new_talker(), jkv.seal(SteeringVector(np.ones((3, 16), np.float32)))),
            "must be of this model, 2 layers of width 32; it has 3 of 16",
        ),
        (
            lambda: jkv.Engine(new_talker(), max_slots=64).submit([1], jkv.seal(VECTOR), max_new_tokens=9),
            "policies=",
        ),
        (
            lambda: extract(new_talker(), [[5]], [[THINK, BREAK, 6, BREAK]]),
            "needs thoughts that check",
        ),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_verify_steers_its_own_model():
    case = Case(jkv.seal(SteeringVector(np.ones((28, 1536), np.float32))))
    assert case.policy.steer.vector.values.shape == (TINY.num_layers, TINY.width)
    assert isinstance(case.policy.steer, Steer)
