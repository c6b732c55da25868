"""`jkv probe`: losses are those of the engine, runs are resumed, contrasts are those of the pairs, bad input is refused."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from scipy import stats

import jkv
from jkv import cli
from jkv.evaluation import probe as module
from jkv.evaluation import probe_texts
from jkv.evaluation.probe import (
    ORACLE,
    Reading,
    contrasts_table,
    groups_of,
    probe,
    read_known,
    rows_of,
    table,
    text_sets,
)
from jkv.statistics import sign_flip_p

SETTINGS = {"r_kv": {"interval": 8, "window": 4}, "random": {"interval": 8}}
TABLES = {"chains": {"budgets": [48], "count": 2, "steps": 3, "passes": [0, 1]}}


@pytest.fixture(scope="module")
def reasoner():
    return jkv.load("tiny-reasoner")


@pytest.fixture(scope="module")
def readings(reasoner):
    return probe(reasoner, text_sets(TABLES), [ORACLE, "r_kv", "random"], SETTINGS, seeds=2)


def test_each_policy_budget_and_seed_runs_once(readings):
    assert [(one.policy, one.budget, one.seed) for one in readings] == [
        ("full", None, None),
        (ORACLE, 48, None),
        ("r_kv", 48, None),
        ("random", 48, 0),
        ("random", 48, 1),
    ]
    assert readings[0].groups == ["0 verifications", "1 verifications"] * 2


def test_log_probabilities_are_those_of_a_replay(reasoner, readings):
    texts = text_sets(TABLES)[0].probes(reasoner.tokenizer)
    for reading, policy in ((readings[0], jkv.full()), (readings[2], jkv.r_kv(budget=48, **SETTINGS["r_kv"]))):
        out = jkv.generate(
            reasoner, [t.prompt for t in texts], policy, forced_tokens=[t.rest for t in texts], return_trace=True
        )
        replayed = np.asarray(jkv.score(reasoner, out, out.trace).logprobs)
        expected = [replayed[i, text.scored].mean() for i, text in enumerate(texts)]
        np.testing.assert_allclose(reading.log_prob, expected, atol=2e-4)
        assert reading.kv_bytes == pytest.approx(out.stats.kv_bytes_per_sample)
        assert reading.pages_read == 1 - out.stats.amsr


def test_the_oracle_loses_less_than_chance(readings):
    loss = {row.policy: row.loss.mean() for row in rows_of(readings, "chains")}
    assert abs(loss[ORACLE]) < abs(loss["random"])
    assert loss["full"] == 0


def test_a_policy_with_an_ample_budget_loses_nothing(reasoner):
    tables = {"chains": TABLES["chains"] | {"budgets": [4_000]}}
    _, best, small = probe(reasoner, text_sets(tables), [ORACLE, "r_kv"], SETTINGS)
    full = probe(reasoner, text_sets(tables), [])[0]
    np.testing.assert_allclose(small.log_prob, full.log_prob, atol=1e-4)
    np.testing.assert_allclose(best.log_prob, full.log_prob, atol=1e-4)


def test_an_interrupted_probe_goes_on_and_other_texts_are_read_again(reasoner, tmp_path, monkeypatch):
    path = tmp_path / "readings.jsonl"
    first = probe(reasoner, text_sets(TABLES), ["r_kv"], SETTINGS, path=path)
    runs = []
    decode = module.decode
    monkeypatch.setattr(module, "decode", lambda *args: runs.append(args[2].name) or decode(*args))
    path.write_text(path.read_text() + '{"test": "cha')  # killed while it wrote
    assert probe(reasoner, text_sets(TABLES), ["r_kv"], SETTINGS, path=path) == first
    assert runs == []
    more = probe(reasoner, text_sets(TABLES), ["r_kv", "random"], SETTINGS, path=path)
    assert runs == ["random"]
    assert more[:2] == first
    for change in ({"steps": 2}, {"budgets": [40]}):
        probe(reasoner, text_sets({"chains": TABLES["chains"] | change}), ["r_kv"], SETTINGS, path=path)
    assert runs == ["random", "full", "r_kv", "r_kv"]  # the full cache has no budget
    assert read_known(path)[:2] == first


def test_readings_of_another_model_or_of_an_older_version_are_refused(reasoner, tmp_path):
    path, sets = tmp_path / "readings.jsonl", text_sets({"chains": TABLES["chains"] | {"count": 1}})
    probe(reasoner, sets, [], path=path)
    weights = reasoner.params.replace(final_norm=reasoner.params.final_norm.at[-1].add(1e-3))
    with pytest.raises(ValueError, match=r"readings of another model: full on chains, by weights \(weights then '\w+', now"):
        probe(dataclasses.replace(reasoner, params=weights), sets, [], path=path)
    old = json.loads(path.read_text())
    path.write_text(json.dumps(old | {"made_of": json.dumps([{"weights": "0f"}, "chains"])}) + "\n")
    with pytest.raises(ValueError, match="an older version of jkv wrote it without weights, config, tokenizer"):
        probe(reasoner, sets, [], path=path)


def test_a_variant_s_pages_have_its_own_format(reasoner, tmp_path):
    tables = {"chains": TABLES["chains"] | {"count": 1}}
    settings = SETTINGS | {"codes": {"policy": "r_kv", "kv_dtype": "int4", "budget": 90}}
    path = tmp_path / "readings.jsonl"
    full, floats, codes = probe(reasoner, text_sets(tables), ["r_kv", "codes"], settings, path=path)
    texts = text_sets(tables)[0].probes(reasoner.tokenizer)
    knobs = {"forced_tokens": [text.rest for text in texts], "progress": False}
    policy = jkv.r_kv(budget=90, **SETTINGS["r_kv"])
    out = jkv.generate(reasoner, [text.prompt for text in texts], policy, kv_dtype="int4", **knobs)
    expected = [np.asarray(row, np.float64)[text.scored].mean() for row, text in zip(out.logprobs, texts, strict=True)]
    np.testing.assert_allclose(codes.log_prob, expected, atol=1e-5)
    assert codes.kv_bytes == pytest.approx(out.stats.kv_bytes_per_sample)
    assert full.made_of == floats.made_of != codes.made_of
    assert codes.budget is None
    assert probe(reasoner, text_sets(tables), ["r_kv", "codes"], settings, path=path) == [full, floats, codes]
    with pytest.raises(ValueError, match="int5"):
        probe(reasoner, text_sets(tables), ["codes"], settings | {"codes": {"policy": "r_kv", "kv_dtype": "int5"}})


def test_the_same_options_with_another_manual_are_other_texts(reasoner, tmp_path, monkeypatch):
    """Two versions of Python, say; nothing shows it in the lengths."""
    tables, path = {"stream": {"count": 1, "length": 40, "budgets": [24]}}, tmp_path / "readings.jsonl"
    texts = iter(["b=3;" * 400, "c=5;" * 400, "c=5;" * 400])
    monkeypatch.setattr(probe_texts, "manual", lambda: next(texts))
    one, two, again = (probe(reasoner, text_sets(tables), [], path=path) for _ in range(3))
    assert one[0].log_prob != two[0].log_prob
    assert again == two
    assert len(read_known(path)) == 2


def made(policy, log_prob, budget=None, groups=None):
    return Reading("t", policy, policy, budget, None, groups or [""] * len(log_prob), list(log_prob), 1e3, 0.5, "")


def test_contrasts_are_the_paired_differences_of_each_group_with_holms_correction():
    rng = np.random.default_rng(0)
    groups = ["x", "y"] * 12
    full, good = rng.normal(-2, 1, 24), rng.normal(-2.1, 0.02, 24)
    bad = good - rng.normal(0.05, 0.05, 24)
    readings = [made(*args, groups=groups) for args in (("full", full), ("good", good, 8), ("bad", bad, 8), ("free", bad))]
    assert len(contrasts_table(readings, [["free", "good"]]).splitlines()) == 4  # one without a budget, at each of the other
    lines = contrasts_table(readings, [["good", "bad"], ["good", "free"]]).splitlines()[2:]
    assert len(lines) == 4
    for line, of in zip(lines, (slice(0, None, 2), slice(1, None, 2)) * 2, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        difference = bad[of] - good[of]  # of losses, so the other way round
        assert cells[4].startswith(f"{difference.mean():+.3f} [")
        assert (cells[1], cells[3]) == ("t", "8")
        assert float(cells[6].removeprefix("< ")) >= float(cells[5].removeprefix("< "))


def test_a_p_of_few_pairs_is_exact_and_of_many_like_a_t_test():
    pairs = np.array([0.3, -0.1, 0.5, 0.2])
    signs = np.array(list(itertools.product((1, -1), repeat=4)))
    assert sign_flip_p(pairs) == pytest.approx((abs(signs @ pairs) >= pairs.sum() - 1e-12).mean())
    many = np.random.default_rng(1).normal(0.4, 1, 40)
    assert sign_flip_p(many) == pytest.approx(stats.ttest_1samp(many, 0).pvalue, abs=0.01)
    assert sign_flip_p(np.zeros(5)) == 1


def test_tables_have_a_column_for_each_group_and_means_over_seeds():
    readings = [
        made("full", [-1.0, -2.0, -1.0, -2.0], groups=["x", "y"] * 2),
        made("random", [-1.5, -2.5, -1.5, -2.5], 8, ["x", "y"] * 2),
        dataclasses.replace(made("random", [-1.7, -2.5, -1.7, -2.5], 8, ["x", "y"] * 2), seed=1),
    ]
    assert {name: of.tolist() for name, of in groups_of(readings, "t").items()}["x"] == [True, False, True, False]
    text = table(readings, "t").splitlines()
    assert text[0] == "| policy | slots | KV kB | pages read | loss, x | loss, y |"
    assert "| full |  | 1 | 50.0% | 1.000 nats | 2.000 nats |" in text[2]
    assert "+0.600 [+0.600, +0.600] | +0.500 [+0.500, +0.500]" in text[3]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({}, "A probe needs texts"),
        ({"chains": 3}, "A probe needs texts"),
        ({"chain": {"budgets": [8]}}, r"\[texts.chain\] must be of a kind of stream, doses, chains; got 'chain'"),
        ({"chains": {}}, r"\[texts.chains\] needs budgets"),
        ({"chains": {"budgets": ["much"]}}, "A budget is a number of slots"),
        ({"chains": {"budgets": ["25% each"], "count": 1}}, 'one budget here.*Drop "each"'),
        ({"chains": {"budgets": [8], "cont": 1}}, r"\[texts.chains\] may set kind, budgets, count.*Did you mean count\?"),
        ({"chains": {"budgets": [8]}}, r"\[texts.chains\] needs count, such as count = 16; got no options"),
        ({"chains": {"budgets": [8], "count": "a"}}, r"\[texts.chains\] count must be a whole number; got 'a'"),
        ({"chains": {"budgets": [8], "count": 0}}, "count must be at least 1; got 0"),
        ({"chains": {"budgets": [8], "count": 2**40}}, "count must be at most 131,072"),
        ({"chains": {"budgets": [8], "count": 1, "passes": []}}, "passes must be a list of whole numbers"),
        ({"doses": {"budgets": [8], "count": 1, "length": 500, "times": 2}}, "times must be a list of whole numbers; got 2"),
    ],
)
def test_texts_that_say_too_little_are_refused(tables, says):
    with pytest.raises(ValueError, match=says):
        text_sets(tables)


def test_bad_input_is_refused_before_anything_runs(reasoner, monkeypatch):
    monkeypatch.setattr(module, "decode", lambda *args: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="no tokenizer"):
        probe(dataclasses.replace(reasoner, tokenizer=None), text_sets(TABLES), ["r_kv"])
    with pytest.raises(ValueError, match=r"chains must fit the model's \d+ positions; one has \d+"):
        probe(reasoner, text_sets({"chains": {"budgets": [48], "count": 1, "passes": [60]}}), ["r_kv"])
    with pytest.raises(ValueError, match="nobody"):
        probe(reasoner, text_sets(TABLES), ["r_kv", "nobody"])
    with pytest.raises(ValueError, match="budget"):
        probe(reasoner, text_sets({"chains": TABLES["chains"] | {"budgets": [3]}}), ["r_kv"], SETTINGS)


def test_the_command_writes_tables_and_goes_on(tmp_path, capsys):
    config = tmp_path / "small.toml"
    config.write_text(
        'policies = ["oracle", "h2o", "streaming_llm"]\ncontrasts = [["h2o", "streaming_llm"]]\n[protection]\nrecent = 8\n'
        "[texts.chains]\nbudgets = [48]\ncount = 2\nsteps = 2\npasses = [1]\n"
    )
    out = tmp_path / "out"
    assert cli.main(["probe", "--config", str(config), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "## chains" in printed
    assert "| h2o - streaming_llm | chains |" in printed
    assert "Every policy that evicts protects 8 recent slots." in printed
    record = json.loads((out / "small.json").read_text())
    assert [one["policy"] for one in record["readings"]] == ["full", "oracle", "h2o", "streaming_llm"]
    assert cli.main(["probe", "--config", str(config), "--out", str(out)]) == 2
    assert "Go on with --resume" in capsys.readouterr().err
    assert cli.main(["probe", "--config", str(config), "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "small.json").read_text())["readings"] == record["readings"]
    assert cli.main(["probe", "--config", str(config), "--resume"]) == 2
