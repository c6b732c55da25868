"""Compiles afresh and as users do, and says at the end for which targets nothing was compiled."""

import os

import jax
import pytest

from pallas_kernels.models import MODELS
from tests.aot import targets

os.environ["XLA_FLAGS"] = ""  # read when the first program compiles


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is compiled for a target that is not of every day, or there for more than a few models, is `slow`."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        target, model = given.get("target"), given.get("model", given.get("name"))
        models = targets.EVERYDAY.get(target, ()) if target in targets.TARGETS else None
        if models is not None and (not models or (model in MODELS and model not in models)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def without_the_compilation_cache():
    """Programs for an absent device can be written to JAX's persistent cache but not read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def pytest_terminal_summary(terminalreporter):
    missing = {name: reason for name in targets.TARGETS if (reason := targets.why_missing(name))}
    for name, reason in missing.items():
        terminalreporter.write_line(f"NOT COMPILED for {name}: {reason}", yellow=True)
    if len(missing) < len(targets.TARGETS):
        terminalreporter.write_line(f"compiled for {', '.join(name for name in targets.TARGETS if name not in missing)}")
