"""The optimisers of training runs: AdamW, and Muon, with which a small model finds look-ups in far fewer steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jkv.model.params import Params

MUON_SCALE = 20.0  # Muon's rate for matrices over the configured one, which is Adam's for all else
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Muon's authors: five steps bring all singular values to about 1


@dataclasses.dataclass(frozen=True)
class Rates:
    """Learning rates at steps, with straight lines between them."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, step: Int[Array, ""]) -> Float[Array, ""]:
        steps, rates = (jnp.array(column, jnp.float32) for column in zip(*self.points, strict=True))
        return jnp.interp(step.astype(jnp.float32), steps, rates)


def make_optimizer(name: str, points: tuple[tuple[int, float], ...], weight_decay: float) -> optax.GradientTransformation:
    """An optimiser with clipped gradients, its learning rate a piecewise linear function of the step.

    Raises:
      ValueError: a name other than "adamw" and "muon".
    """
    if name == "adamw":
        own = optax.adamw(Rates(points), b1=0.9, b2=0.98, weight_decay=weight_decay, mask=is_matrix)
    elif name == "muon":
        decay = optax.add_decayed_weights(weight_decay, mask=is_matrix)
        own = optax.chain(muon(), decay, optax.scale_by_learning_rate(Rates(points)))
    else:
        raise ValueError(f'optimizer must be "adamw" or "muon"; got {name!r}.')
    return optax.chain(optax.clip_by_global_norm(1.0), own)


def is_matrix(params: Params) -> Params:
    """Which weights decay: matrices do, norms and biases do not."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


class MuonState(NamedTuple):
    """Both states of every weight, of which each weight uses one."""

    adam: Any
    momentum: Any


def muon() -> optax.GradientTransformation:
    """Muon for the layers' matrices (Jordan 2024, https://kellerjordan.github.io/posts/muon), Adam for all other weights."""
    adam, momentum = optax.scale_by_adam(b1=0.9, b2=0.98), optax.trace(0.95, nesterov=True)

    def init(params: Params) -> MuonState:
        return MuonState(adam.init(params), momentum.init(params))

    def update(gradient: Params, state: MuonState, params: Params | None = None) -> tuple[Params, MuonState]:
        by_adam, adam_state = adam.update(gradient, state.adam, params)
        pulled, momentum_state = momentum.update(gradient, state.momentum, params)
        mixed = by_adam.replace(layers=orthogonal_matrices(by_adam.layers, pulled.layers))
        return mixed, MuonState(adam_state, momentum_state)

    return optax.GradientTransformation(init, update)


def orthogonal_matrices(others: Any, pulled: Any) -> Any:
    """`MUON_SCALE` times the orthogonal matrix of each matrix of `pulled`, and the leaves of `others` for all else.

    Matrices of one shape are one batch, so that an accelerator starts few programs.
    """
    leaves, structure = jax.tree.flatten(others)
    matrices = jax.tree.leaves(pulled)
    for shape in dict.fromkeys(matrix.shape for matrix in matrices if matrix.ndim == 2):
        places = [i for i, matrix in enumerate(matrices) if matrix.shape == shape]
        whole = MUON_SCALE * jax.vmap(orthogonal)(jnp.stack([matrices[i] for i in places]))
        for i, place in enumerate(places):
            leaves[place] = whole[i]
    return jax.tree.unflatten(structure, leaves)


def orthogonal(matrix: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """The matrix with singular values of about 1 (Newton-Schulz), larger by sqrt(n / m) where it is wider than high."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.T
        x = first * x + (third * square + fifth * (square @ square)) @ x
    return (x.T if tall else x) * max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5
