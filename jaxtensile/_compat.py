"""Every difference between the supported jax versions, and every touch of ``jax._src``.

Invariant: nothing else in the project imports ``jax._src``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])

Literal = _core.Literal

EMPTY_STACK = _source.NameStack()


def open_jaxpr(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """``(jaxpr, consts)`` of a ClosedJaxpr (0.10) or of the Jaxpr that replaced it (0.11+)."""
    return closed.jaxpr, tuple(closed.consts)


def under_trace() -> bool:
    """Whether some transform is tracing right now (grad, vmap, an enclosing jit)."""
    return not _core.trace_state_clean()


def trace_context() -> Any:
    """Hashable state of all configuration that changes what a trace yields."""
    return _config.trace_context()


@contextmanager
def equation_context(eqn: Any, stack: Any) -> Iterator[None]:
    """Bind as ``eqn`` was bound: its configuration, its source line, its name stack under ``stack``."""
    info = eqn.source_info
    name_stack = _source.current_name_stack() + stack + info.name_stack
    with _source.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def source_line(eqn: Any) -> str:
    """``file.py:41 (function)`` of the user's code behind an equation, or the primitive's name."""
    text = _source.summarize(eqn.source_info)
    return text if text and text != "<unknown>" else f"<{eqn.primitive.name}>"


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """``(number of constants, number of carries)`` of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def is_tracer(x: Any) -> bool:
    return isinstance(x, _core.Tracer)
