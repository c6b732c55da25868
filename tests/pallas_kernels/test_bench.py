"""The command that times kernels: what it says of those that run here, those that do not, and one that is wrong."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KERNELS, bench, timing
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import native, reference, shapes

IMPLEMENTATIONS = KERNELS["paged_attention"].implementations
ARGUMENTS = ["paged_attention", "--slots", "40", "--batch", "2"]


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 1e-4)
    monkeypatch.setattr(timing, "ROUNDS", 1)


def test_what_runs_is_timed_and_compared_and_what_does_not_says_why(tmp_path, capsys):
    assert bench.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("kernels-*.json"))
    rows = {row["implementation"]: row for row in report["kernels"] if row["case"] == "decode step"}
    assert set(rows) == set(IMPLEMENTATIONS)
    assert len(report["kernels"]) == len(shapes.CASES) * len(rows)
    assert all(rows[name]["milliseconds"] > 0 and rows[name]["agrees"] for name in ("reference", "cpu"))
    assert "this process computes on cpu" in rows["tpu"]["not_timed"]
    (table,) = (path.read_text() for path in tmp_path.glob("kernels-*.md"))
    assert table.strip() == bench.table(report) == capsys.readouterr().out.strip()
    elsewhere = {name for name, one in IMPLEMENTATIONS.items() if one.platform not in (None, "cpu")}
    elsewhere |= {"native"} if native.why_no_library() else set()
    assert table.count("not timed: ") == len(elsewhere) * len(shapes.CASES)


def test_an_implementation_that_is_wrong_fails_the_command(monkeypatch):
    def wrong(query, kv, page_table, length, log_weight, with_logits=False):
        out, log_total, logits = reference.paged_attention(query, kv, page_table, length, log_weight, with_logits)
        return out.at[0, 0].multiply(1.001), log_total, logits

    monkeypatch.setitem(IMPLEMENTATIONS, "cpu", Implementation(wrong, "cpu"))
    assert bench.main(ARGUMENTS) == 1


def test_nothing_is_begun_when_the_time_is_over(capsys):
    here = [name for name, one in IMPLEMENTATIONS.items() if one.platform in (None, "cpu")]
    here.remove("native") if native.why_no_library() else None
    assert bench.main([*ARGUMENTS, "--seconds", "0"]) == 0
    assert capsys.readouterr().out.count("not timed: out of time") == len(here) * len(shapes.CASES)


def test_unknown_names_are_refused(capsys):
    for arguments, known in ((["nonsense"], "paged_attention"), ([], "--all"), ([*ARGUMENTS, "--models", "big"], "qwq-32b")):
        with pytest.raises(SystemExit):
            bench.main(arguments)
        assert known in capsys.readouterr().err.splitlines()[-1]


def test_bytes_are_those_of_the_arguments():
    workload = bench.Workload(batch=2, slots=40, page_size=8, dtype=jnp.float32, layers=1)
    tiny = bench.MODELS["tiny-reasoner"]
    assert shapes.num_bytes(tiny, workload) == 4 * (2 * 4 * 40 * 64 + 2 * 4 * 2 * 64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_case_of_every_kernel_runs_here_by_its_reference(kernel):
    """At sizes of tests: a case whose values do not fit its arguments would be found on a device only."""
    call, _, shapes = KERNELS[kernel]
    model = bench.MODELS["tiny-reasoner"]._replace(num_layers=2)
    for case in shapes.CASES:
        small = {"batch": 2, "slots": 2048, "page_size": 16, "dtype": jnp.float32, "layers": 1} | case.workload
        workload = bench.Workload(**small | {"slots": min(small["slots"], 256)})
        args, values = (make(model, workload, **case.options) for make in (shapes.arguments, shapes.values))
        described = jax.tree.map(lambda x: (x.shape, x.dtype), (args, values))
        assert described[0] == described[1]
        run = functools.partial(call, implementation="reference")
        out = jax.jit(bench.gradients(run) if case.is_gradient else run)(*values)
        assert all(np.isfinite(x).any() for x in jax.tree.leaves(out))
        assert shapes.num_bytes(model, workload, **case.options) > 0


def test_compaction_is_reported_as_a_share_of_the_attention_between_two():
    def row(kernel, case, implementation, milliseconds):
        return {"kernel": kernel, "case": case, "model": "m", "implementation": implementation} | milliseconds

    rows = [
        row("attention_mass", "score", "gpu", {"milliseconds": 0.1}),
        row("attention_mass", "score", "reference", {"milliseconds": 9.0}),
        row("key_redundancy", "compaction", "gpu", {"milliseconds": 0.3}),
        row("key_redundancy", "long rows", "gpu", {"milliseconds": 0.01}),
        row("take_slots", "compaction", "gpu", {"milliseconds": 0.24}),
    ]
    assert bench.compaction_share(rows, "m") is None
    rows.append(row("paged_attention", "decode step", "gpu", {"milliseconds": 0.05}))
    assert "0.640 ms a layer (0.100 mass, 0.300 redundancy, 0.240 moving), 10.0% of" in bench.compaction_share(rows, "m")
    assert bench.compaction_share(rows, "other") is None
