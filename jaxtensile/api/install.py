"""``jaxtensile.install``: every ``jax.jit`` of a program is planned when it would not fit. No line of it changes.

``jax.jit`` is replaced for callers outside of JAX and of this package, under all names by which modules already hold
it. What it returns there is one of JAX's own objects (``substitute``). Loops and branches outside of any jit are
planned too, as JAX compiles each as a whole. ``jaxtensile exec`` does this in every Python that it starts, at once
after the first import of JAX.

Invariant: until the program's first ``jax.jit``, or such a loop, nothing of the planner is imported, and ``uninstall``
leaves JAX as it was, entries of planned functions included.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import jax

from jaxtensile.settings.wanted import VARIABLE, Wanted, from_text, wanted

if TYPE_CHECKING:
    from jaxtensile.api.substitute import Session

_INSIDE: Final = frozenset(("jax", "jaxlib", "jaxtensile"))
"""Packages whose own calls of ``jax.jit`` stay JAX's."""
_LOOPS: Final = (jax.lax.scan_p, jax.lax.while_p, jax.lax.cond_p)
"""Operations that are whole programs. Outside of any jit JAX compiles each with its bodies, by a jit of its own."""
_MADE: Final = "_jaxtensile"
"""The attribute by which JAX's jit of a loop keeps ours, as long as JAX keeps it."""
_LOCK: Final = threading.RLock()
_installed: _Installed | None = None


def install(
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    objective: str | None = None,
    undo: bool | None = None,
    chunk: bool | str | None = None,
    offload_state: bool | None = None,
    best_effort: bool | None = None,
    config: str | os.PathLike[str] | None = None,
    **unknown: Any,
) -> None:
    """From now on every ``jax.jit`` of the program is planned when it would not fit.

    ``budget``: bytes of a device that all of the program may take, as ``"40GiB"``, ``"80%"`` or an int; by default the
    device less 1 GiB. Arrays that live beside a call, and are none of its arguments, are taken off for that call. They
    are looked at when a function is called with new shapes, and never by later calls. ``best_effort``: where no plan
    meets the budget, what comes nearest runs, instead of a ``BudgetError``. The other options are those of
    ``jaxtensile.jit``, and ``[exec]`` of the config has the same keys for what is not given here.

    A function that fits runs by JAX's own path and costs nothing more per call. Objects that ``jax.jit`` made before
    stay as they are, and what JAX has compiled through them is not compiled again. At the end of the process, or
    at ``uninstall``, a short table on standard error says what was planned.

    Raises ``BudgetError``, ``OptionError`` and ``ConfigError`` for options that cannot be.
    """
    given = {
        "budget": budget,
        "host_budget": host_budget,
        "objective": objective,
        "undo": undo,
        "chunk": chunk,
        "offload_state": offload_state,
        "best_effort": best_effort,
        **unknown,
    }
    _begin(wanted(given, config))


def uninstall() -> None:
    """JAX as it was: ``jax.jit`` is JAX's own, and functions that were planned run as they were written."""
    global _installed
    with _LOCK:
        if _installed is not None:
            _installed.end()
            _installed = None


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    """``install(**options)`` for the ``with`` block."""
    install(**options)
    try:
        yield
    finally:
        uninstall()


def begin_from_environment() -> None:
    """``install`` as ``jaxtensile exec`` asked for it, if it did."""
    text = os.environ.get(VARIABLE)
    if text:
        _begin(from_text(text))


def _begin(asked: Wanted) -> None:
    global _installed
    with _LOCK:
        uninstall()
        _installed = _Installed(asked)


