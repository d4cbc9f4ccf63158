"""A place in the user's code, short to read and enough to find it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_SOURCE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)?(?: \((?P<function>.*)\))?")


_INSTALLED = frozenset(("site-packages", "dist-packages"))
_PYTHON = (os.path.dirname(os.__file__) + os.sep, "<frozen ")


def is_own(file: str) -> bool:
    """Whether a file of code is the user's own: of no installed package, and not Python's."""
    return _INSTALLED.isdisjoint(file.split(os.sep)) and not file.startswith(_PYTHON)


def short_place(source: str) -> str:
    """``model.py:41 (block)``: the path from here, from the package, or its last two parts."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        return source
    path = Path(match["file"])
    parts = path.parts
    if path.is_relative_to(Path.cwd()):
        file = path.relative_to(Path.cwd()).as_posix()
    elif "site-packages" in parts:
        file = "/".join(parts[parts.index("site-packages") + 1 :])
    else:
        file = "/".join(parts[-2:]) if path.is_absolute() else path.as_posix()
    return f"{file}:{match['line']}" + (f" ({match['function']})" if match["function"] else "")
