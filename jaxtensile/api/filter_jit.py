"""``jaxtensile.filter_jit``: ``equinox.filter_jit``, and the program fits.

Arrays in the arguments, and in the function if it is a module or its method, are arguments of one ``jaxtensile.jit``.
Everything else is static. Results that are no arrays come back as they are.

Invariant: equinox is imported only when ``filter_jit`` is called.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.api.jit import jit
from jaxtensile.errors import OptionError
from jaxtensile.program.workload import Transformed
from jaxtensile.report.report import Report
from jaxtensile.settings.identity import stand_in

_DONATED = {
    "all": ("fun", "first", "rest"),
    "warn": ("fun", "first", "rest"),
    "all-except-first": ("fun", "rest"),
    "warn-except-first": ("fun", "rest"),
    "none": (),
}
_TAKEN = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings")


def filter_jit(fun: Callable[..., Any] | None = None, /, *, donate: str = "none", **options: Any) -> Any:
    """``equinox.filter_jit(fun)`` whose compiled program fits ``budget`` device bytes.

    Arrays in the arguments and in ``fun`` (a module, a method of one) are traced; the rest, Python numbers included, is
    static. ``donate`` is equinox's: ``"all"``, ``"all-except-first"``, ``"warn"``, ``"warn-except-first"`` or
    ``"none"``. Other options are those of ``jaxtensile.jit``: ``budget``, ``host_budget``, ``target``, ``solver``,
    ``objective``, ``undo``, ``chunk``, ``config``. The result also has ``plan``, ``lower``, ``trace``, ``eval_shape``
    and ``clear_cache``. Needs equinox.
    """
    if donate not in _DONATED:
        raise OptionError(f"donate={donate!r} is not known: give one of {', '.join(map(repr, _DONATED))}")
    if taken := [name for name in _TAKEN if name in options]:
        raise OptionError(f"filter_jit decides {taken[0]} itself: leave it out; donate= says what is donated")
    equinox = _equinox()
    if fun is None:
        jit(**options)  # bad options are an error where they are written
        return partial(filter_jit, donate=donate, **options)
    return Filtered(fun, _Core(fun, donate, options, equinox))


def _equinox() -> Any:
    try:
        return import_module("equinox")
    except ModuleNotFoundError as error:
        if error.name != "equinox":
            raise
        raise ModuleNotFoundError(
            "jaxtensile.filter_jit needs equinox: pip install equinox; jaxtensile.jit works without it", name="equinox"
        ) from None


class _Static:
    """A tree's structure and its non-array leaves; equal only if the types are too: 1 is not True."""

    __slots__ = ("key", "leaves", "tree")

    def __init__(self, leaves: Sequence[Any], tree: Any) -> None:
        self.leaves, self.tree = leaves, tree
        exact = (repr(x) if isinstance(x, float | complex) else None for x in leaves)  # 0.0 is not -0.0
        self.key = (tree, tuple(leaves), tuple(map(type, leaves)), tuple(exact))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key

    def __repr__(self) -> str:
        return repr([x for x in self.leaves if x is not _ARRAY])


class _Array:
    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


@jax.tree_util.register_pytree_node_class
class _Results:
    def __init__(self, arrays: list[Any], static: _Static) -> None:
        self.arrays, self.static = arrays, static

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, _Opaque(self.static)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> _Results:
        return cls(list(arrays), static.value)


class _Opaque:
    """A wrapper for results; unhashable or incomparable ones equal only themselves."""

    __slots__ = ("value",)

    def __init__(self, value: _Static) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value.tree)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Opaque):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:
            return False


def _join(static: _Static, arrays: Sequence[Any]) -> Any:
    left = iter(arrays)
    return jax.tree.unflatten(static.tree, [next(left) if x is _ARRAY else x for x in static.leaves])


