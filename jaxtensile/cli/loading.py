"""Load the workload that ``FILE:FUNCTION`` names.

Invariant: any error in the text, the file or the function is a ``WorkloadError``: one sentence with the place. The file
sees the ``sys.path`` of ``python FILE``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from jaxtensile.program.workload import Workload
from jaxtensile.tuning.making import Maker, WorkloadError, described, maker_of


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
    return maker_of(make, file=file, name=function)


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
