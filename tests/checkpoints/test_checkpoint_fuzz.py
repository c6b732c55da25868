"""Any change of any field of a checkpoint's files: refused with a file's name, or a model that runs."""

import pytest

from tests.support import checkpoint_fuzz


@pytest.mark.parametrize(
    ("count", "seed"), [(80, 0), *(pytest.param(3000, seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_random_changes_of_any_field_are_refused_or_give_a_model_that_runs(count, seed):
    counts, wrong = checkpoint_fuzz.fuzz(count=count, seed=seed)
    assert not wrong
    assert sum(counts.values()) == count
    assert counts["loaded"] > count / 16
    assert counts["refused"] > count * 3 / 8
