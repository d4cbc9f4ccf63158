"""How a program ends that was stopped by its bytes: a budget that cannot be met in one line, without a traceback."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from jaxtensile.api.tally import tell
from jaxtensile.errors import BudgetError, RejectedError
from jaxtensile.places import short_place

OF_EXEC = "the budget is that of `jaxtensile exec` or `jaxtensile.install`"
"""The note of an error whose traceback tells the user nothing."""
_INSIDE = ("jax", "jaxlib", "jaxtensile")


def in_one_line(error: BaseException) -> bool:
    """Tell an error of ours, and the line of the user that met it; False if it is none of ours."""
    if not isinstance(error, BudgetError | RejectedError) or OF_EXEC not in getattr(error, "__notes__", ()):
        return False
    sys.stdout.flush()
    place = _users_line(error.__traceback__)
    tell(f"{place}: {error}" if place else str(error))
    return True


def _users_line(where: TracebackType | None) -> str:
    """The innermost line of a traceback that is neither JAX's nor ours."""
    found = ""
    for frame, line in traceback.walk_tb(where):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _INSIDE:
            found = f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"
    return short_place(found)


__all__ = ["OF_EXEC", "in_one_line"]
