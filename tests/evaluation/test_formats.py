"""What quantised pages do to distributions: against the engine's own text and replay, and the report."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.evaluation import formats
from pallas_kernels.quantised import FORMATS


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_rise_of_the_loss_is_that_of_replay(kv_dtype):
    model = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=32))
    knobs = {"max_new_tokens": 48, "stop_ids": (), "progress": False, "return_trace": True}
    out = jkv.generate(model, [[5]], sampling=jkv.Sampling(seed=1), kv_dtype=kv_dtype, **knobs)
    before, after = (jkv.score(model, out, trace=out.trace._replace(kv_format=kv)).logprobs for kv in (None, FORMATS[kv_dtype]))
    token = jnp.asarray([[5, *out.tokens[0]]], jnp.int32)
    divergence, same, rise = formats.compare(model.params, token, FORMATS[kv_dtype])
    assert rise == pytest.approx(float((before - after).mean()), abs=1e-6)
    assert 0 < divergence < (0.2 if kv_dtype == "int4" else 0.1)
    assert (0.6 if kv_dtype == "int4" else 0.8) < same <= 1


def test_the_report_has_a_line_for_each_format(tmp_path, capsys):
    arguments = ["--model", "tiny-reasoner", "--texts", "2", "--length", "64", "--out", str(tmp_path)]
    assert formats.main(arguments) == 0
    record = json.loads((tmp_path / "formats-tiny-reasoner.json").read_text())
    assert [line["format"] for line in record["lines"]] == list(FORMATS)
    int8, fp8, int4 = record["lines"]
    assert int8["kl"] < fp8["kl"] < int4["kl"]
    for line in record["lines"]:
        assert line["kl_interval"][0] <= line["kl"] <= line["kl_interval"][1]
    assert np.isclose(int8["times_smaller"], (2 * 128 + 4) / (2 * 68 + 4), rtol=0.01)
    assert np.isclose(int4["times_smaller"], (2 * 128 + 4) / (2 * 36 + 4), rtol=0.01)
    assert (tmp_path / "formats-tiny-reasoner.md").read_text() in capsys.readouterr().out
