"""What policies that were measured or trained do at positions far beyond those texts: the same as at the first ones.

Ages beyond those of training are foresight's alone (`test_foresight`).
"""

import jax
import numpy as np
import pytest

import jkv
from jkv.eviction.calibration import QueryStatistics
from jkv.testing import looping_view, random_gate, random_networks, random_statistics, tiny_model

FAR = 8 * 4096  # eight times the longest piece that `jkv.calibrate` reads
POLICIES = {
    "tri_attention": lambda model: jkv.tri_attention(24, random_statistics(model), protect_prompt=False),
    "expected_attention": lambda model: jkv.expected_attention(24, num_queries=8, sinks=0),
    "foresight": lambda model: jkv.foresight(24, random_networks(model), sinks=0),
    "learned_gate": lambda model: jkv.learned_gate(random_gate(model), 24),
}


@pytest.mark.parametrize("name", POLICIES)
def test_scores_are_the_same_far_beyond_the_texts_that_were_measured(name):
    policy = POLICIES[name](tiny_model())
    near, far = (looping_view(np.random.default_rng(0), 40, start=start, copies=1) for start in (0, FAR))
    if name == "foresight":
        near, far = (view._replace(calibration=moments_of(policy)) for view in (near, far))
    rate = jax.jit(policy.evict.score)
    one, other = np.asarray(rate(near)), np.asarray(rate(far))
    assert np.isfinite(other).all()
    np.testing.assert_allclose(one, other, atol=0.02 * np.ptp(one))  # float32 angles of large positions are rough


def moments_of(policy):
    """The networks of the first layer."""
    assert not isinstance(policy.calibration, QueryStatistics)
    return jax.tree.map(lambda x: x[:1], policy.calibration.arrays)
