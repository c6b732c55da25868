"""The pages that show GRPO with optax, and with PyTorch beside a server, run as they are."""

import jax
import numpy as np
import pytest

from research.grpo import with_optax


@pytest.mark.everyday(where=lambda loss: loss == "replay")
@pytest.mark.parametrize("loss", ["replay", "dense"])
def test_optax_alone_trains(capsys, loss):
    with jax.numpy_dtype_promotion("standard"):  # optax is not written for strict promotion
        rewards, model = with_optax.train(steps=12, loss=loss)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"step 12: reward {rewards[-1]:.3f}, difference ")
    assert (float(last.split()[-2]) < 1e-5) == (loss == "replay")
    assert np.mean(rewards[-4:]) > 1.2 * np.mean(rewards[:4])
    assert model.config.vocab_size == 16


def test_a_torch_process_trains_what_a_server_samples(capsys):
    pytest.importorskip("torch")
    from research.grpo import with_torch

    rewards = with_torch.train(steps=3)
    assert len(rewards) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"step 3: reward {rewards[-1]:.3f}, importance weights ")
    assert with_torch.reward([8, 9, 0, 1, 10, 11]) == 2 / 5
