"""Every test function has a case that CI runs; which cases these are follows from the record of seconds."""

import json
import os
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from itertools import pairwise

import pytest

from tests.repository.pages import ROOT, run
from tests.support import selection

# What CI cannot run, and why.
ELSEWHERE = {
    "tests/integrations/test_lm_eval.py": "needs lm-eval, which brings torch",
    "tests/integrations/test_page.py": "needs a browser",
    "tests/integrations/tunix_mesh.py": "test_tunix_weights.py runs it in a process of eight devices",
    "tests/replicas/test_actors.py": "needs Ray",
}

# Functions that take minutes and have no shorter case yet: give each of them one. This list only shrinks.
LATER = {
    "tests/analysis/test_foresee.py::test_trained_networks_keep_more_than_random_ones_on_texts_that_they_never_saw",
    "tests/analysis/test_recall.py::test_the_command_measures_traces_and_files",
    "tests/aot/test_mesh.py::test_a_mesh_decodes_all_layers_within_its_memory",
    "tests/aot/test_mesh.py::test_whole_experts_are_read_where_they_lie_and_parts_are_copied",
    "tests/aot/test_programs.py::test_a_family_decodes_without_a_copy_of_its_pool",
    "tests/aot/test_programs.py::test_decoding_all_layers_updates_the_pool_in_place",
    "tests/aot/test_replay_attention.py::test_replay_of_sorted_columns_compiles_for_all_widths_on_a_tpu",
    "tests/bench/test_benchmarks.py::test_a_server_is_started_and_loaded_at_each_rate_and_policy",
    "tests/bench/test_benchmarks.py::test_cost_splits_an_engines_step_into_parts",
    "tests/bench/test_benchmarks.py::test_eviction_is_compared_with_its_own_arithmetic",
    "tests/bench/test_benchmarks.py::test_latency_is_that_of_every_batch_chunk_and_policy",
    "tests/bench/test_benchmarks.py::test_peers_run_side_by_side",
    "tests/bench/test_benchmarks.py::test_the_papers_ratios_stand_beside_ours",
    "tests/bench/test_benchmarks.py::test_the_score_of_key_diff_is_a_policy",
    "tests/bench/test_benchmarks.py::test_throughput_runs_the_same_requests_in_every_pool",
    "tests/cli/test_cli.py::test_programs_are_kept_for_the_next_call",
    "tests/evaluation/test_compare.py::test_every_policy_runs_at_every_budget_beside_the_full_cache",
    "tests/evaluation/test_compare.py::test_seeds_are_runs_of_their_own_whose_means_are_one_row",
    "tests/evaluation/test_contrasts.py::test_contrasts_of_a_file_stand_below_its_table",
    "tests/evaluation/test_experiments.py::test_an_experiment_for_real_models_runs",
    "tests/evaluation/test_gpu_plan.py::test_the_whole_plan_runs_on_a_cpu",
    "tests/evaluation/test_leads.py::test_the_command_has_a_line_for_each_score_and_part",
    "tests/evaluation/test_probe.py::test_each_policy_budget_and_seed_runs_once",
    "tests/evaluation/test_resuming.py::test_a_disk_that_is_full_at_any_write_is_told_and_the_run_goes_on_later",
    "tests/evaluation/test_resuming.py::test_an_evaluation_killed_at_any_moment_goes_on_to_the_same_figures",
    "tests/evaluation/test_weight_leads.py::test_the_command_has_a_line_for_each_contrast",
    "tests/evaluation/test_window_leads.py::test_the_command_compares_own_windows_with_the_best_single_one",
    "tests/grpo/test_checkpoints.py::test_the_command_killed_at_any_moment_comes_to_the_same_run",
    "tests/grpo/test_grpo.py::test_compressed_rollouts_teach_at_full_size",
    "tests/grpo/test_grpo.py::test_ctrl_c_loses_no_whole_step",
    "tests/grpo/test_grpo.py::test_practice_makes_a_model_that_reads_the_step_in_the_prompt",
    "tests/grpo/test_grpo.py::test_the_command_reports_what_its_arms_came_to",
}


