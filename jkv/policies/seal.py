"""SEAL (arXiv 2504.07986): steers thoughts away from checking and changing course, so that they get shorter."""

from pathlib import Path

from jkv.policies.base import Policy
from jkv.policies.recipe import recipe
from jkv.reasoning.steering import CHECK_WORDS, Steer, SteeringVector, load_vector


@recipe
def seal(
    vector: SteeringVector | Path | str,
    layer: int | None = None,
    strength: float = -1.0,
    growth: float = 0.0,
    interval: int = 128,
) -> Policy:
    """Steering alone: `strength` times the vector is added at `layer`'s input, to each token after which a thought begins.

    `vector` is a `SteeringVector` or a file of one (`jkv steer` writes it); `layer` defaults to the one two thirds up (the
    authors have 20 of 28 and of 32). With `growth`, the strength falls by so much for each checking thought so far, looked at
    every `interval` tokens (SkipKV's adaptive form). Tokens that the model makes are steered, those of the prompt are not. The
    cache is the full one.

    Raises:
      ValueError: a file that holds no vector, or a setting out of its range.
    """
    return Policy("seal", steer=steer_by(vector, layer, strength, growth, interval))


def steer_by(
    vector: SteeringVector | Path | str,
    layer: int | None = None,
    strength: float = -1.0,
    growth: float = 0.0,
    interval: int = 128,
    keywords: tuple[str, ...] = CHECK_WORDS,
) -> Steer:
    """Steering by a vector or a file of one, at the layer two thirds up unless told."""
    loaded = vector if isinstance(vector, SteeringVector) else load_vector(vector)
    return Steer(loaded, 2 * loaded.values.shape[0] // 3 if layer is None else layer, strength, growth, interval, keywords)
