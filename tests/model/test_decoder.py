"""Parity with Hugging Face through the paged pool: the same logits for 64 decode steps, the same greedy tokens."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.checkpoints.families import FAMILIES
from jkv.engine import programs
from jkv.model import decoder

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=CASES)
def golden(request):
    """A checkpoint's model and the reference that Hugging Face computed for it."""
    return jkv.load(str(GOLDEN / request.param), dtype=jnp.float32), np.load(GOLDEN / request.param / "reference.npz")


# Neither pages nor the steps of a chunk know the family: what compiles anew for them is run on some families only.
LIKE_ANOTHER = ("gemma4", "gemma4_moe", "glm4_moe_air", "llama_tied", "phi3_longrope", "qwen3_window", "qwen3_yarn")
WITH_PAGES = [
    *(pytest.param(case, 4, marks=pytest.mark.slow if case in LIKE_ANOTHER else ()) for case in CASES),
    *(pytest.param(case, 16, marks=() if case == "qwen3" else pytest.mark.slow) for case in CASES),
]
IN_CHUNKS = [pytest.param(case, marks=() if case in ("llama_scaled", "phi3") else pytest.mark.slow) for case in CASES]


@pytest.mark.tested("64 decode steps")
@pytest.mark.parametrize(("golden", "page_size"), WITH_PAGES, indirect=["golden"])
def test_logits_of_64_decode_steps_through_the_pool_match(golden, page_size):
    model, reference = golden
    steps = len(reference["greedy"])
    engine = jkv.Engine(model.params, max_running=2, max_slots=100, page_size=page_size, chunk=1)
    engine.submit([1], max_new_tokens=1)  # takes row 0 and leaves it empty after a step
    ticket = engine.submit(reference["prompt"], max_new_tokens=steps, stop_ids=())
    engine.runner.execute(engine.scheduler.next())
    for step in range(steps):
        np.testing.assert_allclose(engine.runner.state.logits[1], reference["decode_logits"][step], atol=1e-4)
        engine.step()
    assert engine.result(ticket).tokens[0].tolist() == reference["greedy"].tolist()


@pytest.mark.tested("prompt")
@pytest.mark.parametrize("piece", [16, 5])
def test_logits_of_every_prompt_position_through_the_pool_match(golden, piece):
    model, reference = golden
    prompt = reference["prompt"]
    engine = jkv.Engine(model.params, max_running=2, max_slots=100, page_size=4)
    state, logits = engine.runner.state, []
    for start in range(0, len(prompt), piece):
        tokens = np.zeros((1, 16), np.int32)
        count = len(prompt[start : start + piece])
        tokens[0, :count] = prompt[start : start + piece]
        row = np.asarray([1], np.int32), tokens, np.asarray([count], np.int32)
        state, hidden, *_ = programs.prefill_chunk(model.params, state, *row)
        logits.append(decoder.unembed(model.params, hidden[0, :count]))
    np.testing.assert_allclose(np.concatenate(logits), reference["prompt_logits"], atol=1e-4)


@pytest.mark.parametrize("golden", IN_CHUNKS, indirect=True)
def test_generate_gives_the_same_greedy_tokens(golden):
    model, reference = golden
    out = jkv.generate(model, reference["prompt"], max_new_tokens=64, stop_ids=(), page_size=8, progress=False)
    assert out.tokens[0].tolist() == reference["greedy"].tolist()


def test_all_families_are_covered():
    assert {jkv.load(str(GOLDEN / name)).config.family for name in CASES} == FAMILIES.keys()
