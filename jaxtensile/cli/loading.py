"""Load the workload that ``FILE:FUNCTION`` names.

Invariant: any error in the text, the file or the function is a ``WorkloadError``: one sentence with the place. The file
sees the ``sys.path`` of ``python FILE``.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from jaxtensile.errors import JaxtensileError
from jaxtensile.program.workload import Workload

_BATCH = ("batch", "batch_size")
"""Names of a batch-size parameter."""

_MACHINERY = tuple(
    f"{Path(found.origin).parent}/" for found in map(find_spec, ("jaxtensile", "jax")) if found and found.origin
)
"""Folders of code around the user's: no line there explains an error."""


class WorkloadError(JaxtensileError, ValueError):
    """``FILE:FUNCTION`` does not lead to a ``jaxtensile.Workload``."""


@dataclass(frozen=True, slots=True)
class Maker:
    """FUNCTION of FILE. ``batch``: the name of its batch-size parameter, empty without one."""

    file: str
    function: str
    make: Callable[..., object]
    batch: str

    def __call__(self, batch: int | None = None) -> Workload:
        """The workload, at its own batch size or at another."""
        given = {} if batch is None else {self.batch: batch}
        call = ", ".join(f"{name}={size}" for name, size in given.items())
        try:
            result = self.make(**given)
        except Exception as error:
            raise WorkloadError(f"{self.function}({call}) of {self.file} raised {described(error)}") from error
        if not isinstance(result, Workload):
            raise WorkloadError(
                f"{self.function}({call}) of {self.file} returned {type(result).__name__}, not jaxtensile.Workload: "
                "return jaxtensile.Workload(fun=..., args=(...))"
            )
        if not isinstance(result.args, (tuple, list)):
            raise WorkloadError(
                f"{self.function}({call}) of {self.file} returned a Workload whose args are a "
                f"{type(result.args).__name__}: write args=(x,), one entry per argument of fun"
            )
        return result


def load_workload(text: str) -> Workload:
    """Call FUNCTION of FILE without arguments; its ``Workload``."""
    return load_maker(text)()


def load_maker(text: str) -> Maker:
    """FUNCTION of FILE, not yet called."""
    file, colon, function = text.rpartition(":")
    if not colon or not file or not function:
        raise WorkloadError(f"{text!r} is not FILE:FUNCTION: write for example train.py:step")
    path = Path(file)
    if not path.is_file():
        raise WorkloadError(f"there is no file {file!r} (looked in {Path.cwd()})")
    make = _function(_run(path), file, function)
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # of a callable that is not Python
        parameters = {}
    return Maker(file, function, make, next((name for name in _BATCH if name in parameters), ""))


class _AsItStands(SourceFileLoader):
    """Compiles the file itself: Python's cached copy looks current within a second of an edit of equal length."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _run(path: Path) -> ModuleType:
    # Registered, as pickle and dataclasses expect, but never in place of a module that exists.
    name = path.stem if path.stem not in sys.modules else f"_jaxtensile_{path.stem}"
    spec = spec_from_file_location(name, path, loader=_AsItStands(name, str(path)))
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"{path} cannot be loaded: {described(error)}") from error
    return module


def _function(module: ModuleType, file: str, function: str) -> Callable[[], object]:
    found = getattr(module, function, None)
    if found is None:
        functions = [
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        ]
        near = difflib.get_close_matches(function, functions, n=3, cutoff=0.0)
        raise WorkloadError(f"{file} has no {function!r}; it has {', '.join(near) or 'no functions'}")
    if not callable(found):
        raise WorkloadError(f"{function!r} of {file} is a {type(found).__name__}, not a function")
    return found


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with its place."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_MACHINERY)]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        where = f" at {error.filename}:{error.lineno}"
    else:
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"