def lines_of_ci():
    """The runs of pytest in `.ci/run`: the paths that each collects, those that it leaves out, and its expression of marks."""
    usual = shlex.split(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"])
    for text in re.findall(r"-m pytest\b([^\n>&]*)", (ROOT / ".ci" / "run").read_text()):
        words = shlex.split(text)
        given = [*([] if any(word.startswith("addopts=") for word in words) else usual), *words]
        paths = [word for word in words if word.startswith("tests/")]
        ignored = [word.removeprefix("--ignore=") for word in given if word.startswith("--ignore=")]
        yield paths or ["tests"], ignored, [after for word, after in pairwise(given) if word == "-m"][-1]


def is_run(name, marks, line):
    """Whether a line of CI runs a case."""
    paths, ignored, expression = line
    return (
        any(name.startswith(path) for path in paths)
        and not any(name.startswith(path) for path in ignored)
        and bool(eval(expression, {}, defaultdict(bool, dict.fromkeys(marks, True))))
    )


def test_every_function_has_a_case_that_ci_runs(tmp_path):
    environment = os.environ | {"COLLECTED": str(tmp_path / "marks.json"), "XLA_FLAGS": ""}
    files = [str(file) for file in sorted((ROOT / "tests" / "support").glob("eight_devices*.py"))]
    options = ["-o", "addopts=", "-m", "", "-p", "tests.support.collected", "--collect-only", "-q", "-p", "no:cacheprovider"]
    run(sys.executable, "-m", "pytest", "tests", *files, *options, env=environment)
    marks = json.loads((tmp_path / "marks.json").read_text())
    lines = list(lines_of_ci())
    assert len(lines) == 4
    functions = {selection.split(name)[0] for name in marks}
    ran = {selection.split(name)[0] for name in marks if any(is_run(name, marks[name], line) for line in lines)}
    missing = {name for name in functions - ran if name.partition("::")[0] not in ELSEWHERE}
    assert missing <= LATER, "These functions have no case in CI: " + ", ".join(sorted(missing - LATER))
    assert missing >= LATER, "Remove from LATER what has a case in CI now: " + ", ".join(sorted(LATER - missing))


def test_every_function_of_the_record_is_there():
    record = selection.read_record()
    missing = record.keys() - selection.updated(record, []).keys()
    assert not missing, f"{sorted(missing)}: write the record anew (tests/support/selection.py)."


CASES = ["int8-gpu-0", "int8-tpu-0", "int4-gpu-0", "int4-tpu-0"]


@pytest.mark.parametrize(
    ("measured", "limit", "chosen"),
    [
        ({}, 1.0, CASES),
        (dict.fromkeys(CASES, 0.2), 1.0, CASES),
        (dict.fromkeys(CASES, 2.0), 1.0, ["int8-gpu-0"]),
        (dict.fromkeys(CASES, 2.0) | {"int4-tpu-0": 1.5}, 1.0, ["int4-tpu-0"]),
        (dict.fromkeys(CASES, 1.0), 3.5, ["int8-gpu-0", "int4-tpu-0"]),
        ({"int4-gpu-0": 1.0}, 3.5, ["int8-gpu-0", "int4-tpu-0"]),
    ],
    ids=["new", "short", "long", "shortest", "all_values", "measured_in_part"],
)
def test_cases_are_chosen_by_seconds(measured, limit, chosen):
    assert selection.choose(CASES, measured, limit) == chosen


def test_a_report_renews_what_it_measured(tmp_path):
    report = tmp_path / "seconds.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.repository.test_selection" name="is_run[x-1]" time="3"/>'
        '<testcase classname="tests.repository.test_selection" name="is_run[y-1]" time="9"><failure/></testcase>'
        '<testcase classname="tests.repository.test_selection" name="lines_of_ci" time="0.004"><skipped/></testcase>'
        '<testcase classname="tests.repository.test_gone" name="test_gone" time="9"/>'
        '<testcase classname="jkv.checks" name="jkv.checks.counted" time="9"/></testsuite></testsuites>'
    )
    function = "repository/test_selection.py::is_run"
    before = {function: {"x-1": 1.0, "z-1": 2.0}, "repository/test_selection.py::gone": {"": 1.0}}
    assert selection.updated(before, selection.read_report(report)) == {function: {"x-1": 3.0, "z-1": 2.0}}
