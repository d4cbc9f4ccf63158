"""All differences between the supported jax versions, and all uses of ``jax._src``.

Invariant: nothing else in the project imports ``jax._src``.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import api as _api
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import hijax as _hijax
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.cudnn import fused_attention_stablehlo as _attention
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import windowed_reductions as _windows

from jaxtensile import switches
from jaxtensile.places import is_own

try:
    from jax._src.random import threefry2x32 as _threefry
except ImportError:  # before it was a package
    from jax._src import prng as _threefry  # pyright: ignore[reportAttributeAccessIssue]

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])

Literal = _core.Literal
ShapedArray = _core.ShapedArray
ShardingTypeError = _core.ShardingTypeError
"""An operation is not defined for types with shardings, on meshes with explicit axes."""

# Not from ``jax.extend``: to import that adds Pallas's settings to the key of JAX's caches, and all that the process
# has traced and compiled before would be traced and compiled again.
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", None) or _core.Jaxpr
jaxpr_as_fun = _core.jaxpr_as_fun
Primitive = _core.Primitive
threefry2x32 = _threefry.threefry2x32_p

EMPTY_STACK = _source.NameStack()


def open_jaxpr(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """``(jaxpr, consts)`` of a ClosedJaxpr (0.10) or its successor Jaxpr (0.11+)."""
    return closed.jaxpr, tuple(closed.consts)


def lowered(closed: Any) -> Any:
    """The program in compiled primitives: JAX's own rules expand high-level ones (``jax.experimental.hijax``), in
    bodies too.

    The same object if there are none, or if an argument or result has a type of its own.
    """
    jaxpr, _ = open_jaxpr(closed)
    if not getattr(jaxpr, "is_high", False) or any(v.aval.is_high for v in (*jaxpr.invars, *jaxpr.outvars)):
        return closed
    return _partial_eval.lower_jaxpr2(closed)


def without_dead_code(closed: Any) -> Any:
    """The same program without unread values, in bodies too; arguments and constants stay."""
    jaxpr, consts = open_jaxpr(closed)
    with jax.enable_checks(False):  # JAX would check bodies of shard_map without the axes that they are in
        new, _ = _partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)
    return new if hasattr(new, "consts") else type(closed)(new, consts)


def has_effects(eqn: Any) -> bool:
    """Whether an equation has effects; that it names an axis of a mesh is none."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def effect_in_order(closed: Any) -> str:
    """An effect of a program that has to keep its place among the others, or is on a reference; empty without any."""
    for effect in open_jaxpr(closed)[0].effects:
        if isinstance(effect, _core.NamedAxisEffect):
            continue
        free = _effects.lowerable_effects.contains(effect) and not _effects.ordered_effects.contains(effect)
        if not free:
            return str(effect)
    return ""


def stored_element(dtype: Any) -> Any:
    """The abstract array that stores one element of an extended dtype."""
    return _core.physical_element_aval(dtype)


def function_source(closed: Any) -> str:
    """The function behind a jaxpr and its place; empty if JAX did not record it."""
    return str(getattr(getattr(open_jaxpr(closed)[0], "debug_info", None), "func_src_info", "") or "")


def under_trace() -> bool:
    """Whether a transform is tracing now (grad, vmap, an enclosing jit)."""
    return not _core.trace_state_clean()


def jit_is_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force."""
    return bool(_config.disable_jit.value)


def default_device() -> Any:
    """The device of a program whose arguments name none."""
    chosen = _config.default_device.value
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


def static_arguments(jitted: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the static arguments of a ``jax.jit`` result, as JAX resolved them."""
    return frozenset(jitted._jit_info.static_argnums), frozenset(jitted._jit_info.static_argnames)


def jit(fun: Callable[..., Any], **options: Any) -> Any:
    """``jax.jit(fun, **options)`` with JAX's methods, even if ``fun`` has attributes of the same names."""
    made = jax.jit(fun, **options)
    for name in [k for k in vars(made) if not k.startswith("_") and hasattr(type(made), k)]:
        del vars(made)[name]
    return made


