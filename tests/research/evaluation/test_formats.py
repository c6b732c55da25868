"""What quantised pages do to distributions: against the engine's own text and replay, and the report."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from pallas_kernels.quantised import FORMATS
from research.evaluation import formats


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_rise_of_the_loss_is_that_of_replay(kv_dtype):
    model = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=32))
    knobs = {"max_new_tokens": 48, "stop_ids": (), "progress": False, "return_trace": True}
    out = jkv.generate(model, [[5]], sampling=jkv.Sampling(seed=1), kv_dtype=kv_dtype, **knobs)
    before, after = (jkv.score(model, out, trace=out.trace.replace(kv_format=kv)).logprobs for kv in (None, FORMATS[kv_dtype]))
    token = jnp.asarray([[5, *out.tokens[0]]], jnp.int32)
    divergence, same, rise = formats.compare(model.params, model.params, token, FORMATS[kv_dtype])
    assert rise == pytest.approx(float((before - after).mean()), abs=1e-6)
    assert 0 < divergence < (0.2 if kv_dtype == "int4" else 0.1)
    assert (0.6 if kv_dtype == "int4" else 0.8) < same <= 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_in_8_bits_are_compared_as_they_score(kind):
    model = jkv.testing.tiny_model()
    codes, token = jkv.quantise_weights(model.params, kind), np.random.default_rng(0).integers(0, 32, (1, 40))
    before, after = (jkv.score(params, token[:, 1:], prompts=[token[0, :1]]).logprobs for params in (model.params, codes))
    divergence, _, rise = formats.compare(model.params, codes, jnp.asarray(token, jnp.int32), None)
    assert rise == pytest.approx(float((before - after).mean()), abs=1e-6)
    assert divergence > 0


def test_the_report_has_a_line_for_each_format(tmp_path, capsys):
    arguments = ["--model", "tiny-reasoner", "--texts", "2", "--length", "64", "--out", str(tmp_path)]
    assert formats.main(arguments) == 0
    record = json.loads((tmp_path / "formats-tiny-reasoner.json").read_text())
    assert [line["format"] for line in record["lines"]] == [*formats.PAGES, "weights in int8", "weights in fp8"]
    int8, fp8, int4, *_ = record["lines"]
    of_weights, by_name = record["lines"][-2:], {line["format"]: line for line in record["lines"]}
    assert by_name["kvarn, pages of 128"]["kl"] == 0  # texts of 64 tokens are all in the first page
    assert by_name["kvarn-k4v4, pages of 32"]["kl"] == 0  # or in the two that are not read as records
    assert of_weights[0]["kl"] < of_weights[1]["kl"]
    assert 1.8 < of_weights[0]["times_smaller"] < 2
    assert int8["kl"] < fp8["kl"] < int4["kl"]
    for line in record["lines"]:
        assert line["kl_interval"][0] <= line["kl"] <= line["kl_interval"][1]
    assert np.isclose(int8["times_smaller"], (2 * 128 + 4) / (2 * 68 + 4), rtol=0.01)
    assert np.isclose(int4["times_smaller"], (2 * 128 + 4) / (2 * 36 + 4), rtol=0.01)
    assert (tmp_path / "formats-tiny-reasoner.md").read_text() in capsys.readouterr().out


def test_what_was_measured_before_an_interruption_is_in_the_record(tmp_path, monkeypatch):
    figures = iter([[0.1, 0.9, 0.1], [0.2, 0.8, 0.2], [0.3, 0.7, 0.3]])  # two passages, and one more
    monkeypatch.setattr(formats, "compare", lambda *args: next(figures, None) or pytest.fail("interrupted"))
    with pytest.raises(pytest.fail.Exception):
        formats.main(["--model", "tiny-reasoner", "--texts", "2", "--length", "64", "--out", str(tmp_path)])
    (line,) = json.loads((tmp_path / "formats-tiny-reasoner.json").read_text())["lines"]
    assert (line["format"], line["kl"]) == (next(iter(formats.PAGES)), pytest.approx(0.15))


def test_a_record_of_another_model_or_of_other_passages_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "compare", lambda *args: [0.1, 0.9, 0.1])
    arguments = ["--model", "tiny-reasoner", "--texts", "2", "--length", "64", "--out", str(tmp_path)]
    formats.main(arguments)
    path = tmp_path / "formats-tiny-reasoner.json"
    whole = json.loads(path.read_text())
    for name in ("weights", "tokenizer", "data"):
        path.write_text(json.dumps(whole | {name: "0f"}))
        with pytest.raises(ValueError, match=rf"record of something else, by {name} \({name} then '0f', now '{whole[name]}'\)"):
            formats.main(arguments)
    path.write_text(json.dumps({name: value for name, value in whole.items() if name not in ("weights", "data")}))
    with pytest.raises(ValueError, match="an older version of jkv wrote it without weights, data"):
        formats.main(arguments)


def test_only_formats_that_a_record_lacks_are_measured(tmp_path, monkeypatch):
    arguments = ["--model", "tiny-reasoner", "--texts", "2", "--length", "64", "--out", str(tmp_path)]
    path = tmp_path / "formats-tiny-reasoner.json"
    assert formats.main(arguments) == 0
    whole, asked, compare = json.loads(path.read_text()), [], formats.compare
    lacking = whole | {"lines": [line for line in whole["lines"] if line["format"] != "int4"]}
    path.write_text(json.dumps(lacking))
    monkeypatch.setattr(formats, "compare", lambda *args: asked.append(getattr(args[3], "name", "")) or compare(*args))
    assert formats.main(arguments) == 0
    again = json.loads(path.read_text())
    assert asked == ["int4", "int4"]
    assert again["lines"] == whole["lines"]
    assert len(again["added"]) == 1
    with pytest.raises(ValueError, match="record of something else, by length, data"):
        formats.main([word if word != "64" else "48" for word in arguments])
    assert len(asked) == 2
