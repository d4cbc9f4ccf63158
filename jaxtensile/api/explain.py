"""How a program ends that was stopped by its bytes: a budget that cannot be met in one line, without a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from jaxtensile.api.tally import tell
from jaxtensile.errors import BudgetError, RejectedError
from jaxtensile.places import is_own, short_place

OF_EXEC = "the budget is that of `jaxtensile exec` or `jaxtensile.install`"
"""The note of an error whose traceback tells the user nothing."""
_INSIDE = ("jax", "jaxlib", "jaxtensile")


def in_one_line(error: BaseException) -> bool:
    """Tell an error of ours, and the line of the user that met it; False if it is none of ours."""
    if not isinstance(error, BudgetError | RejectedError) or OF_EXEC not in getattr(error, "__notes__", ()):
        return False
    sys.stdout.flush()
    place = users_line(reversed(list(traceback.walk_tb(error.__traceback__))))
    tell(f"{short_place(place)}: {error}" if place else str(error))
    return True


def users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first line that is the user's own, else the first that is neither JAX's nor ours; empty without any.

    ``frames``: with their lines, the innermost first.
    """
    found = ""
    for frame, line in frames:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
            continue
        place = f"{frame.f_code.co_filename}:{line}"
        if is_own(frame.f_code.co_filename):
            return place
        found = found or place
    return found


__all__ = ["OF_EXEC", "in_one_line", "users_line"]
