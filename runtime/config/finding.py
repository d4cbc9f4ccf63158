"""Where ``jaxtensile.toml`` is.

Invariant: to look for it takes no more imports than the standard library's: most programs have none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NAME: Final = "jaxtensile.toml"
VARIABLE: Final = "JAXTENSILE_CONFIG"


def find(start: Path | None, option: str | None, environment: Mapping[str, str]) -> Path | None:
    """The config file: ``option``, else ``$JAXTENSILE_CONFIG``, else the first from ``start`` upward. Unreadable
    folders have none."""
    for given in (option, environment.get(VARIABLE)):
        if given:
            return Path(given)
    folders = () if start is None else (start, *start.parents)
    return next((path for folder in folders if os.path.isfile(path := folder / NAME)), None)


__all__ = ["NAME", "VARIABLE", "find"]
