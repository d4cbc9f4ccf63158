"""The errors, each with the value, the bound and the way out.

Invariant: every error that a user can cause derives from ``JaxtensileError``; its text is complete without a traceback.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxtensile.places import short_place
from jaxtensile.units import Bytes, format_bytes


class JaxtensileError(Exception):
    """Base of every error raised on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One op that forces memory: its primitive, its place in the user's code, and its bytes."""

    primitive: str
    source: str
    nbytes: Bytes

    def __str__(self) -> str:
        # In angle brackets: no line of the user's.
        place = "" if self.source.startswith("<") else f" at {short_place(self.source)}"
        return f"{self.primitive}{place} needs {format_bytes(self.nbytes)}"


class BudgetError(JaxtensileError, ValueError):
    """A budget that cannot be read or met.

    ``needs``: the smallest budget found to be met, in bytes (None for unreadable text); asking for it succeeds at once.
    ``has``: the budget asked for, in bytes. ``culprits``: the ops that force ``needs``.
    """

    def __init__(
        self,
        message: str,
        *,
        needs: Bytes | None = None,
        has: Bytes | None = None,
        culprits: tuple[Culprit, ...] = (),
    ) -> None:
        super().__init__(message)
        self.needs = needs
        self.has = has
        self.culprits = culprits

    def anew(self) -> BudgetError:
        """A copy of the error, to raise again."""
        return type(self)(str(self), needs=self.needs, has=self.has, culprits=self.culprits)


class OptionError(JaxtensileError, ValueError, TypeError):
    """An option that does not exist, or a value that it cannot have."""


def unknown(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """What to say of a name that is none of ``known``: the nearest; ``otherwise`` (all of them) if none is near."""
    from difflib import get_close_matches  # few programs have such a name

    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise or f"there are {', '.join(names)}"


def require_known(function: str, given: Iterable[str], known: Collection[str], otherwise: str = "") -> None:
    """``OptionError`` for a keyword argument that ``function`` does not know; ``otherwise`` as for ``unknown``."""
    for name in given:
        if name not in known:
            hint = unknown(name, known, otherwise)
            raise OptionError(f"{function}() got an unexpected keyword argument {name!r}: {hint}")


class TargetError(JaxtensileError, ValueError):
    """A target that does not exist, or has no compiler plugin installed."""


class SolverError(JaxtensileError, ValueError):
    """A solver that does not exist, or cannot plan this program."""


class ConfigError(JaxtensileError, ValueError):
    """A config with an impossible entry: file, key, value, what is allowed."""


class ConfigWarning(UserWarning):
    """A config with a useless entry: a name that no function has."""


class IgnoredBudgetWarning(UserWarning):
    """A planned function was called inside another transformation, where its budget has no effect."""


class ManyPlansWarning(UserWarning):
    """A function was planned for many shapes of its arguments, which takes seconds each."""


class InternalError(JaxtensileError, RuntimeError):
    """A fault of jaxtensile itself without a workaround; its cause is the original error."""


class PlanningError(InternalError, BudgetError):
    """Planning failed by a fault of jaxtensile itself, and the program as written does not fit the budget.

    ``needs``: bytes of that program; None if its compiler had no figure.
    """


class InternalErrorWarning(RuntimeWarning):
    """A part of jaxtensile failed and was left out: results are right, bytes or time may be higher."""


class StoppedError(Exception):
    """No error: nobody waits for this plan any more."""


class VerifyError(JaxtensileError, RuntimeError):
    """The compiled program broke the plan's promise."""


class AgreementError(JaxtensileError, RuntimeError):
    """The processes of one program cannot run one plan: they ask for different things, or one is missing or failed.

    All of them raise it with the same text, and none has run anything.
    """


class CoordinatorError(JaxtensileError, RuntimeError):
    """The coordinator refused, or could not be reached."""


class RejectedError(CoordinatorError):
    """The coordinator will never grant a job's request; the text says why."""


class NotAdmittedError(CoordinatorError, TimeoutError):
    """A job's wait for its lease timed out. It holds nothing, and may go on waiting."""


class UnreachableError(CoordinatorError):
    """Nobody answers at the coordinator's socket."""


class LostLeaseError(CoordinatorError):
    """The coordinator no longer knows a job's lease: the job must release all and ask anew."""
