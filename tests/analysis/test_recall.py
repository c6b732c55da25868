"""Recall against counting by hand, the oracle against trying all sets, and the command."""

import itertools
import json

import numpy as np
import pytest

import jkv
from jkv import cli
from jkv.analysis.recall import (
    attention_received,
    columns_of,
    distinct,
    follows,
    future_reads,
    keep_what_is_read,
    recall,
    share_read,
    trace_of,
)
from jkv.cache.attention import OPEN_END
from jkv.policies.oracle import oracle
from jkv.testing import TINY, tiny_model

PROMPT = [4, 5, 6, 7, 8]


def random_text(seed, length=50):
    """Token ids."""
    return np.random.default_rng(seed).integers(4, TINY.vocab_size, length).tolist()


def plain_attention(model, tokens):
    """Attention of each layer and query head, [L, N, T, T], from keys and queries that the decoder passes on."""
    from jkv.analysis.recall import padded, queries_keys_values

    out = []
    for query, key, _ in queries_keys_values(model.params, padded(tokens)):
        query, key = (np.asarray(x, np.float64)[: len(tokens)] for x in (query, key))
        of_layer = []
        for head in range(query.shape[1]):
            logits = query[:, head] @ key[:, head // (query.shape[1] // key.shape[1])].T / np.sqrt(query.shape[2])
            weight = np.tril(np.exp(logits - logits.max()))
            of_layer.append(weight / weight.sum(axis=1, keepdims=True))
        out.append(of_layer)
    return np.array(out)


@pytest.mark.parametrize("power", [1, 2])
def test_the_share_that_is_read_is_counted_query_by_query(power):
    model, tokens, local, start = tiny_model(), random_text(0), 4, 9
    attention = plain_attention(model, tokens) ** power
    rng, total = np.random.default_rng(1), len(tokens)
    for layer, received in enumerate(attention_received(model.params, tokens)):
        end = np.where(rng.random((2, total)) < 0.5, rng.integers(0, total, (2, total)), OPEN_END)
        everything = read = 0.0
        for head, query in itertools.product(range(2), range(start, total)):
            for slot in range(query - local + 1):
                given = attention[layer, 2 * head : 2 * head + 2, query, slot].mean()
                everything += given
                read += given * (query < end[head, slot])
        share = share_read(received[power - 1], columns_of(end), start, local)
        assert share == pytest.approx(read / everything, abs=1e-5)


def test_columns_of_one_token_count_each_query_once():
    source, begin, end = np.array([3, 3, 1, 3]), np.array([5, 3, 1, 20]), np.array([12, 9, 30, 25])
    found = {tuple(map(int, column)) for column in zip(*distinct(source, begin, end, total=22), strict=True)}
    assert found == {(1, 1, 22), (3, 3, 9), (3, 9, 12), (3, 20, 22)}


def test_the_oracle_keeps_what_is_read_most_and_never_more_than_the_budget():
    """Of one eviction, no other set of as many slots is read more."""
    model, tokens, now, budget = tiny_model(), random_text(2, 24), 12, 5
    for received in attention_received(model.params, tokens):
        end = keep_what_is_read(received[0], now, budget, interval=100, recent=2)
        for head in range(2):
            later = received[0][head, -1] - received[0][head, now]
            kept = np.flatnonzero((end[head] == OPEN_END) & (np.arange(24) < now))
            assert len(kept) == budget
            assert {10, 11} <= set(kept)
            most = max(later[[10, 11, *rest]].sum() for rest in itertools.combinations(range(10), budget - 2))
            assert later[kept].sum() == pytest.approx(most)


def test_the_oracle_evicts_again_and_again_and_brings_nothing_back():
    received = next(attention_received(tiny_model().params, random_text(3)))[1]
    end = keep_what_is_read(received, 8, 6, interval=4, recent=1)
    for now in range(8, 50, 4):
        held = (end > now) & (np.arange(50) < now)
        assert (held.sum(axis=1) <= 6).all()
        assert held[:, now - 1].all()
    assert set(end[end < OPEN_END].tolist()) <= set(range(8, 50, 4))


def test_figures_are_those_of_the_engine_and_the_oracle_leads():
    model = tiny_model()
    texts = [(PROMPT, jkv.generate(model, PROMPT, max_new_tokens=n, stop_ids=()).tokens[0].tolist()) for n in (60, 75)]
    policies = [jkv.full(), jkv.r_kv(budget=20, interval=8, window=4), jkv.random(budget=20, interval=8), jkv.quest(budget=20)]
    figures = recall(model, texts, policies, interval=8, page_size=4)
    assert [one.name for one in figures] == ["oracle", "full", "r_kv", "random", "quest"]
    oracle, whole, r_kv, random, quest = figures
    np.testing.assert_allclose(whole.by_layer, 1.0, atol=1e-6)
    np.testing.assert_allclose(whole.loss, 0.0, atol=1e-6)
    assert (oracle.sharp_recall > r_kv.sharp_recall).all()
    assert (oracle.sharp_recall > random.sharp_recall).all()
    assert (quest.recall < 1).all()
    out = jkv.generate(model, texts[0][0], policies[1], forced_tokens=texts[0][1])
    dense = jkv.score(model, np.array([texts[0][1]]), prompts=[texts[0][0]]).logprobs
    assert r_kv.loss[0] == pytest.approx(float((dense - out.logprobs).mean()), abs=1e-5)


def test_a_run_is_identical_where_every_token_stays_the_most_likely():
    model = tiny_model()
    drawn = jkv.generate(model, PROMPT, max_new_tokens=40, stop_ids=()).tokens[0].tolist()
    end = np.full((2, 2, 45), OPEN_END, np.int32)
    assert follows(model.params, [*PROMPT, *drawn], len(PROMPT), trace_of(end))
    wrong = [*drawn[:-1], (drawn[-1] + 1) % TINY.vocab_size]
    assert not follows(model.params, [*PROMPT, *wrong], len(PROMPT), trace_of(end))
    end[..., :20] = 21
    assert not follows(model.params, [*PROMPT, *drawn], len(PROMPT), trace_of(end))


def test_no_texts_are_refused():
    for texts in ([], [([], [1])], [([1], [])]):
        with pytest.raises(ValueError, match="Recall needs texts"):
            recall(tiny_model(), texts, [jkv.full()])


def test_the_command_measures_traces_and_files(tmp_path, capsys):
    shared = ["recall", "--passages", "2", "--policies", "streaming_llm,quest", "--budgets", "50%", "--page-size", "4"]
    assert cli.main([*shared, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")][1:].count("oracle") == 1
    record = json.loads((tmp_path / "recall-tiny-reasoner.json").read_text())
    assert {one["name"] for one in record["policies"]} == {"oracle", "streaming_llm", "quest"}
    file = tmp_path / "text.txt"
    file.write_text("b=3;c=7;d=b*c;?d" * 40)
    assert cli.main([*shared, "--text", str(file), "--length", "120", "--prompt", "20"]) == 0
    assert cli.main([*shared, "--text", str(file), "--length", "12000"]) == 2
    assert "must hold 2 passages of 12000 tokens" in capsys.readouterr().err
    assert cli.main([*shared, "--text", str(file), "--length", "20", "--prompt", "20"]) == 2
    assert "must be shorter than --length" in capsys.readouterr().err


def test_the_policy_of_the_oracle_evicts_what_the_oracle_evicts():
    """The engine's compactions under the policy are those of `keep_what_is_read`, which is written independently."""
    model, interval = tiny_model(), 8
    rest = jkv.generate(model, PROMPT, max_new_tokens=60, stop_ids=()).tokens[0].tolist()
    reads = future_reads(model, (PROMPT, rest), interval, width=128)
    policy = oracle(reads, budget=20, interval=interval, recent=2)
    out = jkv.generate(model, PROMPT, policy, forced_tokens=rest, return_trace=True, page_size=4)
    for layer, received in enumerate(attention_received(model.params, [*PROMPT, *rest])):
        expected = keep_what_is_read(received[-1], len(PROMPT), 20, interval, recent=2)
        source, _, end = out.trace.columns(0, layer)
        for head in range(2):
            found = dict(zip(source[head].tolist(), end[head].tolist(), strict=True))
            assert [found[i] for i in range(len(PROMPT) + len(rest) - 1)] == expected[head, :-1].tolist()


def test_an_oracle_of_another_model_is_refused():
    reads = future_reads(tiny_model(seed=1), (PROMPT, [4, 5, 6]), 8)
    with pytest.raises(ValueError, match="The reads that an oracle knows must be of this model"):
        jkv.generate(tiny_model(), PROMPT, oracle(reads, budget=20), max_new_tokens=4)
