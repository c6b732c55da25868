"""The scaling of rotary frequencies, a part of a model's configuration; `jkv.model.rotary` computes it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies; the fields are those of a checkpoint's `rope_parameters`."""

    kind: str = "default"  # default | linear | llama3 | yarn | longrope | proportional
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0  # of YaRN: turns over the original context, from which a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by the factor
    attention_factor: float = 1.0  # multiplies rotated queries and keys
    truncates: bool = True  # whether the ramp between the two ends at whole pairs of channels
    short_factor: tuple[float, ...] = ()  # of LongRoPE: divide each frequency, in models of at most the original context
    long_factor: tuple[float, ...] = ()  # and in longer ones
    share: float = 1.0  # of "proportional": of the pairs of channels, those of the highest frequencies, that turn


UNSCALED = RopeScaling()
