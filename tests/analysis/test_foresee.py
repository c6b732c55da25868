"""Training of foresight: what it learns from, what it learns, its file, and the command."""

import dataclasses

import numpy as np
import pytest

import jkv
from jkv import cli
from jkv.analysis import foresee as training
from jkv.analysis.recall import attention_received, recall
from jkv.checks import size
from jkv.policies.foresight import Foresight
from jkv.testing import TINY, TinyTokenizer, random_networks, tiny_model


def drawn_texts(model, count, length=150, seed=0):
    """Texts that the model drew."""
    prompts = np.random.default_rng(seed).integers(4, TINY.vocab_size, (count, 5)).tolist()
    out = jkv.generate(model, prompts, max_new_tokens=length, stop_ids=())
    return [[*prompt, *row] for prompt, row in zip(prompts, out.tokens.tolist(), strict=True)]


@pytest.mark.parametrize("total", [105, 256])  # the second fills its row to the end
def test_the_targets_are_what_later_queries_read(total):
    model = tiny_model()
    texts = [np.array(text) for text in drawn_texts(model, 2, total - 5)]
    moments = training.watch(model, texts)
    assert moments.num.tolist() == [total // 16 - 4] * 2
    for layer, received in enumerate(attention_received(model.params, texts[1].tolist())):
        for moment in (4, 5, 6):
            later = received[1][:, -1] - received[1][:, 16 * moment]
            later /= later.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(moments.reads[1, moment, layer, :, :total], later, atol=1e-3)


def test_trained_networks_keep_more_than_random_ones_on_texts_that_they_never_saw():
    model = tiny_model()
    losses = []
    trained = jkv.foresee(
        model, drawn_texts(model, 12), hidden=8, steps=300, report=lambda figures: losses.append(figures["loss"])
    )
    assert losses[-1] < losses[0] - 0.2
    texts = [(text[:5], text[5:]) for text in drawn_texts(model, 6, seed=1)]
    policies = [jkv.foresight(32, network, interval=8) for network in (trained, random_networks(model))]
    oracle, own, random = recall(model, texts, policies, interval=8, page_size=4)
    assert own.sharp_recall.mean() > random.sharp_recall.mean() + 0.1
    assert oracle.sharp_recall.mean() > own.sharp_recall.mean()


def test_inputs_that_are_left_out_have_no_weights_and_others_do():
    model, size = tiny_model(), TINY.head_size
    into = jkv.foresee(model, drawn_texts(model, 2), hidden=4, steps=3, without=["value", "age"]).arrays.into
    assert (into[:, :, size:] == 0).all()
    assert (into[:, :, :size] != 0).all()
    with pytest.raises(ValueError, match=r"Foresight reads key, value, age; it cannot do without 'ages'"):
        jkv.foresee(model, drawn_texts(model, 2), without=["ages"])


@pytest.mark.parametrize("power", [1, 2])
def test_the_power_is_that_of_the_attention(power):
    model, text = tiny_model(), np.array(drawn_texts(tiny_model(), 1)[0])
    reads = training.watch(model, [text], power).reads[0, 5, 1, :, : len(text)]
    received = list(attention_received(model.params, text.tolist()))[1][power - 1]
    later = received[:, -1] - received[:, 80]
    np.testing.assert_allclose(reads, later / later.sum(axis=-1, keepdims=True), atol=1e-3)


def test_training_is_repeatable_and_its_file_returns_it(tmp_path):
    model = tiny_model()
    texts = drawn_texts(model, 3, 100)
    one, two = (jkv.foresee(model, texts, hidden=4, steps=20) for _ in range(2))
    assert one == two
    assert one != jkv.foresee(model, texts, hidden=4, steps=20, seed=1)
    one.save(tmp_path / "networks.safetensors")
    loaded = Foresight.load(tmp_path / "networks.safetensors")
    assert loaded == one
    assert loaded.about["tokens"] == str(3 * 105)
    np.testing.assert_array_equal(loaded.arrays.longest_age, [79, 79])  # the oldest slot after 80 tokens, the last moment
    assert jkv.foresight(16, tmp_path / "networks.safetensors") == jkv.foresight(16, network=one)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "at least 80 tokens; got none"),
        ([[1] * 79], "at least 80 tokens; got none"),
        ("LETTERS", "has no tokenizer. Pass token ids"),
        ([[99] * 100], r"must lie in \[0, 32\)"),
    ],
)
def test_texts_that_teach_nothing_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        jkv.foresee(tiny_model(), texts)


def test_texts_for_which_there_is_no_memory_are_refused_before_a_pass(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(training, "watch", lambda *args: pytest.fail("it ran"))
    monkeypatch.setattr(training, "free_bytes", lambda *args: 10_000)
    heads = TINY.num_layers * TINY.num_kv_heads
    each = heads * 112 * 2 * (2 * TINY.head_size + 7)  # 112 slots, padded, seen from 7 moments, in 16 bits
    one_layer = TINY.num_kv_heads * 112 * 113 * 4
    with pytest.raises(ValueError, match=f"{size(2 * 3 * each + one_layer)} for 3 of them; 10 kB are free"):
        jkv.foresee(model, [[1] * 100] * 3)


def test_texts_are_by_default_as_long_as_positions_and_memory_allow(monkeypatch):
    monkeypatch.setattr(training, "free_bytes", lambda *args: 10**9)
    assert training.default_length(dataclasses.replace(TINY, max_positions=1500), 10) == 1500
    assert training.default_length(dataclasses.replace(TINY, max_positions=1 << 20), 10) == 4096
    assert training.default_length(dataclasses.replace(TINY, max_positions=1 << 20), 90) == 2048
    assert training.default_length(dataclasses.replace(TINY, max_positions=1 << 20), 10**6) == 1024


def test_texts_may_be_strings():
    model = tiny_model(tokenizer=TinyTokenizer())
    network = jkv.foresee(model, ["LETTERS" * 20], hidden=2, steps=2)
    assert network.about["tokens"] == "140"


def test_the_command_trains_on_traces_and_files(tmp_path, capsys):
    path, problem = tmp_path / "networks.safetensors", "b=3;c=7;d=b*c;?d"
    assert cli.main(["foresee", "--passages", "3", "--steps", "3", "--hidden", "4", "--out", str(path)]) == 0
    assert "step 3 of 3: loss" in capsys.readouterr().err
    given = ["generate", problem, "--policy", "foresight", "--budget", "64", "--network", str(path), "--max-new-tokens", "60"]
    assert cli.main(given) == 0
    file = tmp_path / "text.txt"
    file.write_text(problem * 40)
    assert (
        cli.main(["foresee", "--text", str(file), "--passages", "2", "--length", "100", "--steps", "2", "--out", str(path)])
        == 0
    )
    assert cli.main(["foresee", "--passages", "0", "--out", str(path)]) == 2
    assert "passages must be" in capsys.readouterr().err
