"""Files kept for later processes: their folder, and writes that are complete or absent."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path | None:
    """The user's cache folder for this package (XDG base directory rules); it need not exist."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # relative ones are to be ignored
        return Path(given) / "jaxtensile"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "jaxtensile" if os.path.isabs(home) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and its folder atomically. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
