"""Peers of decode attention: those that run here are timed and agree, and those that do not say why."""

import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import peers, timing
from pallas_kernels.models import Workload

SMALL = Workload(batch=2, slots=32, page_size=peers.PAGE_SIZES[0], dtype=jnp.float32, layers=1)
DENSE = [f"{name}, contiguous" for name in ("cudnn", "xla", "tokamax mosaic", "tokamax triton", "tokamax xla")]


@pytest.fixture(autouse=True)
def at_sizes_of_a_test(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 1e-4)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(peers, "SLOTS", (32,))
    monkeypatch.setattr(peers, "ROWS", (2,))
    with jax.numpy_dtype_promotion("standard"):  # as in a run of the benchmark: the peers rely on it
        yield


def outputs(*names):
    """What contenders compute."""
    return [np.asarray(run(*values()), np.float32) for name, run, values in peers.contenders(SMALL) if name in names]


def rows():
    """The report's rows by implementation, of the pages that all contenders are timed beside."""
    return {row["implementation"]: row for row in peers.rows_of_peers(1e9, 1e9) if row["page_size"] == SMALL.page_size}


def test_a_peer_that_is_not_there_is_a_row_of_the_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)  # what an import finds that may not succeed
    found = rows()
    assert [name for name in found if "contiguous" in name] == DENSE
    assert found["xla, contiguous"]["milliseconds"] > 0
    for name in DENSE[2:]:
        assert found[name]["not_timed"].startswith("RuntimeError: tokamax must be installed, with Python 3.12 or higher")


def test_tokamax_is_called_by_the_name_of_its_implementation(monkeypatch):
    called = []

    def attend(query, key, value, implementation):
        called.append(implementation)
        return jax.nn.dot_product_attention(query, key, value)

    monkeypatch.setitem(sys.modules, "tokamax", types.SimpleNamespace(dot_product_attention=attend))
    found = rows()
    assert set(called) == {"mosaic", "triton", "xla"}
    assert all(found[name]["milliseconds"] > 0 for name in DENSE[2:])


@pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")
def test_the_tokamax_that_is_installed_agrees_with_jax():
    own, theirs = outputs("xla, contiguous", "tokamax xla, contiguous")
    np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-5)
