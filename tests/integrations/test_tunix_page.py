"""The page that shows GRPO with tunix runs as it is."""

import numpy as np
import pytest

pytest.importorskip("tunix")

from research.grpo import with_tunix
from tests.support.tunix_models import tunix_rules

__all__ = ["tunix_rules"]  # a fixture


def test_the_page_trains_and_its_weights_generate(capsys):
    rewards, params = with_tunix.train(steps=6)
    assert capsys.readouterr().out.splitlines()[-1] == f"step 6: reward {rewards[-1]:.3f}"
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    assert params.config.vocab_size == 13
    assert with_tunix.count([], ["89012", "1?3"]) == [4 / with_tunix.NEW_TOKENS, 0]
