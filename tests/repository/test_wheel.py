"""A wheel that works outside the tree, and files that name no path of a machine."""

import os
import re
import shutil
import sys
import zipfile

import pytest

from tests.repository.pages import ROOT, run


@pytest.mark.slow  # `.ci/run` runs it
def test_a_wheel_holds_the_model_and_works_from_outside_the_tree(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    run(*command, env=os.environ | {"JKV_PREBUILT": "1"})
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"jkv_cache-[\d.]+-py3-none-(?!any)\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 16e6
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "jkv/assets/tiny-reasoner/model.safetensors" in names
    assert {
        "jkv/serving/static/page.html",
        "jkv/serving/static/vendor/katex-0.19.1.js",
        "jkv/viz/kept.js",
        "jkv/viz/kept_counts.js",
        "pallas_kernels/paged_attention/native.cc",
        "pallas_kernels/native.h",
    } <= set(names)
    assert not any(name.startswith(("tests", "research")) for name in names)
    code = (
        "import jkv; assert 'site' in jkv.__file__; m = jkv.load('tiny-reasoner');"
        "print(jkv.generate(m, 'b=3;c=7;d=b*c;?d', max_new_tokens=8, progress=False).text[0]);"
        "assert jkv.plan('r1-llama-8b', 'h200').num_weights == 8_030_261_248;"
        "from pallas_kernels.paged_attention import native; assert 'site' in native.__file__;"
        "from importlib import import_module;"
        "names = 'paged_attention', 'sealed_attention', 'row_product', 'block_product', 'row_sum', 'log_softmax';"
        "found = [import_module(f'pallas_kernels.{name}.native').why_no_library() for name in names];"
        "assert found == [None] * 6, found"
    )
    (tmp_path / "empty").mkdir()
    places = {"PYTHONPATH": str(tmp_path / "site"), "PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    out = run(sys.executable, "-c", code, cwd=tmp_path, env=places | {"JAX_PLATFORMS": "cpu"})  # there is no compiler
    assert out.startswith("<think>")
    assert not list(tmp_path.glob("cache/**/*.so"))


def test_the_repository_names_no_path_of_a_machine():
    # What is tracked; where this is no clone, all that was unpacked.
    is_clone = (ROOT / ".git").exists() and shutil.which("git")
    tracked = run("git", "ls-files").splitlines() if is_clone else [str(path) for path in ROOT.glob("*/**/*.*")]
    pattern = re.compile(r"/(?:work|root|home|tmp)/\w")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".safetensors", ".npz", ".lock"} or not path.is_file() or path.samefile(__file__):
            continue
        found = pattern.search(path.read_text(errors="ignore"))
        assert not found, f"{name}: {found[0]}"
