"""The config file that counts here, found without reading it."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtensile.runtime.config.finding import find


def config_file(given: str | os.PathLike[str] | None) -> Path | None:
    """The given file, or the one that counts here; None without one."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        here = None
    return find(here, None if given is None else os.fspath(given), os.environ)


__all__ = ["config_file"]
