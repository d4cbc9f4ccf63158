"""``jaxtensile exec``: run a command in which every ``jax.jit`` fits a budget, without a change in its scripts.

The command takes this process's place, so that signals, the terminal and the exit code are its own. Every Python that
it starts finds ``cli/startup`` on its path and in ``$JAXTENSILE_EXEC`` what to plan for.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from jaxtensile.cli.startup import sitecustomize
from jaxtensile.errors import OptionError
from jaxtensile.settings.wanted import VARIABLE, wanted

_PATH: Final = "PYTHONPATH"
_OPTIONS: Final = ("budget", "host_budget", "objective", "undo", "chunk", "offload_state", "best_effort")


def execute(options: argparse.Namespace) -> NoReturn:
    """Become the command. Raises ``OptionError`` for one that cannot be started, and what ``wanted`` raises."""
    command: list[str] = options.command_line
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise OptionError("exec has no command: write jaxtensile exec --budget 40GiB -- python train.py")
    asked = wanted({name: getattr(options, name) for name in _OPTIONS}, options.config)
    program = _found(command[0])
    try:
        os.execve(program, command, {**os.environ, **environment(os.environ), VARIABLE: asked.to_text()})
    except OSError as error:
        raise OptionError(f"{command[0]!r} cannot be started: {error.strerror}{_hint(program)}") from None


def environment(seen: Mapping[str, str]) -> dict[str, str]:
    """What makes each Python start with ``cli/startup``: its folder is the first of the path."""
    folder = str(Path(sitecustomize.__file__).parent)
    others = [path for path in seen.get(_PATH, "").split(os.pathsep) if path and path != folder]
    return {_PATH: os.pathsep.join((folder, *others))}


def _found(name: str) -> str:
    found = shutil.which(name)
    if found is not None:
        return found
    what = "it is not executable" if Path(name).is_file() else "there is no such command"
    raise OptionError(f"{name!r} cannot be started: {what}{_hint(name)}")


def _hint(name: str) -> str:
    return f": write python {name}" if name.endswith(".py") else ""


__all__ = ["environment", "execute"]
