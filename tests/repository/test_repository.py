"""Format, lint, types, the README's snippets, and a wheel that works outside the tree: the checks that are not of code."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jkv.evaluation.compare import paired_change

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    """A command's output; the test fails with it when the command does."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=options.pop("cwd", ROOT), **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("check", [("format", "--check"), ("check",)], ids=["format", "lint"])
def test_ruff_has_nothing_to_say(check):
    run(sys.executable, "-m", "ruff", *check, ".")


def test_types_are_consistent():
    run(sys.executable, "-m", "mypy")


def test_the_readmes_snippets_run_in_order(capsys):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(snippets) >= 4
    scope = {}
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), scope)
    assert "\\boxed{d=1}" in capsys.readouterr().out


def test_the_readmes_command_generates_with_a_compressed_cache(capsys):
    import shlex

    from jkv import cli

    command = re.search(r"^\.venv/bin/jkv (generate .*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1]
    assert cli.main(shlex.split(command)) == 0
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("\\boxed{g=7}")
    assert int(re.search(r"(\d+) tokens evicted", captured.err)[1]) > 0


def change_of(outcomes, policy, other, share):
    """One policy's accuracy less another's on the same problems, and half its interval."""
    right = (np.array([mark == "1" for mark in outcomes[name, share]["right"]]) for name in (policy, other))
    return paired_change(*right)


def accuracies(name):
    """Whole percents by policy and share."""
    every = json.loads((ROOT / "results" / f"{name}-tiny-reasoner.json").read_text())["outcomes"]
    return {(outcome["policy"], outcome["share"]): round(100 * outcome["accuracy"]) for outcome in every}


def said_of_sharing():
    """The words of the paragraphs on sharing that hold figures."""
    pages_of_one, shared, encoded = (
        {
            outcome["policy"]: outcome
            for outcome in json.loads((ROOT / "results" / f"{name}-tiny-reasoner.json").read_text())["outcomes"]
        }
        for name in ("share-page-1", "share", "share-sentence")
    )
    right, saved = ({name: f"{100 * one[field]:.1f} %" for name, one in shared.items()} for field in ("accuracy", "amsr"))
    found = shared["reason_cache"]["sharing"]
    noise = (
        "raw",
        "values",
        "cosine",
        "fixed-0.7",
        "fixed-0.8",
        "fixed-0.9",
        "embedding",
        "unbiased",
        "all-pairs",
        "with-prompt",
    )
    assert all(abs(shared[name]["accuracy"] - 0.87) < 0.01 for name in noise)
    assert not any((one["sharing"] or {}).get("filter_waits") for one in shared.values())
    assert encoded["sentence"]["right"] == encoded["reason_cache"]["right"]
    one, random = pages_of_one["reason_cache"], pages_of_one["random_share"]
    return [
        f"`reason_cache` answers {right['reason_cache']} with {saved['reason_cache']} of its pages saved",
        f"the full cache has {right['full']}; giving up as many pages at random answers {right['random_share']}",
        f"In bytes it holds {100 * shared['reason_cache']['kv_share']:.0f} % of the full cache",
        f"{right['p=20']} at a saving of {saved['p=20']}, above SnapKV ({right['snap_kv']} at {saved['snap_kv']})",
        f"StreamingLLM ({right['streaming_llm']} at {saved['streaming_llm']})",
        f"Without the structural check {right['cos']} are right, at {saved['cos']}; MemShare's fixed thresholds give",
        f"{right['mem_share']} at {saved['mem_share']}",
        f"{100 * found['shifted'] / (found['shifted'] + found['candidates']):.0f} % of the pages that alike steps could share",
        f"with `align_steps` {right['aligned']} are right",
        f"{100 * one['amsr']:.1f} % are saved and {100 * one['accuracy']:.0f} % are right, and at random",
        f"{100 * random['amsr']:.1f} % and {100 * random['accuracy']:.0f} %",
        f"finds the very same pages, at {encoded['sentence']['sharing']['filter_ms_per_step']:.0f} ms a step",
        f"The filter takes {found['filter_ms_per_step']:.2f} ms for each step of reasoning",
    ]


def test_the_readmes_figures_are_those_that_were_recorded():
    page = (ROOT / "README.md").read_text()
    said = []
    every = json.loads((ROOT / "results" / "all-tiny-reasoner.json").read_text())["outcomes"]
    one = {(outcome["policy"], outcome["share"]): outcome for outcome in every}
    for policy, other, share in (
        ("r_kv", "snap_kv", 0.5),
        ("r_kv", "snap_kv", 0.75),
        ("skip_kv", "r_kv", 0.5),
        ("skip_kv", "r_kv", 0.75),
        ("h2o", "r_kv", 0.75),
    ):
        change, half = change_of(one, policy, other, share)
        said += [f"{100 * change:.1f} ± {100 * half:.1f}"]
    best = max(outcome["accuracy"] for (name, share), outcome in one.items() if share == 0.25 and outcome["evicted"] > 0)
    said += [f"{100 * best:.1f} % at best", f"{100 * one['h2o', 0.75]['accuracy']:.1f} %"]
    quest = one["quest", 0.25]
    said += [f"loses {-100 * quest['change']:.1f} ± {100 * (quest['change_high'] - quest['change']):.1f} points"]
    said += [f"({100 * x:.1f} ± {100 * y:.1f}" for x, y in [change_of(one, "r_kv", "r_kv-released", 0.15)]]
    said += [f"{100 * x:+.1f} ± {100 * y:.1f}" for x, y in [change_of(one, "r_kv", "r_kv-released", 0.5)]]
    skip, r_kv, rpc = (accuracies(f"ablate-{name}") for name in ("skip_kv", "r_kv", "rpc"))
    said += [f"({skip['tau-0.8', 0.5]} % at half the length with tau 0.8, {skip['sentences', 0.5]} % with 0.9"]
    said += [f"{skip['tau-0.98', 0.5]} % with its default of 0.98, {skip['r_kv', 0.5]} % without sentences"]
    said += [f"0 ({r_kv['importance-0', 0.5]} %), all redundancy, to 0.5 ({r_kv['importance-0.5', 0.5]} %)"]
    rarer = [rpc[name, None] for name in ("interval-32", "rpc", "interval-128")]
    said += ["({} %, {} %, {} % for".format(*rarer), f"a quarter does ({rpc['ratio-2', None]} %)"]
    apart = json.loads((ROOT / "results" / "distances.json").read_text())
    raw, rotated, num_pages = apart["raw"], apart["rotated"], apart["pages"]
    said += [f"are {raw['median_same']:.1f} apart", f"{rotated['median_same']:.1f} and {rotated['median_other']:.1f}"]
    said += [f"{num_pages * (num_pages - 1) // 2:,} pairs of pages", f"only {raw['pairs_of_the_same_tokens']} hold"]
    said += said_of_sharing()
    missing = [words for words in said if words not in " ".join(page.split())]
    assert not missing


def test_a_wheel_holds_the_model_and_works_from_outside_the_tree(tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 16e6
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "jkv/assets/tiny-reasoner/model.safetensors" in names
    assert {"jkv/viz/kept.js", "pallas_kernels/paged_attention/native.cc"} <= set(names)
    assert not any(name.startswith("tests") for name in names)
    code = (
        "import jkv; assert 'site' in jkv.__file__; m = jkv.load('tiny-reasoner');"
        "print(jkv.generate(m, 'b=3;c=7;d=b*c;?d', max_new_tokens=8, progress=False).text[0]);"
        "assert jkv.plan('r1-llama-8b', 'h200').num_weights == 8_030_261_248"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"})
    assert out.startswith("<think>")


def test_the_repository_names_no_path_of_a_machine():
    # What is tracked; where this is no clone, all that was unpacked.
    is_clone = (ROOT / ".git").exists() and shutil.which("git")
    tracked = run("git", "ls-files").splitlines() if is_clone else [str(path) for path in ROOT.glob("*/**/*.*")]
    pattern = re.compile(r"/(?:work|root|home|tmp)/\w")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".safetensors", ".npz", ".lock"} or not path.is_file() or path == Path(__file__):
            continue
        found = pattern.search(path.read_text(errors="ignore"))
        assert not found, f"{name}: {found[0]}"
