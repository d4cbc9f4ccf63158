"""Faults of our own code in planning: what failed is left out, and the program runs.

A failing rewrite is left out, with one warning per function. If planning fails altogether, the program runs as written,
if that fits. Errors for the user (``JaxtensileError``) pass. A plan that the checker refuses is a fault.

Under ``$JAXTENSILE_STRICT=1``, as in the tests, every fault is raised as it is.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Protocol, TypeVar

from jaxtensile.errors import InternalError, InternalErrorWarning, JaxtensileError, StoppedError, VerifyError

VARIABLE: Final = "JAXTENSILE_STRICT"
_OFF: Final = frozenset({"", "0", "off", "false", "no"})
PLANNING: Final = "planning"
_AS_WRITTEN: Final = "it runs as it was written"
REPORT: Final = (
    f"This is a bug in jaxtensile: please report it with what ${VARIABLE}=1 raises in its place, and a program that "
    "shows it."
)

T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")


class _HasRequest(Protocol):
    @property
    def request(self) -> Any: ...


S = TypeVar("S", bound=_HasRequest)


class Failed(Exception):
    """A fault in one rewrite, raised to restart the plan without it."""

    def __init__(self, rewrite: str, error: Exception) -> None:
        super().__init__(f"{rewrite}: {error!r}")
        self.rewrite, self.error = rewrite, error


def strict() -> bool:
    """Whether faults are raised."""
    return os.environ.get(VARIABLE, "").strip().lower() not in _OFF


def passes(error: BaseException) -> bool:
    """Whether an error is no fault of ours: it is for the user, or a disguised Ctrl-C."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, KeyboardInterrupt):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    speaks = isinstance(error, JaxtensileError) and not isinstance(error, VerifyError)
    return speaks or isinstance(error, StoppedError) or is_of_the_user(error)


_MARK: Final = "_jaxtensile_of_the_user"


@contextmanager
def of_the_user(meanwhile: Callable[[], object] | None = None) -> Iterator[Callable[[], object] | None]:
    """Errors in here are the user's own program's, except those of ``meanwhile``; yields ``meanwhile`` to be called."""
    ours: list[BaseException] = []

    def called() -> object:
        assert meanwhile is not None
        try:
            return meanwhile()
        except BaseException as error:
            ours.append(error)
            raise

    try:
        yield None if meanwhile is None else called
    except Exception as error:
        if not any(error is other for other in ours):
            setattr(error, _MARK, True)
        raise


def is_of_the_user(error: BaseException) -> bool:
    """Whether JAX raised it for the program as written."""
    return bool(getattr(error, _MARK, False))


class Faults:
    """The faults of one job's planning, left out from then on. Shared by the jobs of its bodies."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}
        """What failed, and why in a line: an error would keep its frames alive."""
        self._told: set[str] = set()

    def __contains__(self, rewrite: object) -> bool:
        return rewrite in self.left_out

    @contextmanager
    def of(self, rewrite: str) -> Iterator[None]:
        """Attribute faults in here to ``rewrite``; with an empty name, to all planning."""
        try:
            yield
        except Exception as error:
            if not rewrite or strict() or passes(error) or isinstance(error, Failed):
                raise
            raise Failed(rewrite, error) from error

    def spared(self, rewrite: str, make: Callable[[], T], otherwise: Callable[[], U]) -> T | U:
        """``make()``; ``otherwise()`` if that fails or has failed."""
        if rewrite in self:
            return otherwise()
        try:
            return make()
        except Exception as error:
            self._note(error, rewrite)
        return otherwise()

    def without(self, plan: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
        """``plan()``, restarted without each rewrite that fails; ``otherwise(error)`` if all of it fails."""
        while True:
            try:
                return plan()
            except Failed as failed:
                if failed.rewrite in self:  # it is left out, and fails all the same
                    error = failed.error
                    break
                self._note(failed, failed.rewrite)
            except Exception as fault:
                if strict() or passes(fault):
                    raise
                error = fault
                break
        self.left_out[PLANNING] = told(error)
        return otherwise(error)

    def _note(self, error: Exception, rewrite: str) -> None:
        if isinstance(error, Failed):
            error, rewrite = error.error, error.rewrite
        elif strict() or passes(error):
            raise error
        self.left_out.setdefault(rewrite, told(error))

    def notes(self) -> tuple[str, ...]:
        """For the report: what was left out, and why."""
        return tuple(f"left out by a fault of jaxtensile: {what} ({why})" for what, why in self.left_out.items())

    @contextmanager
    def telling(self, name: str, where: str) -> Iterator[None]:
        """At the end, warn of what was left out of function ``name``, at ``where``."""
        try:
            yield
        except InternalError:
            raise  # it says it all
        except JaxtensileError:
            self.tell(name, where)
            raise
        self.tell(name, where)

    def tell(self, name: str, where: str) -> None:
        """Warn once per rewrite that was left out of function ``name``, at ``where``.

        If all planning failed, only that is reported.
        """
        left_out = self.left_out
        for rewrite in [PLANNING] if PLANNING in self else [*left_out]:
            so = _AS_WRITTEN if rewrite == PLANNING else f"{rewrite} was left out of its plan"
            if rewrite not in self._told:
                self._told.add(rewrite)
                _warn(rewrite, name, where, left_out[rewrite], so)


def leaves_out(
    rewrite: str, otherwise: Callable[[Any], U]
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T | U]]:
    """Decorate a rewrite of its first argument, which has a ``request``; if it fails, return ``otherwise`` of that."""

    def decorate(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T | U]:
        @wraps(function)
        def guarded(start: S, /, *args: P.args, **kwargs: P.kwargs) -> T | U:
            faults: Faults = start.request.faults
            return faults.spared(rewrite, lambda: function(start, *args, **kwargs), lambda: otherwise(start))

        return guarded

    return decorate


def raised(error: Exception) -> NoReturn:
    """Raise ``error``, where nothing replaces what failed."""
    raise error


def unless_faulty(make: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """``make()``; ``otherwise(error)`` if that fails by a fault."""
    try:
        return make()
    except Exception as fault:
        if strict() or passes(fault):
            raise
        error = fault
    return otherwise(error)


@contextmanager
def as_ours(what: str, instead: str) -> Iterator[None]:
    """Turn a fault in here into an ``InternalError``: ``what`` failed, and what to do ``instead``."""
    try:
        yield
    except Exception as error:
        if strict() or passes(error):
            raise
        raise InternalError(f"{what} failed ({told(error)}): {instead}. {REPORT}") from error


def told(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


_KNOWN: set[tuple[str, str, str]] = set()
_LOCK = threading.Lock()


def warn_unplanned(name: str, error: Exception) -> None:
    """Warn once that function ``name`` runs without a plan."""
    _warn(PLANNING, name, "", told(error), _AS_WRITTEN)


def _warn(rewrite: str, name: str, where: str, why: str, so: str) -> None:
    """Ask for a report, once per rewrite and function."""
    with _LOCK:
        if (rewrite, name, where) in _KNOWN:
            return
        _KNOWN.add((rewrite, name, where))
    text = f"{name}: {so}, because it failed ({why}). {REPORT}"
    warnings.warn(text, InternalErrorWarning, stacklevel=outside())


def outside() -> int:
    """The ``stacklevel`` of the first frame outside jaxtensile and JAX."""
    frame, level = sys._getframe(2), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("jaxtensile", "jax"):
        frame, level = frame.f_back, level + 1
    return level
