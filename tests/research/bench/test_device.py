"""`python -m research.bench.device` at sizes of a test: parts give figures, keep them as they come, and survive failures."""

import json
import types

import jax
import numpy as np
import pytest

from jkv.bench.fixtures import fill, new_state
from jkv.planning.devices import Device
from jkv.policies import full, r_kv
from jkv.testing import TINY, tiny_model
from research.bench import device

SIZES = ("--batches", "2", "--budget", "32", "--interval", "16", "--new-tokens", "64", "--most-rows", "2")


@pytest.fixture(autouse=True)
def a_quick_copy(monkeypatch):
    monkeypatch.setattr(device, "copy_rate", lambda: 1e9)


def run(shape, folder, *options):
    """What a run wrote."""
    assert device.main(["--models", str(shape), "--out", str(folder), *SIZES, *options]) == 0
    (written,) = folder.glob("device-*.json")
    return json.loads(written.read_text())["rows"], (folder / f"{written.stem}.md").read_text()


def test_steps_and_the_engine_are_timed_beside_their_roofline(shape, tmp_path, capsys):
    rows, table = run(shape, tmp_path, "--parts", "step,prefill,engine,stress")
    assert table == capsys.readouterr().out
    step = [row for row in rows if row["part"] == "step"]
    assert [row["name"] for row in step] == ["r_kv", "r_kv, compactions", "full", "full, one row 16 times as long"]
    assert 0 < step.pop(1)["compaction_share"] < 1
    assert [row["slots"] for row in step] == [40, 40, 340]
    for row in step:
        assert row["times_roofline"] == pytest.approx(row["milliseconds"] / row["roofline_milliseconds"], rel=0.01)
    assert step[0]["roofline_milliseconds"] == step[1]["roofline_milliseconds"] < step[2]["roofline_milliseconds"]
    (engine,) = (row for row in rows if row["part"] == "engine")
    assert engine["tokens_per_second"] > 0
    assert 0 < engine["host_share"] < 1
    stress = [row for row in rows if row["part"] == "stress"]
    assert [(row["name"], row["batch"]) for row in stress] == [("full", 2), ("r_kv", 2), ("r_kv", 2)]
    assert all(row["tokens_per_second"] > 0 for row in stress)


def test_a_record_keeps_the_parts_that_do_not_run_again(shape, tmp_path):
    first, _ = run(shape, tmp_path, "--parts", "prefill,step", "--seconds", "0")
    rows, table = run(shape, tmp_path, "--parts", "step", "--batches", "1")
    assert rows[-1:] == [row for row in first if row["part"] == "prefill"]
    assert {row["part"] for row in rows[:-1]} == {"step"}
    assert table.count("out of time") == 1
    (record,) = tmp_path.glob("*.json")
    record.write_text(record.read_text().replace(f'"jax": "{jax.__version__}"', '"jax": "0.1"'))
    assert {row["part"] for row in run(shape, tmp_path, "--parts", "step", "--batches", "1")[0]} == {"step"}


def test_rows_of_another_budget_or_shape_are_refused(shape, tmp_path, capsys):
    run(shape, tmp_path, "--parts", "prefill", "--seconds", "0")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(shape, tmp_path, "--parts", "step", "--budget", "40", "--seconds", "0")
    assert "other rows of" in (error := capsys.readouterr().err)
    assert "by budget (budget then 32, now 40). Give another --out" in error
    (record,) = tmp_path.glob("*.json")
    whole = json.loads(record.read_text())
    del whole["made_of"]
    record.write_text(json.dumps(whole))
    rows, _ = run(shape, tmp_path, "--parts", "step", "--seconds", "0")
    assert {row["part"] for row in rows} == {"prefill", "step"}
    assert "kept rows of" in capsys.readouterr().err


def test_a_single_row_is_timed_as_an_engine_runs_it(monkeypatch):
    monkeypatch.setitem(device.LEAST_ROWS, "cpu", 2)
    bench = device.Bench(tiny_model(), device.known_device({"device": "cpu"}, 1e9), (1,), 32, 16, 64, 2)
    asked = []

    def step(params, state, inputs, carried, **options):
        asked.append((state.cache.pool, inputs))
        return state, types.SimpleNamespace(token=None), carried

    device.chunk_of(bench, full(), np.full(1, 20), step)()
    ((pool, inputs),) = asked
    np.testing.assert_array_equal(pool.logical_length, [20, 0])
    np.testing.assert_array_equal(inputs.remaining > 0, [True, False])


