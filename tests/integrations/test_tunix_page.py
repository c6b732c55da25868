"""The page that shows GRPO with tunix runs as it is."""

import jax
import numpy as np
import pytest

pytest.importorskip("tunix")

from jkv.integrations.tunix import JkvRollout, params_of
from jkv.model.params import LowRank
from jkv.verify import num_compiled
from research.grpo import with_tunix
from tests.support.tunix_models import tunix_rules

__all__ = ["tunix_rules"]  # a fixture


def test_the_page_trains_and_its_weights_generate(capsys):
    rewards, params = with_tunix.train(steps=6)
    assert capsys.readouterr().out.splitlines()[-1] == f"step 6: reward {rewards[-1]:.3f}"
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2])
    assert params.config.vocab_size == 13
    assert with_tunix.count([], ["89012", "1?3"]) == [4 / with_tunix.NEW_TOKENS, 0]


def test_with_lora_the_page_trains_an_adapter_and_sends_nothing_else(monkeypatch):
    sent, compiled, versions, before = [], [], [], num_compiled()  # tunix takes all listeners to compilation away at its end

    class Elsewhere(JkvRollout):
        """As on a mesh of its own: it does not read the trainer's weights."""

        def __init__(self, *args, **settings):
            super().__init__(*args, live=False, **settings)

        def update_params(self, params, filter_types=None):
            super().update_params(params, filter_types)
            sent.append(sum(leaf.nbytes for leaf in jax.tree.leaves(params)))

        def generate(self, *args, **kwargs):
            out = super().generate(*args, **kwargs)
            compiled.append(num_compiled())
            versions.append(set(self.last.policy_version[self.last.mask].tolist()))
            return out

    monkeypatch.setattr(with_tunix, "JkvRollout", Elsewhere)
    rewards, params = with_tunix.train(steps=3, lora_rank=2)
    assert len(rewards) == 3
    start = params_of(with_tunix.make_actor(lora_rank=2))
    of_adapter = 0
    for old, new in zip(*(jax.tree.leaves(tree, is_leaf=is_adapter) for tree in (start, params)), strict=True):
        if is_adapter(new):
            assert not np.asarray(old.up).any()
            assert np.asarray(new.up).any()
            of_adapter += new.down.nbytes + new.up.nbytes
            old, new = old.base, new.base
        np.testing.assert_array_equal(old, new)
    assert sent == [of_adapter] * 3 == [7_168] * 3
    assert versions == [{0}, {1}, {2}]
    assert compiled == [compiled[0]] * 3
    assert compiled[0] > before


def is_adapter(node):
    return isinstance(node, LowRank)
