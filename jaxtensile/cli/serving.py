"""``jaxtensile serve``: the coordinator of this user's jobs, until a signal ends it.

SIGTERM or Ctrl-C: no new jobs; it ends when all have released, at the latest after ``--grace``. A second one: at once.
SIGHUP: read the config again; a broken one is reported and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from jaxtensile.devices.hardware import device_memory, host_memory
from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.config.config import EMPTY, Config, find, read
from jaxtensile.runtime.config.tables import LONGEST
from jaxtensile.runtime.daemon.endpoint import Endpoint, socket_path
from jaxtensile.runtime.daemon.log import Log
from jaxtensile.runtime.daemon.server import Reading, Server
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.units import Bytes


def configured(options: argparse.Namespace) -> tuple[Path | None, Config]:
    """The config that counts here, and its file. Raises ``ConfigError``."""
    file = find(Path.cwd(), options.config, os.environ)
    return file, Config() if file is None else read(file, wait=EMPTY)


def place_of(options: argparse.Namespace, config: Config) -> Path:
    """The coordinator's socket. Raises ``PlaceError``."""
    return socket_path(options.socket, os.environ, config.socket, os.getuid())


def reported(config: Config) -> dict[str, Bytes]:
    """Bytes of the devices here, and of those known only to the config."""
    devices = device_memory()
    for name, table in config.devices.items():
        if ":" in name and table.capacity is not None:
            devices.setdefault(name, table.capacity)
    return devices


def capacities(config: Config) -> dict[str, Capacity]:
    """The bytes to grant here. Raises ``ConfigError``."""
    return config.granted(reported(config), host_memory())


def serve(options: argparse.Namespace) -> None:
    """Serve until a signal ends it. Raises ``CoordinatorError`` or ``ConfigError`` before it serves."""
    if not 0 <= options.grace <= LONGEST:
        raise CoordinatorError(f"--grace {options.grace:g}: give a number of seconds from 0 to {LONGEST:.0f}")
    file, config = configured(options)

    unread = [config]

    def reread() -> Reading:
        """Later reads do not wait: an empty file keeps the earlier config."""
        now = unread.pop() if unread else Config() if file is None else read(file)
        return capacities(now), now.settings

    Server(
        Endpoint(place_of(options, config)),
        reread,
        log=Log(),
        metrics=None if options.metrics is None else _listening(options.metrics),
        parent=None if options.with_parent is None else options.with_parent or os.getppid(),
        grace=options.grace,
    ).run()


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "a port is a number from 0 to 65535"
        raise CoordinatorError(f"metrics cannot be served on port {port}: {why}: choose another --metrics") from None
    listener.listen(16)
    return listener
