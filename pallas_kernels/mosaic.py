"""`jax.experimental.pallas.tpu`, imported when a kernel for a TPU is first traced: it takes as long as a third of JAX."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("jax.experimental.pallas.tpu"), name)