@contextmanager
def equation_context(eqn: Any, stack: Any) -> Iterator[None]:
    """Bind as ``eqn`` was bound: its configuration, source line, and name stack under ``stack``."""
    info = eqn.source_info
    name_stack = _source.current_name_stack() + stack + info.name_stack
    variables = (*eqn.invars, *eqn.outvars)
    with _source.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager, as_wide_as(variables):
        yield


_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))


def as_wide_as(variables: Iterable[Any]) -> AbstractContextManager[Any]:
    """Enable 64 bits if a variable has them: users may switch inside a function."""
    return wide_if(are_wide(v.aval for v in variables))


def are_wide(avals: Iterable[Any]) -> bool:
    """Whether a type has 64 bits."""
    return any(getattr(aval, "dtype", None) in _WIDE for aval in avals)


def wide_if(needed: bool) -> AbstractContextManager[Any]:
    """Enable 64 bits if they are needed."""
    return jax.enable_x64(True) if needed and not _config.enable_x64.value else nullcontext()


def source_line(eqn: Any) -> str:
    """``file.py:41 (function)`` of the user's code behind an equation, or the primitive's name.

    The innermost line of the planned function outside installed packages, else the innermost.
    """
    traceback = eqn.source_info.traceback
    found = None
    for code, at in zip(*traceback.raw_frames(), strict=True) if traceback is not None else ():
        if code.co_filename.startswith(_OURS):
            break  # what lies further out calls the planned function
        if _source.is_user_filename(code.co_filename):
            own = is_own(code.co_filename)
            found = (code, at) if own else found or (code, at)
            if own:
                break
    if found is None:
        return f"<{eqn.primitive.name}>"
    frame = _source.raw_frame_to_frame(*found)
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


_OURS = os.path.dirname(__file__) + os.sep
_CHECKPOINTS = _ad_checkpoint.__file__
_HIGH_LEVEL = _hijax.__file__
_JAX = os.path.dirname(_CHECKPOINTS) + os.sep
_AGAIN = "rematted_computation"


def is_checkpoint_barrier(eqn: Any) -> bool:
    """Whether ``jax.checkpoint`` bound this ``optimization_barrier``; False if unknown.

    An equation has the stack of its call, in a backward pass of the differentiated call: ``lax.optimization_barrier``,
    or the high-level primitive of a checkpointed function. For a checkpoint's barrier the caller is in JAX's file for
    checkpoints.
    """
    traceback = eqn.source_info.traceback
    frames = iter(traceback.frames if traceback is not None else ())
    for frame in frames:
        name = frame.function_name
        if name == "optimization_barrier" or (frame.file_name == _HIGH_LEVEL and name.endswith("__call__")):
            caller = next(frames, None)
            return caller is not None and caller.file_name == _CHECKPOINTS
        if not frame.file_name.startswith(_JAX):
            return False
    return False


def is_recomputation(eqn: Any, stack: Any = EMPTY_STACK) -> bool:
    """Whether an equation recomputes for a differentiated ``jax.checkpoint``: marked in a parameter of ``remat2``, or
    in the name stack of its successor (``jax_remat3``). ``stack``: of what it was inlined from."""
    if eqn.params.get("differentiated", False):
        return True
    return any(s.name == _AGAIN for names in (stack, eqn.source_info.name_stack) for s in names.stack)


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """``(number of constants, number of carries)`` of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


class UnknownSizeError(Exception):
    """An abstract value has no definite size."""


def arrays_of(aval: Any) -> Iterator[tuple[tuple[int, ...], int]]:
    """Shape and element bytes of each array in an abstract value; none for a token.

    ``UnknownSizeError``: a dimension is symbolic, or the type does not tell its arrays.
    """
    if hasattr(aval, "inner_aval"):  # a reference
        yield from arrays_of(aval.inner_aval)
    elif isinstance(aval, _core.ShapedArray):
        if not all(map(_core.is_constant_dim, aval.shape)):
            raise UnknownSizeError
        extended = isinstance(aval.dtype, _dtypes.ExtendedDType)
        element = _core.physical_element_aval(aval.dtype) if extended else jax.ShapeDtypeStruct((), aval.dtype)
        yield (*aval.shape, *element.shape), element.dtype.itemsize
    elif getattr(aval, "has_qdd", False):  # of what it is made may change while the program runs
        raise UnknownSizeError
    else:
        try:
            parts = aval.lo_ty()
        except (AttributeError, NotImplementedError):
            raise UnknownSizeError from None
        for part in parts:
            if part is not aval:
                yield from arrays_of(part)


def bodies(eqn: Any) -> Iterator[Any]:
    """The open jaxprs in an equation's parameters."""
    return (open_jaxpr(body)[0] if hasattr(body, "consts") else body for body in _core.jaxprs_in_params(eqn.params))


