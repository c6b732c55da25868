"""`jkv models` lists the models that have names."""

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "models",
        help="list the models that have names",
        description="Lists the models that have names: where the weights are, their number, the positions, how tokens are "
        "drawn, and a budget to begin with.",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints each name with its size, where its weights are, how its tokens are drawn, and a budget to begin with."""
    from jkv.checkpoints.cards import card_of
    from jkv.checkpoints.loading import shipped_folders
    from jkv.checkpoints.model_shapes import SHAPES, find_shape
    from jkv.model.params import count_weights
    from jkv.model.weight_shapes import weight_shapes

    for name in shipped_folders():
        print(f"{name}: part of the package; arithmetic modulo 10; greedy")
    for name in SHAPES:
        card, config = card_of(name), find_shape(name)[1]
        assert card is not None
        drawn = f"temperature {card.temperature}, top-p {card.top_p:g}" if card.temperature else "greedy"
        drawn += f", top-k {card.top_k}" if card.top_k else ""
        drawn += f", min-p {card.min_p:g}" if card.min_p else ""
        drawn += f", repetition penalty {card.repetition_penalty:g}" if card.repetition_penalty != 1 else ""
        source = f"{card.hub}, or `{card.command}`" if card.package else card.hub
        print(
            f"{name}: {source}; {count_weights(weight_shapes(config)) / 1e9:.3g} billion weights; {config.max_positions:,} "
            f"positions; {drawn}; begin with --budget {card.budget} --interval {card.interval}"
        )
    print("For the policy and budget of a model on your own text: jkv choose NAME --texts FILE")
    return 0
