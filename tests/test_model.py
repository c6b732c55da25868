"""Parity with Hugging Face through the paged pool: the same logits for 64 decode steps, the same greedy tokens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import engine
from jkv.policies import full
from jkv.sampling import Sampling

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    """A checkpoint's model and the reference that Hugging Face computed for it."""
    return jkv.load(str(GOLDEN / request.param), dtype=jnp.float32), np.load(GOLDEN / request.param / "reference.npz")


@pytest.mark.parametrize("page_size", [4, 16])
def test_logits_of_64_decode_steps_through_the_pool_match(golden, page_size):
    model, reference = golden
    steps = len(reference["greedy"])
    request = engine.Request(reference["prompt"], full(), Sampling(temperature=0.0), 0, steps, ())
    run = engine.Engine(model.params, num_rows=2, num_pages=400, max_pages=-(-100 // page_size), page_size=page_size, chunk=1)
    run.rows[1] = engine.Row(request, engine.Completion(), len(request.prompt), 100)  # beside an empty row
    run._prefill(1, request.prompt)
    for step in range(steps):
        np.testing.assert_allclose(run.state.logits[1], reference["decode_logits"][step], atol=1e-4)
        run._decode()
    assert run.rows[1].completion.tokens == reference["greedy"].tolist()


def test_generate_gives_the_same_greedy_tokens(golden):
    model, reference = golden
    out = jkv.generate(model, reference["prompt"], max_new_tokens=64, stop_ids=(), page_size=8, progress=False)
    assert out.tokens[0].tolist() == reference["greedy"].tolist()


def test_all_four_families_are_covered():
    assert {name.partition("_")[0] for name in CASES} >= {"llama", "qwen2", "qwen3", "phi3"}
