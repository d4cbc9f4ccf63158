"""What can go wrong, each with the value, the bound and the way out.

Invariant: every error a user can cause derives from ``JaxtensileError``; its text is
complete without a traceback.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.places import short_place
from jaxtensile.units import Bytes, format_bytes


class JaxtensileError(Exception):
    """Base of every error raised on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One op that forces memory: its primitive, where the user wrote it, and the bytes it needs."""

    primitive: str
    source: str
    nbytes: Bytes

    def __str__(self) -> str:
        return f"{self.primitive} at {short_place(self.source)} needs {format_bytes(self.nbytes)}"


class BudgetError(JaxtensileError, ValueError):
    """A budget that cannot be read or cannot be met.

    ``needs``: the smallest budget that was found to be met, in bytes (None when the text could not be read): asked for,
    it is met at once;
    ``has``: the budget asked for, in bytes; ``culprits``: the ops that force ``needs``.
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
        """The same error, to be raised again."""
        return type(self)(str(self), needs=self.needs, has=self.has, culprits=self.culprits)


class OptionError(JaxtensileError, ValueError, TypeError):
    """An option that does not exist, or a value that it cannot have."""


class TargetError(JaxtensileError, ValueError):
    """A target that does not exist, or whose compiler plugin is not installed."""


class SolverError(JaxtensileError, ValueError):
    """A solver that does not exist, or that cannot plan this program."""


class ConfigError(JaxtensileError, ValueError):
    """A configuration file that says something impossible: file, key, value, what is allowed."""


class ConfigWarning(UserWarning):
    """A configuration file that says something of no use: a function's name that no function has."""


class IgnoredBudgetWarning(UserWarning):
    """A planned function was called inside of another transformation, where its budget has no effect."""


class ManyPlansWarning(UserWarning):
    """A function was planned for many shapes of its arguments, which takes seconds each time."""


class InternalError(JaxtensileError, RuntimeError):
    """A fault of jaxtensile itself, which could not be worked around; its cause is what went wrong."""


class PlanningError(InternalError, BudgetError):
    """Planning failed by a fault of jaxtensile itself, and the program as it was written does not fit the budget.

    ``needs``: what that takes; None where its compiler had no figure.
    """


class InternalErrorWarning(RuntimeWarning):
    """A part of jaxtensile failed and was left out: results are right, bytes or time may be more than they need be."""


class StoppedError(Exception):
    """No error: nobody waits for this plan any more."""


class VerifyError(JaxtensileError, RuntimeError):
    """The compiled program did not do what the plan promised."""


class AgreementError(JaxtensileError, RuntimeError):
    """The processes of one program cannot run one plan: they ask for different things, or one is missing or failed.

    Every process that takes part raises it, with the same text, and none has run anything.
    """


class CoordinatorError(JaxtensileError, RuntimeError):
    """The coordinator refused, or could not be reached."""


class RejectedError(CoordinatorError):
    """The coordinator will never grant what a job asks for; the text says why."""


class NotAdmittedError(CoordinatorError, TimeoutError):
    """A job waited for its lease for as long as it wanted to. It holds nothing, and may go on waiting."""


class UnreachableError(CoordinatorError):
    """Nobody answers where the coordinator should be."""


class LostLeaseError(CoordinatorError):
    """The coordinator does not know of a job's lease any more: the job is to give up what it holds and to ask anew."""
