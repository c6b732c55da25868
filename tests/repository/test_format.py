"""Format, lint and types."""

import sys

import pytest

from tests.repository.pages import run


@pytest.mark.parametrize("check", [("format", "--check"), ("check",)], ids=["format", "lint"])
def test_ruff_has_nothing_to_say(check):
    run(sys.executable, "-m", "ruff", *check, ".")


@pytest.mark.slow  # half a minute; `.ci/run` runs it
def test_types_are_consistent():
    run(sys.executable, "-m", "mypy")
