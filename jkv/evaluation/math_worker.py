"""The process that parses and compares formulas with math-verify: it is killed when it takes too long, or too much memory.

A limit inside a process cannot be kept: a signal waits until C code returns, and sympy catches what its handler raises. So
`jkv.evaluation.time_limit` starts this file by its path (it imports nothing of jkv, and starts in a second), writes pairs of
formulas as JSON lines, and reads one truth value a line.
"""

import contextlib
import json
import os
import signal
import sys

MOST_BYTES = 4 << 30  # of address space


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    with contextlib.suppress(ImportError, OSError, ValueError):  # where the system has such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        gold, found, seconds = json.loads(line)
        if hasattr(signal, "alarm"):  # ends this process by itself where whoever asked was killed
            signal.alarm(int(seconds) + 10)
        try:
            trees = [parse(text, configs, parsing_timeout=None) for text in (gold, found)]
            is_equal = bool(verify(*trees, timeout_seconds=None, allow_set_relation_comp=True))
        except Exception:  # no limit on what a parser raises on arbitrary text
            is_equal = False
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(is_equal), file=answers, flush=True)


if __name__ == "__main__":
    main()