def is_tracer(x: Any) -> bool:
    return isinstance(x, _core.Tracer)


def configuration() -> Callable[[], bool]:
    """A function that applies this thread's contexts (``enable_x64`` and the like, our switches) to the thread that
    calls it.

    For threads that end with their task. It returns whether that thread now traces and compiles as this one, by JAX's
    own key: some contexts cannot be entered elsewhere.
    """
    kind = _config.config_ext.Config
    known = {id(x): x for x in (*_config.config_states.values(), *vars(_config).values()) if isinstance(x, kind)}
    found = [(x, x.get_local()) for x in known.values()]
    here, off = _config.trace_context(), switches.handed_on()

    def enter() -> bool:
        off()
        for x, value in found:
            if value is not _config.config_ext.unset:
                x.set_local(value)
        return _config.trace_context() == here

    return enter


# ---- cuDNN without a card -------------------------------------------------------------------------

Card = tuple[int, tuple[int, int]]
"""A version of cuDNN as JAX writes it (91000), and a compute capability."""
_CARD: ContextVar[Card | None] = ContextVar("card", default=None)
_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "check_cudnn_version": lambda card: card[0],
    "check_compute_capability": lambda card, least: card[1] >= _capability(least),
    "is_cuda_compute_capability_equal": lambda card, other: card[1] == _capability(other),
}


@contextmanager
def as_on(card: Card) -> Iterator[None]:
    """Answer JAX's questions about cuDNN and the card, in this thread, for ``card``.

    To trace ``jax.nn.dot_product_attention(..., implementation="cudnn")`` JAX asks the local machine and refuses what
    it lacks. Here the other machine's card counts. The trace keeps of the answers only that the program is allowed.
    """
    _ask_through()
    token = _CARD.set(card)
    try:
        yield
    finally:
        _CARD.reset(token)


