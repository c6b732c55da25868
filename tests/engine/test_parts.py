"""A new part of a decode step touches its own file and the table; other programs and rows do not see it."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine.parts.base import Draw, StepPart
from jkv.engine.parts.returned import OwnLogProbs
from jkv.engine.parts.table import KINDS, Parts
from jkv.testing import tiny_model
from tests.repository.pages import ROOT

# As a grammar would: it masks logits, and carries from step to step where it is.
FILE = '''"""Tokens that alternate between even and odd ids, in requests of the salt "alternate"."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jkv.engine.parts.base import Carried, Draw, Rows, Step, StepPart


class Alternating(StepPart):
    """Which rows alternate, and whether the next token is odd, which it carries on."""

    alternates: Annotated[Any, "B"]
    is_odd: Annotated[Any, "B"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.cache_salt == "alternate" for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "Alternating":
        alternates = np.zeros(rows.num_rows, bool)
        for i, sample in rows.running.items():
            alternates[i] = sample.request.cache_salt == "alternate"
        return cls(alternates, np.zeros(rows.num_rows, bool))

    def at(self, rows: Rows) -> "Alternating":
        is_odd = np.zeros(rows.num_rows, bool)
        for i, sample in rows.running.items():
            is_odd[i] = sample.generated % 2
        return self.replace(is_odd=is_odd)

    def begin(self, carried: Carried) -> Any:
        return self.is_odd

    def draw(self, draw: Draw, carry: Any) -> Draw:
        odd = jnp.arange(draw.logits.shape[-1], dtype=jnp.int32) % 2 == 1
        is_allowed = (odd == carry[:, None, None]) | ~self.alternates[:, None, None]
        return draw._replace(logits=jnp.where(is_allowed, draw.logits, -jnp.inf))

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        return step, carry ^ step.is_active
'''
IMPORT = "from jkv.engine.parts.alternating import Alternating\n"
FIELD = "    alternating: Alternating | None = None\n"
RUN = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
import jkv
from jkv.testing import tiny_model

def tokens(**settings):
    engine = jkv.Engine(tiny_model(), max_running=3, max_slots=64, page_size=4, **settings)
    sampling = jkv.Sampling(seed=1)
    tickets = [engine.submit([5, 6, 7], sampling=sampling, max_new_tokens=21, stop_ids=(), cache_salt=salt)
               for salt in ("", "alternate")]
    engine.run()
    outs = [engine.result(ticket) for ticket in tickets]
    assert all(np.isfinite(out.logprobs).all() for out in outs)
    return [out.tokens[0].tolist() for out in outs]

print(json.dumps([tokens(), tokens(mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)))]))
"""


def test_a_new_part_touches_its_own_file_and_the_table(tmp_path):
    for folder in ("jkv", "pallas_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "jkv/engine/parts/alternating.py").write_text(FILE)
    table = tmp_path / "jkv/engine/parts/table.py"
    last = "    own: OwnLogProbs | None = None\n"
    first = "from jkv.engine.parts.alignment"
    table.write_text(table.read_text().replace(first, IMPORT + first).replace(last, last + FIELD))
    flags = "--xla_force_host_platform_device_count=2"
    environment = {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "XLA_FLAGS": flags}
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    alone, split = json.loads(run.stdout)
    engine = jkv.Engine(tiny_model(), max_running=3, max_slots=64, page_size=4)
    ticket = engine.submit([5, 6, 7], sampling=jkv.Sampling(seed=1), max_new_tokens=21, stop_ids=())
    engine.run()
    expected = engine.result(ticket).tokens[0].tolist()
    for plain, alternating in (alone, split):
        assert plain == expected
        assert [token % 2 for token in alternating] == [i % 2 for i in range(21)]


def test_a_plain_chunk_has_no_parts_and_carries_nothing():
    engine = jkv.Engine(tiny_model(), max_running=2, max_slots=64, page_size=4)
    engine.submit([5, 6, 7], max_new_tokens=9, stop_ids=())
    engine.step()
    inputs = engine.runner._chunk_inputs(engine.scheduler.running)
    assert inputs.parts == Parts()
    assert not jax.tree.leaves(engine.runner._carried)
    assert engine.runner.parts_on == set()


@pytest.mark.parametrize("name", KINDS)
def test_every_part_says_when_it_is_on_and_begins_with_its_inputs(name):
    kind = KINDS[name]
    assert issubclass(kind, StepPart)
    for method in ("is_on", "of"):
        assert method in vars(kind), f"{name} must define {method}"


def test_parts_change_nothing_of_rows_that_do_not_ask_for_them():
    """All parts that requests turn on, beside a plain request, which draws as it does alone."""
    model, sampling = tiny_model(), jkv.Sampling(seed=1)
    settings = {"max_running": 4, "max_slots": 64, "page_size": 4}
    alone = jkv.Engine(model, **settings)
    ticket = alone.submit([5, 6, 7], sampling=sampling, max_new_tokens=21, stop_ids=())
    alone.run()
    expected = alone.result(ticket)
    engine = jkv.Engine(model, **settings)
    penalised = jkv.Sampling(seed=1, presence_penalty=0.5, repetition_penalty=1.3)
    engine.submit([5, 6, 7], sampling=penalised, max_new_tokens=21, stop_ids=())
    engine.submit([5, 6, 7], sampling=sampling, max_new_tokens=21, stop_ids=(), forced_tokens=[1, 2, 3])
    ticket = engine.submit([5, 6, 7], sampling=sampling, max_new_tokens=21, stop_ids=())
    engine.run()
    assert engine.runner.parts_on == {"penalties", "forced"}
    out = engine.result(ticket)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.logprobs, expected.logprobs)


def test_a_part_that_masks_logits_leaves_the_models_own_log_probabilities():
    """As greedy draws of a masked row would otherwise return the masked ones for them."""
    logits, token = jnp.array([[[1.0, 3.0, 2.0]]]), jnp.array([[2]])
    masked = Draw(jnp.array([[[1.0, -jnp.inf, 2.0]]]), own=logits, number=jnp.zeros_like(token))
    own = OwnLogProbs().drawn(masked, token)["log_prob_own"]
    np.testing.assert_allclose(own, jax.nn.log_softmax(logits)[..., 2], atol=1e-6)
    assert OwnLogProbs().drawn(masked._replace(is_own=True), token) == {}