def test_a_step_is_timed_with_and_without_the_engine_s_options(shape, tmp_path, monkeypatch):
    monkeypatch.setitem(device.OPTIONS, "cpu", {"xla_cpu_enable_fast_math": False})  # none of ours is known to a CPU
    monkeypatch.setitem(device.APART, "cpu", {"an array for each matrix": {}})
    asked, jit = [], jax.jit
    monkeypatch.setattr(jax, "jit", lambda *args, **options: asked.append((args, options)) or jit(*args, **options))
    rows, table = run(shape, tmp_path, "--parts", "step")
    ours, plain, without, apart = rows[0], *rows[-3:]
    assert [ours["name"], plain["name"]] == ["r_kv", "r_kv, XLA's own options"]
    assert without["name"] == "r_kv, without xla_cpu_enable_fast_math"
    assert apart["name"] == "r_kv, an array for each matrix"
    assert plain["roofline_milliseconds"] == apart["roofline_milliseconds"] == ours["roofline_milliseconds"]
    assert plain["times_our_options"] == pytest.approx(plain["milliseconds"] / ours["milliseconds"], rel=0.01)
    assert "times our options" in table
    assert [row["name"] for row in rows[2:-3]] == ["full", "full, one row 16 times as long"]
    of_steps = [options for args, options in asked if args[:1] == (device.programs.decode_chunk.function,)]
    assert of_steps.count({"compiler_options": {}} | device.programs.decode_chunk.settings) == 2  # as our only one is left out


def test_what_fails_or_has_no_time_left_is_a_row_and_not_the_end(shape, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(device, "timed_step", fail)
    rows, _ = run(shape, tmp_path, "--parts", "step,stress")
    assert [row["not_timed"] for row in rows] == ["RuntimeError: RESOURCE_EXHAUSTED"] * 6
    rows, table = run(shape, tmp_path, "--seconds", "0")
    assert [(row["part"], row["not_timed"]) for row in rows] == [(part, "out of time") for part in device.PARTS]
    assert table.count("out of time") == len(device.PARTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--parts", "steps"), "must be among step, kernels, peers, prefill, engine, stress; got steps"),
        (("--models", "r1-llama-9b"), "r1-llama-8b"),
        (("--batches", "8,0"), "batches must be"),
        (("--budget", "-1"), "budget must be"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr(device, "random_model", lambda *args: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        device.main(arguments)
    assert says in capsys.readouterr().err


def test_the_roofline_is_the_bytes_of_a_step_over_the_rate_of_a_copy():
    model = tiny_model()
    bench = device.Bench(model, Device("this", "cpu", 10**9, bandwidth=1e6), (2,), 32, 16, 64, 2)
    weights = sum(x.size for x in jax.tree.leaves(model.params)) - (0 if TINY.tie_embeddings else model.params.embedding.size)
    slots = TINY.num_layers * TINY.num_kv_heads * 40
    expected = 4 * weights + 2 * slots * 2 * TINY.head_size * 4 + 2 * 8 * TINY.vocab_size
    assert device.roofline(bench, full(), 40.0, 2) == pytest.approx(expected / 1e6)


def test_rows_of_unequal_lengths_fill_a_pool_of_exactly_their_pages(monkeypatch):
    monkeypatch.setattr("jkv.bench.fixtures.MOST_NEW", 8)
    model, lengths = tiny_model(), np.array([3, 20, 8])
    state = fill(new_state(model.params, r_kv(16, interval=8), 3, lengths, 4), jax.random.key(0), lengths)
    pool = state.cache.pool
    np.testing.assert_array_equal(
        pool.length, np.broadcast_to(lengths, (TINY.num_kv_heads, 3)).T[None].repeat(TINY.num_layers, 0)
    )
    np.testing.assert_array_equal(pool.logical_length, lengths)
    assert int(pool.free_top) == 0
    held = np.asarray(pool.kv[1:])
    assert np.isfinite(held).all()
    assert len(np.unique(held[:, :, 0].reshape(len(held), -1), axis=0)) == len(held)  # no page is filled twice with the same


def test_time_by_kernel_sums_a_profile_s_events_on_the_device(monkeypatch):
    def named(name, **fields):
        return types.SimpleNamespace(name=name, **fields)

    events = [named("gemm_1", duration_ns=2e6), named("gemm_2", duration_ns=3e6), named("paged_attention.7", duration_ns=1e6)]
    events.append(named("void lib::reduce<32, float>(float*, int)", duration_ns=4e6))
    lines = [named("Stream #14(Compute)", events=events), named("XLA Modules", events=[named("jit", duration_ns=9e9)])]
    planes = [named("/device:GPU:0", lines=lines), named("/host:CPU", lines=lines)]
    profile = types.SimpleNamespace(from_file=lambda file: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", profile)
    expected = {"gemm": (5e-3, 2), "paged_attention": (1e-3, 1), "lib::reduce": (4e-3, 1)}
    assert device.device_time("x.pb") == {name: (pytest.approx(seconds), n) for name, (seconds, n) in expected.items()}


def test_a_device_takes_its_vendor_s_rate_and_the_measured_bandwidth():
    known = device.known_device({"device": "NVIDIA H100 80GB HBM3"}, 2e12)
    assert (known.bandwidth, known.rate) == (2e12, 989e12)
    assert device.known_device({"device": "x86_64 CPU"}, 1e9).rate is None
