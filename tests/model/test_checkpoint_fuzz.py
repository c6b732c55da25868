"""Any change of any field of a checkpoint's files: refused with a file's name, or a model that runs."""

import pytest

from tests.support import checkpoint_fuzz


def test_random_changes_of_any_field_are_refused_or_give_a_model_that_runs():
    counts, wrong = checkpoint_fuzz.fuzz(count=80, seed=0)
    assert not wrong
    assert counts["loaded"] > 5
    assert counts["refused"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_thousands_of_random_changes_are_refused_or_give_a_model_that_runs(seed):
    counts, wrong = checkpoint_fuzz.fuzz(count=3000, seed=seed)
    assert not wrong
    assert sum(counts.values()) == 3000
