"""Skips targets without a compiler, and says at the end which those were."""

from tests.aot import targets


def pytest_terminal_summary(terminalreporter):
    missing = {name: reason for name in targets.TARGETS if (reason := targets.why_missing(name))}
    for name, reason in missing.items():
        terminalreporter.write_line(f"NOT COMPILED for {name}: {reason}", yellow=True)
    if not missing:
        terminalreporter.write_line(f"compiled for {', '.join(targets.TARGETS)}")
