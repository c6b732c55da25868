"""The forecast of `docs/kernel-notes.md` is what its command computes, from counts that the compilers still give."""

import dataclasses
import json
import re

import pytest

from jkv.reports import page_with
from tests.aot import forecast, targets

USUAL = forecast.Assumed()


def test_the_page_holds_the_forecast_of_the_recorded_counts():
    """`python -m tests.aot.forecast` rewrites it."""
    text = forecast.PAGE.read_text()
    assert "<!-- bench forecast -->\n| part | counted | ms |" in text
    assert text == page_with(text, {"forecast": forecast.report(forecast.recorded(), USUAL)})
    kept = json.loads(forecast.COUNTS.read_text())
    assert kept["assumed"] == dataclasses.asdict(USUAL)
    assert kept["ratio"] == round(forecast.ratio(forecast.recorded(), USUAL), 3)


def test_a_step_takes_less_than_a_third_more_than_its_bound():
    assert 1.31 < forecast.ratio(forecast.recorded(), USUAL) < 1.33


def test_at_the_limits_only_what_the_bound_leaves_out_is_left():
    ideal = forecast.Assumed(products=1, attention=1, kernel=0, gap=0, compaction=1)
    left_out = {"parts", "compaction"}  # and two passes over the logits
    parts = forecast.parts_of(forecast.recorded(), ideal)
    more = sum(part.seconds for part in parts if part.name.split()[0].strip(":") in left_out)
    more += 2 * 4 * 128 * 128_256 / ideal.bandwidth
    bound = 1e9 * forecast.bound_gb(forecast.recorded()) / ideal.bandwidth
    assert forecast.ratio(forecast.recorded(), ideal) == pytest.approx(1 + more / bound)


def test_the_counts_are_the_compilers():
    if reason := targets.why_missing("h200"):
        pytest.skip(reason)
    step = forecast.compiled_step(forecast.SETTING, 2)
    counts = forecast.recorded()
    text = step.program.as_text()
    assert forecast.logit_passes(text, forecast.SETTING.batch) == counts.logit_passes
    assert forecast.parts_of_row(text) == counts.parts
    assert forecast.compaction().num_kernels == counts.compaction_kernels


def test_a_compaction_passes_over_no_array_of_all_pages():
    if reason := targets.why_missing("h200"):
        pytest.skip(reason)
    text = forecast.compaction().program.as_text()
    (total,) = set(re.findall(r"s32\[(\d{8})\]", text))
    made = set(re.findall(rf" = (?:s32|pred)\[{total}\]\S* ([\w-]+)\(", text))
    assert made <= {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion"}
    assert all("scatter" in name for name in re.findall(rf"%(\S+) = (?:s32|pred)\[{total}\]\S* fusion", text))


def test_passes_over_logits_are_reductions_and_writes():
    lines = (
        "%gemm = f32[128,128256]{1,0} fusion(%x, %y), kind=kCustom",
        "%max_reduce.1 = f32[128]{0} fusion(%gemm, %z), kind=kInput",
        "%gather = f32[128]{0} fusion(%gemm, %token), kind=kLoop",
        "%other_reduce = f32[128]{0} fusion(%x), kind=kInput",
    )
    assert forecast.logit_passes("\n".join(lines), 128) == 2