@cache
def _ask_through() -> None:
    """Make JAX's checks for cuDNN and a card look at ``_CARD`` first."""

    def through(asked: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(asked)
        def ask(*args: Any) -> Any:
            card = _CARD.get()
            return asked(*args) if card is None else answer(card, *args)

        return ask

    for name, answer in _ANSWERS.items():
        if hasattr(_attention, name):  # what a later jax does not ask needs no answer
            setattr(_attention, name, through(getattr(_attention, name), answer))


def _capability(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


# ---- calls ----------------------------------------------------------------------------------------


Run = Callable[[Any, Any, Any], Any]
"""``(jit object, args, kwargs)`` → its outputs."""
Choose = Callable[[Any, Any], tuple[Any, Any, Any, Run | None]]
"""``(args, kwargs)`` → the jit object, its arguments, and a runner if the next such call must come to Python too."""


_CHOOSE = "_jaxtensile_choose"
"""The attribute of a cache miss of ours; none of a jit object's ``vars``, which ``functools.wraps`` copies."""


class _Slow:
    """Dispatch through Python, for a jax without rebuildable C++ jit objects: correct, not fast."""

    def __init__(self, fun: Any, choose: Choose) -> None:
        self.fun, self.choose = fun, choose
        self.seen: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jitted, args, kwargs, run = self.choose(args, kwargs)
        return jitted(*args, **kwargs) if run is None else run(jitted, args, kwargs)

    def _cache_size(self) -> int:
        return 0

    def _clear_cache(self) -> None:
        pass


def dispatcher(fun: Callable[..., Any], options: Mapping[str, Any], choose: Choose) -> Any:
    """A callable that runs the jit object that ``choose`` names: in C++ from the second call on.

    It is ``jax.jit(fun, **options)`` with cache misses sent to that object. A miss returns the outputs and the dispatch
    entry of its executable, unless ``choose`` gave other arguments or a runner. Without an entry such calls stay misses
    until ``_clear_cache``. ``fun`` runs only under ``jax.disable_jit``. It must have no other owner: the jit objects of
    one function share entries.
    """
    made = redirected(jit(fun, **options), choose)
    return _Slow(fun, choose) if made is None else made


def redirected(plain: Any, choose: Choose) -> Any:
    """A jit object like ``plain``, a ``jax.jit`` result, whose cache misses run the jit object that ``choose`` names.

    It shares dispatch entries with all jit objects of the same function and options. None for a jax without rebuildable
    C++ jit objects, and for functions without weak references, which end the process in JAX's ``__setstate__`` (and are
    an error of JAX's own when they are called).
    """

    def cache_miss(*args: Any, **kwargs: Any) -> Any:
        jitted, given, named, run = choose(args, kwargs)
        if run is not None:
            return run(jitted, given, named), None, False
        if given is args and named is kwargs:
            return jitted._cache_miss(*args, **kwargs)
        outputs, _, *rest = jitted._cache_miss(*given, **named)
        return outputs, None, *rest

    setattr(cache_miss, _CHOOSE, choose)
    try:
        state = plain.__getstate__()
        weakref.ref(state["fun"])
        if not (callable(state["cache_miss"]) and callable(plain._cache_miss)):
            return None
        kind: Any = type(plain)
        made = kind.__new__(kind)
        made.__setstate__({**state, "cache_miss": cache_miss})
        vars(made).update(vars(plain))  # ``_fun``: what jax_debug_nans repeats op by op
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return made


def chooser(jitted: Any) -> Choose | None:
    """The ``choose`` of a jit object that ``redirected`` made: it goes with the object, and no table keeps it alive."""
    found: Choose | None = getattr(getattr(jitted, "_cache_miss", None), _CHOOSE, None)
    return found


def jit_of_one(primitive: Any, params: Mapping[str, Any]) -> Any:
    """The ``jax.jit`` result that JAX runs, and keeps, for a primitive outside of any jit."""
    return _dispatch.xla_primitive_callable(primitive, **params)


Trace = Callable[..., Any]
"""``jax.jit``'s ``trace`` as a function of the jit object and the call's arguments."""


@contextmanager
def trace_through(trace: Callable[[Trace], Trace]) -> Iterator[None]:
    """Meanwhile ``trace`` and ``lower`` of jit objects made from now on are ``trace(JAX's own)``.

    JAX puts both methods on its class anew with each jit object; ``eval_shape`` stays JAX's own.
    """
    kept = {name: getattr(_pjit, name) for name in ("jit_trace", "jit_lower", "jit_eval_shape") if hasattr(_pjit, name)}
    if len(kept) < 3:
        yield  # a later jax: its jit objects are traced as they were written
        return
    own = kept["jit_trace"]
    planned = wraps(own)(trace(own))

    def lower(jitted: Any, *args: Any, **kwargs: Any) -> Any:
        return planned(jitted, *args, **kwargs).lower()

    def eval_shape(jitted: Any, *args: Any, **kwargs: Any) -> Any:
        return own(jitted, *args, **kwargs).out_info

    _pjit.jit_trace = planned
    _pjit.jit_lower = wraps(kept["jit_lower"])(lower)
    _pjit.jit_eval_shape = wraps(kept["jit_eval_shape"])(eval_shape)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(_pjit, name, value)
        jax.jit(lambda: None)  # JAX's own methods come back with it


def ask_for_shapes(kind: type) -> None:
    """``jax.eval_shape`` of a ``kind`` asks its own ``eval_shape`` from now on.

    Of JAX's jit objects, which it knows by their type, it tells shardings and formats of the results; whatever else is
    called it wraps in another jit, which has none.
    """
    own = jax.eval_shape

    @wraps(own)
    def eval_shape(fun: Any, *args: Any, **kwargs: Any) -> Any:
        asked = fun.eval_shape if type(fun) is kind else partial(own, fun)
        return asked(*args, **kwargs)

    _api.eval_shape = jax.eval_shape = eval_shape


def donated_arguments(jitted: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the donated arguments of a ``jax.jit`` result, as JAX resolved them."""
    return frozenset(jitted._jit_info.donate_argnums), frozenset(jitted._jit_info.donate_argnames)


def argument_names(traced: Any) -> tuple[str, ...]:
    """The flat arguments of a trace as a user writes them: ``state['m'][0]``."""
    jaxpr, _ = open_jaxpr(traced.jaxpr)
    names = getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ()
    count = len(jaxpr.invars)
    return tuple(str(n) for n in names) if len(names) == count else tuple(f"argument {i}" for i in range(count))


def in_host_memory(x: Any) -> bool:
    """Whether an array, a tracer or an abstract array is in host memory."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, _core.Tracer):
        return getattr(x.aval, "memory_space", None) == _core.MemorySpace.Host
    return getattr(sharding, "memory_kind", None) == "pinned_host"


class HostShape(jax.ShapeDtypeStruct):
    """A ``ShapeDtypeStruct`` that JAX traces as an array in host memory, whatever its sharding's kind."""


def _host_aval(x: HostShape) -> Any:
    return _core.pytype_aval_mappings[jax.ShapeDtypeStruct](x).update(memory_space=_core.MemorySpace.Host)


_core.pytype_aval_mappings[HostShape] = _host_aval
_dtypes.register_canonicalize_value_handler(HostShape, None)


class OfType:
    """An argument that JAX traces as exactly the abstract value ``aval``, even a reference."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


def _given(x: OfType) -> Any:
    return x.aval


_core.pytype_aval_mappings[OfType] = _given
_dtypes.register_canonicalize_value_handler(OfType, None)


def captured(traced: Any) -> tuple[Any, ...]:
    """Arrays that a trace turned into leading arguments of its jaxpr (mutable ones it closes over)."""
    return tuple(getattr(traced, "_consts", ()))


def donated_inputs(traced: Any) -> tuple[bool, ...]:
    """For each input of a trace's jaxpr, captured ones first, whether its buffer may be reused."""
    # Not by its ``args_info``: that puts what is no array into the user's own classes, and they may not have it.
    own, donated = len(captured(traced)), traced._params["donated_invars"]
    return (*(False for _ in range(own)), *map(bool, donated[: len(traced.jaxpr.in_avals) - own]))


def lower(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``jitted.lower(...)``, with a flat ``args_info`` if the user's classes accept only arrays."""
    try:
        return jitted.lower(*args, **kwargs)
    except Exception:
        traced = _without_args_info(jitted, args, kwargs)
        if traced is None:
            raise
    return traced.lower()


def only_compiles(client: Any) -> bool:
    """Whether a client can only be compiled for: its devices are not here."""
    return "CompileOnly" in type(client).__name__


def compiled_elsewhere(lowered: Any) -> str:
    """The platform of the absent device for which a program was lowered, in JAX's name; empty if the device is here."""
    backend: Any = getattr(getattr(lowered, "_lowering", None), "compile_args", {}).get("backend")
    return backend.platform if only_compiles(backend) else ""


def _without_args_info(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A trace with a flat ``args_info``; None if not needed or without a trace."""
    try:
        traced = jitted.trace(*args, **kwargs)
    except Exception:
        return None
    try:
        _ = traced.args_info
    except Exception:  # whatever a class says to what is no array
        count = len(traced.jaxpr.in_avals) - len(captured(traced))
        traced._in_tree = jax.tree.structure(((0,) * count, {}))
        return traced
    return None


def is_abstract(place: Any) -> bool:
    """Whether a sharding or a mesh has no devices."""
    return isinstance(getattr(place, "mesh", place), jax.sharding.AbstractMesh)


def mesh_in_force() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh of ``jax.set_mesh``, or one without devices; None if there is none."""
    for mesh in (_mesh.get_concrete_mesh(), jax.sharding.get_abstract_mesh()):
        if mesh is not None and not mesh.empty:
            return mesh
    return None


@contextmanager
def using_mesh(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
    """A context in which ``mesh`` is in force, or none."""
    mesh = jax.sharding.Mesh(np.empty((), dtype=object), ()) if mesh is None else mesh
    with _sharding_impls._internal_use_concrete_mesh(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def is_program(x: Any) -> bool:
    """Whether a parameter of an equation is a program, closed or open."""
    return isinstance(getattr(x, "jaxpr", None), _core.Jaxpr) or isinstance(x, _core.Jaxpr)


def with_equations(program: Any, equations: Iterable[Any]) -> Any:
    """A program, closed or open, with other equations of the same variables."""
    if isinstance(program, _core.Jaxpr):
        return program.replace(eqns=[*equations])
    return program.replace(jaxpr=program.jaxpr.replace(eqns=[*equations]))


def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An abstract array like ``x``, with a sharding."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def jit_options(jitted: Any) -> dict[str, Any]:
    """The options that a ``jax.jit`` result was made with, without shardings and devices."""
    info = jitted._jit_info
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
    return {name: getattr(info, name) for name in names} | {"compiler_options": dict(info.compiler_options_kvs) or None}


def names_shardings(jitted: Any) -> bool:
    """Whether a ``jax.jit`` result was given shardings of arguments or results."""
    info, kinds = jitted._jit_info, (jax.sharding.Sharding, jax.sharding.PartitionSpec)
    return any(isinstance(x, kinds) for x in (*info.in_shardings_leaves, *info.out_shardings_leaves))


def asked_shardings(traced: Any) -> Iterator[Any]:
    """The shardings given to ``jax.jit``, and the mesh in force, if any."""
    params = traced._params
    yield from (s for s in (*params["in_shardings"], *params["out_shardings"]) if isinstance(s, jax.sharding.Sharding))
    mesh = params.get("ctx_mesh")
    if mesh is not None and not mesh.empty:
        yield mesh


def device_sets(traced: Any) -> set[frozenset[Any]]:
    """The device sets that the program asks for: jit's shardings, the mesh, and inside what JAX itself looks at: meshes
    of ``shard_map``s, constraints, shardings of inner jits, and places to put arrays."""
    inside = (place for place, _ in _dispatch.get_intermediate_shardings(open_jaxpr(traced.jaxpr)[0]))
    return {
        frozenset(p.devices.flat if isinstance(p, jax.sharding.Mesh) else p.device_set)
        for p in (*asked_shardings(traced), *inside)
        if isinstance(p, jax.sharding.Mesh | jax.sharding.Sharding) and not is_abstract(p)
    }


def select_and_scatter_add(source: Any, operand: Any, zero: Any, params: Mapping[str, Any]) -> Any:
    """``select_and_scatter_add_p`` that starts from the scalar ``zero`` instead of a constant."""
    return _windows._select_and_scatter(
        operand,
        params["select_prim"].bind,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        source,
        zero,
        jax.lax.add,
    )


def shardings(tree: Any) -> list[str]:
    """The place of each leaf, in words equal in every process."""
    return [str(getattr(x, "sharding", None)) for x in jax.tree.leaves(tree)]


def uncommitted(x: Any) -> Any:
    """The same array without a committed place, to combine with arrays of any device."""
    if _dtypes.issubdtype(x.dtype, _dtypes.prng_key):
        return jax.random.wrap_key_data(uncommitted(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return _ArrayImpl(x.aval, x.sharding, x._arrays, committed=False)


def is_counted_threefry(eqn: Any) -> bool:
    """Whether an equation draws bits from one Threefry key, each element from its index alone."""
    key = eqn.invars[0].aval
    name = getattr(getattr(key.dtype, "_impl", None), "name", "")
    return not key.shape and name == "threefry2x32" and bool(getattr(eqn.ctx, "threefry_partitionable", False))


def key_value_client() -> Any:
    """The client of ``jax.distributed.initialize``; None if that was not called."""
    return _distributed.global_state.client


# ---- shard_map ------------------------------------------------------------------------------------


@contextmanager
def in_shard_map(mesh: Any, checked: bool) -> Iterator[None]:
    """Trace as in the body of a ``shard_map`` over all axes of ``mesh``; ``checked``: with ``check_vma``."""
    manual = mesh.abstract_mesh.update_axis_types(dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Manual))
    axes = _core.extend_axis_env_nd([*mesh.shape.items()])
    with axes, jax.sharding.use_abstract_mesh(manual), _config._check_vma(checked):
        yield


def barrier(values: Iterable[Any]) -> list[Any]:
    """The values behind one ``optimization_barrier``, each of the type that it had.

    JAX before 0.11 would give all of them the type of the one that differs between most devices.
    """
    each = tuple(values)
    with _config._check_vma(False) if JAX_VERSION < (0, 11) else nullcontext():
        return list(jax.lax.optimization_barrier(each))


def type_of_part(mesh: Any, checked: bool, spec: Any, aval: Any) -> Any:
    """The type, in the body of a ``shard_map``, of one part of an array of type ``aval``."""
    return _core.shard_aval(mesh, frozenset(mesh.axis_names), checked, spec, aval)


def varying_alike(xs: list[Any]) -> list[Any]:
    """The same values, of types that differ between the same devices."""
    return [*_core.auto_insert_reshard(*xs)]


def varying_over(x: Any, axes: tuple[str, ...]) -> Any:
    """The same value, of a type that differs between the devices along ``axes``; itself if types do not say that."""
    known = _varying(jax.typeof(x))
    return _core.pvary(x, tuple(a for a in axes if a not in known))


def varying_as(x: Any, aval: Any) -> Any:
    """The same value, of a type that differs between the same devices as ``aval``."""
    return varying_over(x, tuple(_varying(aval)))


def _varying(aval: Any) -> frozenset[str]:
    """The axes of a mesh along which values of a type differ, in a ``shard_map`` that checks that."""
    return getattr(getattr(aval, "mat", None), "varying", frozenset[str]())


# ---- Shardy ---------------------------------------------------------------------------------------


def given_shardings(traced: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings given to ``jax.jit`` for each input of a trace's jaxpr and each output; None where none was."""
    params, count = traced._params, len(traced.jaxpr.in_avals)
    given = [x if isinstance(x, jax.sharding.Sharding) else None for x in params["in_shardings"]]
    own = [getattr(x, "sharding", None) for x in captured(traced)][: max(count - len(given), 0)]
    outs = (x if isinstance(x, jax.sharding.Sharding) else None for x in params["out_shardings"])
    return (*own, *given), tuple(outs)


def partition_spec(aval: Any) -> tuple[Any, Any] | None:
    """``(mesh, spec)`` of a type with a sharding; None without one."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else (mesh, sharding.spec)


def mlir_bindings() -> tuple[Any, Any, Any]:
    """jaxlib's ``ir``, ``passmanager`` and Shardy's dialect; ``ImportError`` where jaxlib has them elsewhere."""
    from jaxlib.mlir import ir, passmanager  # not at the top: a later jaxlib may not have them, and all else works
    from jaxlib.mlir.dialects import sdy

    return ir, passmanager, sdy


def mlir_context() -> Any:
    """A context with the dialects of JAX's modules."""
    from jax._src.interpreters import mlir

    return mlir.make_ir_context()


def through_hlo(module: Any) -> str:
    """The text of a StableHLO module, taken to HLO and back."""
    from jax._src.interpreters import mlir

    xla: Any = importlib.import_module("jaxlib._jax").mlir
    hlo = xla.mlir_module_to_xla_computation(mlir.module_to_bytecode(module), use_tuple_args=False, return_tuple=False)
    return xla.xla_computation_to_mlir_module(hlo)
