"""Ctrl-C at a chosen line."""

import sys


def lines_of(what, call):
    """How many lines of ``what`` a call runs, each of which is interrupted in turn by ``interrupted``."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename.endswith(what):
            count += event == "line"
            return trace
        return None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def interrupted(what, call, at):
    left = at

    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.endswith(what):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
