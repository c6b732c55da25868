"""Every policy of the table at test size; what one reads of a model is drawn at random."""

import inspect

import numpy as np

import jkv
from jkv.policies import POLICIES, make
from jkv.testing import random_gate, random_networks, random_statistics

SMALL = {"budget": 24, "interval": 16, "window": 4, "num_queries": 4, "growth": 0.1, "tau": 0.3}


def vector_of(model):
    """A steering vector of every layer."""
    return jkv.SteeringVector(np.ones((model.config.num_layers, model.config.width), np.float32))


DRAWN = {"vector": vector_of, "statistics": random_statistics, "network": random_networks, "weights": random_gate}


def build(name, model, **changes):
    """A policy: only the settings that its recipe has."""
    fields = inspect.signature(POLICIES[name]).parameters
    drawn = {field: draw(model) for field, draw in DRAWN.items() if field in fields}
    return make(name, drawn | {field: value for field, value in (SMALL | changes).items() if field in fields})
