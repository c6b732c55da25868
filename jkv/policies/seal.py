"""SEAL (arXiv 2504.07986): steers the model away from checking and changing course, so that it thinks less."""

from pathlib import Path

from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.reasoning.steering import CHECK_WORDS, Steer, SteeringVector, load_vector


@recipe(
    "SEAL",
    idea="keeps every token; steers hidden states so that the model checks itself less and writes less",
    arxiv="2504.07986",
)
def seal(
    vector: SteeringVector | Path | str,
    layer: int | None = None,
    strength: float = -1.0,
    growth: float = 0.0,
    interval: int = 128,
) -> Policy:
    """Steering only: `strength` times the vector is added to the input of `layer`, at each token after which a thought begins.

    `vector` is a `SteeringVector` or the file of one, which `jkv steer` writes. `layer` defaults to two thirds of the way up
    (the authors use 20 of 28 and of 32). Generated tokens are steered, prompt tokens are not. The cache is the full one.

    Rule:
      hidden = hidden + (strength - growth * checking thoughts so far) * vector, at the last token of each thought

    Departures:
      - `growth`, which is 0 by default, is SkipKV's adaptive form. It is updated every `interval` tokens.

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
    """Steering by a vector or the file of one; `layer` defaults to two thirds of the way up."""
    loaded = vector if isinstance(vector, SteeringVector) else load_vector(vector)
    return Steer(loaded, 2 * loaded.values.shape[0] // 3 if layer is None else layer, strength, growth, interval, keywords)