class _Installed:
    """One ``install``: what it replaced, and what it made."""

    def __init__(self, asked: Wanted) -> None:
        self._wanted, self._own = asked, jax.jit
        self._session: Session | None = None
        self._stack = ExitStack()
        self._jit = self._either()
        self._replace(self._own, self._jit)
        self._stack.callback(lambda: self._replace(self._jit, self._own))
        for loop in _LOOPS:
            self._stack.callback(setattr, loop, "impl", loop.impl)
            loop.impl = functools.partial(self._run_alone, loop, loop.impl)
        self._before, sys.excepthook = sys.excepthook, self._told
        atexit.register(self._tell)

    def end(self) -> None:
        """Put everything back."""
        if sys.excepthook == self._told:
            sys.excepthook = self._before
        atexit.unregister(self._tell)
        if self._session is not None:
            self._tell()
            self._session.active = False
            for drop in self._session.planned:
                drop()
        self._stack.close()

    def _replace(self, old: Any, new: Any) -> None:
        """``new`` for ``old`` in ``jax`` and in all modules outside that hold it."""
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or (name != "jax" and name.partition(".")[0] in _INSIDE):
                continue
            held = [key for key, value in list(vars(module).items()) if value is old]
            for key in held:
                setattr(module, key, new)

    def _either(self) -> Callable[..., Any]:
        own = self._own

        @functools.wraps(own)
        def jit(*args: Any, **kwargs: Any) -> Any:
            made = own(*args, **kwargs)
            if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] in _INSIDE:
                return made
            if args:
                return self._substituted(args[0], kwargs, made)
            return lambda fun: self._substituted(fun, kwargs, made(fun))

        return jit

    # ---- from the program's first ``jax.jit``, or loop outside of one, on ----

    def _run_alone(self, loop: Any, own: Callable[..., Any], /, *args: Any, **params: Any) -> Any:
        """The results of a loop outside of any jit."""
        from jaxtensile import _compat

        if _compat.jit_is_disabled():
            return own(*args, **params)
        plain = _compat.jit_of_one(loop, params)
        session, made = vars(plain).get(_MADE, (None, plain))
        if session is None or session is not self._session:
            made = self._substituted(plain.__wrapped__, {}, plain)
            vars(plain)[_MADE] = self._session, made
        return made(*args)

    def _substituted(self, fun: Any, options: dict[str, Any], plain: Any) -> Any:
        """``plain``, or an object like it whose misses come to us."""
        from jaxtensile import _compat
        from jaxtensile.api.substitute import Substitute

        session = self._opened()
        substitute = Substitute(fun, options, plain, session)
        made = _compat.redirected(plain, substitute.choose)
        if made is None:  # not an object that JAX makes in the versions that we know
            return plain
        substitute.served_by(made)
        return made

    def _opened(self) -> Session:
        with _LOCK:
            if self._session is None:
                from jaxtensile import _compat
                from jaxtensile.api.automatic import Automatic
                from jaxtensile.api.substitute import Session, begin
                from jaxtensile.api.tally import Tally

                job = self._wanted.job
                self._session = Session(self._wanted, Tally(), automatic=Automatic(job) if job else None)
                begin(self._session)
                self._stack.enter_context(_compat.trace_through(self._trace))
            return self._session

    def _trace(self, own: Any) -> Any:
        from jaxtensile import _compat
        from jaxtensile.api.substitute import Substitute

        def trace(jitted: Any, *args: Any, **kwargs: Any) -> Any:
            substitute = getattr(_compat.chooser(jitted), "__self__", None)
            ours = isinstance(substitute, Substitute)
            return substitute.trace(own, args, kwargs) if ours else own(jitted, *args, **kwargs)

        return trace

    # ---- what is told ----

    def _tell(self) -> None:
        """At exit: what was planned."""
        from jaxtensile.api.tally import tell

        if self._wanted.job:
            return  # ``jaxtensile run`` says how its jobs ended
        if self._session is not None:
            for line in self._session.tally.summary():
                tell(line)
        else:
            tell("nothing was planned: no jax.jit of this process was called")

    def _told(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """``sys.excepthook``: a budget that cannot be met is told in one line, with the user's own line; what a device
        without room held behind the traceback."""
        if not isinstance(error, Exception):
            # Ctrl-C: Python forgets that it was one, and exits with 1, if a module makes a dataclass now.
            self._before(kind, error, where)
            return
        from jaxtensile.api import out_of_memory  # most programs end without an error
        from jaxtensile.api.explain import in_one_line
        from jaxtensile.api.tally import tell

        if in_one_line(error):
            return
        self._before(kind, error, where)
        programs = self._session.tally.programs if self._session is not None else ()
        with suppress(Exception):  # the error is told as it is, whatever became of the device
            for line in out_of_memory.told(error, programs, self._wanted.budget):
                tell(line)


__all__ = ["begin_from_environment", "install", "installed", "uninstall"]
