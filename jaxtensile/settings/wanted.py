"""What all programs of a process are planned for, under ``jaxtensile exec`` or after ``jaxtensile.install``.

What the code or the command line says wins over ``[exec]`` of the config, option by option.

Invariant: a ``Wanted`` is complete. It goes to other processes as one text, and they read no config for it. To import
this takes no time: nothing here reads a config before it is asked to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.errors import OptionError, unknown
from jaxtensile.settings.found import config_file
from jaxtensile.units import TIB, parse_bytes

VARIABLE: Final = "JAXTENSILE_EXEC"
"""The environment variable that takes a ``Wanted`` to other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options of ``jaxtensile.jit`` for every function; None: not given.

    ``best_effort``: a budget that cannot be met is no error. ``config``: the file whose ``[device]`` and
    ``[functions]`` hold too; empty: there is none. ``job``: the name of the job whose lease is the budget; empty: none.
    """

    budget: int | str | None = None
    host_budget: int | str | None = None
    objective: str | None = None
    undo: bool | None = None
    chunk: bool | str | None = None
    offload_state: bool | None = None
    best_effort: bool | None = None
    config: str = ""
    job: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What is given of the options of ``jaxtensile.jit``, without the budget."""
        names = ("host_budget", "objective", "undo", "chunk", "offload_state")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_text(self) -> str:
        """All that is given, for ``from_text``."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def from_text(text: str) -> Wanted:
    """What ``Wanted.to_text`` gave; ``OptionError`` for anything else."""
    try:
        return Wanted(**json.loads(text))
    except (ValueError, TypeError):
        raise OptionError(f"${VARIABLE}={text!r} is not what `jaxtensile exec` writes: unset it") from None


def wanted(given: Mapping[str, Any], config: str | os.PathLike[str] | None = None) -> Wanted:
    """What is ``given`` (None: not), and what the config says of the rest.

    ``config``: its file; None: the one that counts here. Raises ``BudgetError``, ``OptionError`` and ``ConfigError``.
    """
    said = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in fields(Wanted)} - {"config", "job"}
    for name in given.keys() - known:
        raise OptionError(f"there is no option {name!r}: {unknown(name, known)}")
    for name in ("budget", "host_budget"):
        _check(name, said.get(name))
    for name, allowed in (("objective", tuple(WEIGHTS)), ("chunk", (True, False, "auto"))):
        if name in said and said[name] not in allowed:
            raise OptionError(f"{name}={said[name]!r} is not known: give one of {', '.join(map(repr, allowed))}")
    file = config_file(config)
    if file is None:
        return Wanted(**said)
    from jaxtensile.settings.options import config_of  # reads TOML, which takes a tenth of a second to import

    found = config_of(file)
    matters = found.functions or found.devices
    return Wanted(**{**found.exec.said(), **said, "config": str(file.absolute()) if matters else ""})


def _check(name: str, size: int | str | None) -> None:
    """Raise ``BudgetError`` for a size that cannot be; a percentage waits for its device."""
    if size is None:
        return
    if isinstance(size, str):
        with suppress(ValueError):
            if parse_bytes(size, capacity=TIB) > 0:
                return
    from jaxtensile.settings.options import budget_bytes, host_bytes  # all else, and the errors

    if name == "budget":
        budget_bytes(size, TIB)
    else:
        host_bytes(size, TIB)


__all__ = ["VARIABLE", "Wanted", "from_text", "wanted"]
