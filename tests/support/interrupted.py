"""Ctrl-C before any chosen line of some functions."""

import sys

from jkv.engine import interrupts


def interrupted_at(line, functions, call):
    """Whether a call was interrupted: Ctrl-C comes before line `line` of those of the functions that it runs."""
    codes, seen, left = {function.__code__ for function in functions}, set(), line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code not in codes:
            return None
        place = frame.f_code, frame.f_lineno
        is_new = place not in seen  # else the line is the end of a `with`, which Python runs to its end
        if event == "line" and is_new and not interrupts.DEFERRED:  # else Ctrl-C waits
            seen.add(place)
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
