"""One name for the command lines of `jkv` and of `python -m research.bench`."""

from jkv import cli
from research.bench import __main__ as research

BENCHES = (*research.BENCHES, "tables")


def main(arguments):
    """Runs ("bench", NAME, ...) where its code is; returns the exit status."""
    is_research = list(arguments[:1]) == ["bench"] and len(arguments) > 1 and arguments[1] in BENCHES
    return research.main(list(arguments[1:])) if is_research else cli.main(arguments)