class _Core:
    """Shared by all bound forms of a filtered function: the jit object and the splitting of arguments."""

    def __init__(self, fun: Callable[..., Any], donate: str, options: dict[str, Any], equinox: Any) -> None:
        self.signature = inspect.signature(fun)
        self.donated, self.quiet = _DONATED[donate], donate.startswith("all")
        self.is_array, self.error = equinox.is_array, equinox.EquinoxRuntimeError
        name = getattr(fun, "__name__", type(fun).__name__)

        def run(donated: dict[str, Any], kept: dict[str, Any], static: tuple[_Static, ...]) -> _Results:
            arrays = {**donated, **kept}
            fun, first, (rest, kwargs) = (_join(s, arrays[k]) for k, s in zip(_PARTS, static, strict=True))
            return _Results(*self.split(fun(*first, *rest, **kwargs)))

        run.__name__ = name
        run.__qualname__ = getattr(fun, "__qualname__", name)
        stand_in(run, fun)
        self.planned = jit(run, donate_argnums=0, static_argnums=2, **options)

    def split(self, tree: Any) -> tuple[list[Any], _Static]:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [self.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        static = [_ARRAY if array else x for x, array in zip(leaves, arrays, strict=True)]
        return [x for x, array in zip(leaves, arrays, strict=True) if array], _Static(static, structure)

    def arguments(self, fun: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[_Static, ...]]:
        bound = self.signature.bind(*args, **kwargs)  # one form of a call, so that it is planned once
        parts = fun, bound.args[:1], (bound.args[1:], bound.kwargs)
        split = dict(zip(_PARTS, map(self.split, parts), strict=True))
        donated = {k: arrays for k, (arrays, _) in split.items() if k in self.donated}
        kept = {k: arrays for k, (arrays, _) in split.items() if k not in self.donated}
        return donated, kept, tuple(static for _, static in split.values())

    def calm(self) -> Any:
        """Suppress warnings about unused donated arrays, if ``donate`` asks for it."""
        return _without_donation_warnings() if self.quiet else nullcontext()

    def finish(self, call: Callable[[], _Results]) -> Any:
        """The results of a call; an ``equinox.error_if`` error comes out in its own words."""
        log, its_own = logging.getLogger("jax._src.callback"), partial(_said_by_the_error)
        log.addFilter(its_own)  # another call's may go before this one's
        try:
            out = call()
            if not any(_compat.is_tracer(x) for x in out.arrays):
                jax.block_until_ready(out.arrays)  # as equinox does: an error is raised by the call that made it
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            _, found, words = str(error).partition("_EquinoxRuntimeError: ")
            if not found:
                raise
            raise self.error(words.partition("\n\n")[0].strip()) from None
        finally:
            log.removeFilter(its_own)
        return _join(out.static, out.arrays)


_PARTS = ("fun", "first", "rest")


def _said_by_the_error(record: logging.LogRecord) -> bool:
    return record.getMessage() != "jax.pure_callback failed"


_calm: ContextVar[bool] = ContextVar("calm", default=False)


class _DonationWarning:
    """The message of a permanent warnings filter; it matches only in threads that want calm. Filters belong to the
    process: one added and removed per call could be undone by another thread."""

    def match(self, text: str) -> bool:
        return _calm.get() and text.startswith("Some donated buffers were not usable")


_QUIET: Any = ("ignore", _DonationWarning(), Warning, None, 0)


@contextmanager
def _without_donation_warnings() -> Any:
    filters: Any = warnings.filters
    if filters[:1] != [_QUIET]:
        with suppress(ValueError):
            filters.remove(_QUIET)
        filters.insert(0, _QUIET)
    token = _calm.set(True)
    try:
        yield
    finally:
        _calm.reset(token)


@jax.tree_util.register_pytree_node_class
class Filtered(Transformed):
    """The result of ``jaxtensile.filter_jit``: callable, and a pytree of its function's arrays."""

    __slots__ = ("__dict__", "__weakref__", "_core")  # wrappers copy __dict__

    def __init__(self, fun: Callable[..., Any], core: _Core) -> None:
        self.__wrapped__, self._core = fun, core
        update_wrapper(self, fun, updated=())

    def tree_flatten(self) -> tuple[list[Any], Any]:
        arrays, static = self._core.split(self.__wrapped__)
        return arrays, (static, self._core)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Any) -> Filtered:
        static, core = aux
        return cls(_join(static, list(arrays)), core)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        split = self._split(args, kwargs)
        with self._core.calm():
            return self._core.finish(lambda: self._core.planned(*split))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else FilteredMethod(self, instance)

    def __repr__(self) -> str:
        return repr(self._core.planned).replace("jaxtensile.jit", "jaxtensile.filter_jit")

    def plan(self, /, *args: Any, **kwargs: Any) -> Report:
        """The report of the plan for these arguments; nothing is executed.

        Arrays may be ``jax.ShapeDtypeStruct``s, as ``equinox.filter_eval_shape`` returns them.
        """
        with self._core.calm():
            return self._core.planned.plan(*self._split(args, kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``lower`` of the planned program; what it compiles to takes the same arguments as this."""
        with self._core.calm():
            return _Lowered(self._core.planned.lower(*self._split(args, kwargs)), self)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``trace`` of the planned program; its arguments are the arrays."""
        return self._core.planned.trace(*self._split(args, kwargs))

    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A ``jax.jit`` result that takes arrays and static parts, and these arguments split so."""
        return self._core.planned.as_written(self._split(args, {}))

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result's arrays, among its other leaves."""
        out = self._core.planned.eval_shape(*self._split(args, kwargs))
        return _join(out.static, out.arrays)

    def clear_cache(self) -> None:
        """Forget every plan and executable."""
        self._core.planned.clear_cache()

    def _cache_size(self) -> int:
        return self._core.planned._cache_size()

    def _split(self, args: Any, kwargs: Any) -> Any:
        return self._core.arguments(self.__wrapped__, args, kwargs)


class _Stage:
    """A stage of JAX's; its calls take and return whole trees."""

    def __init__(self, stage: Any, filtered: Filtered) -> None:
        self._stage, self._filtered = stage, filtered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class _Lowered(_Stage):
    def compile(self, *args: Any, **kwargs: Any) -> _Compiled:
        with self._filtered._core.calm():
            return _Compiled(self._stage.compile(*args, **kwargs), self._filtered)


class _Compiled(_Stage):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        donated, kept, _ = self._filtered._split(args, kwargs)
        return self._filtered._core.finish(lambda: self._stage(donated, kept))


@jax.tree_util.register_pytree_node_class
class FilteredMethod(Transformed):
    """A filtered method; the object is the first argument."""

    __slots__ = ("__dict__", "__func__", "__self__", "__weakref__")  # wrappers copy __dict__

    def __init__(self, filtered: Filtered, instance: Any) -> None:
        self.__func__, self.__self__ = filtered, instance
        update_wrapper(self, filtered, updated=())
        self.__wrapped__ = partial(filtered.__wrapped__, instance)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.__func__, self.__self__), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> FilteredMethod:
        made = object.__new__(cls)  # parts may be anything that a transformation puts there
        made.__func__, made.__self__ = parts
        return made

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A ``jax.jit`` result that takes arrays and static parts, and these arguments split so."""
        return self.__func__.as_written((self.__self__, *args))

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__self__"):  # not there yet while a copy is made
            raise AttributeError(name)
        found = getattr(self.__func__, name)
        return partial(found, self.__self__) if name in ("plan", "lower", "trace", "eval_shape") else found

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"


__all__ = ["Filtered", "filter_jit"]
