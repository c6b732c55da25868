"""Compiles afresh and as users do, and says at the end for which targets nothing was compiled."""

import os

import jax
import pytest

from tests.aot import targets

os.environ["XLA_FLAGS"] = ""  # read when the first program compiles


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is compiled for a target that is not of every day takes as long again, and is `slow`."""
    for item in items:
        target = item.callspec.params.get("target") if hasattr(item, "callspec") else None
        if target in set(targets.TARGETS) - set(targets.EVERYDAY):
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
