"""What do the processes of one program tell one another, and who was first? The store of ``jax.distributed``.

Invariant: of several values that processes put ``first`` under one key, all processes see the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from jaxtensile import _compat
from jaxtensile.errors import AgreementError
from jaxtensile.units import Seconds

_ABSENT = ("NOT_FOUND", "DEADLINE_EXCEEDED")
_PRESENT = "ALREADY_EXISTS"


class Store:
    """Bytes by key, the same for all processes. Every method raises ``AgreementError`` where nobody answers."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        """Put ``value`` there, whatever was there."""
        with _answered():
            self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def first(self, key: str, value: bytes) -> bytes:
        """Put ``value`` where nothing is; returns what is there then."""
        with _answered():
            try:
                self.client.key_value_set_bytes(key, value, allow_overwrite=False)
                return value
            except RuntimeError as error:
                if _PRESENT not in str(error):
                    raise
            return self.client.key_value_try_get_bytes(key)

    def get(self, key: str, wait: Seconds = 0.0) -> bytes | None:
        """What is there, or comes within ``wait`` seconds; None without such."""
        with _answered():
            try:
                if wait:
                    return self.client.blocking_key_value_get_bytes(key, int(1000 * wait))
                return self.client.key_value_try_get_bytes(key)
            except RuntimeError as error:
                if not str(error).startswith(_ABSENT):
                    raise
                return None

    def below(self, folder: str) -> dict[str, bytes]:
        """What is there, by the keys below ``folder``."""
        with _answered():
            found = self.client.key_value_dir_get_bytes(folder)
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def count(self, key: str) -> int:
        """How often this was called for that key, by all processes together."""
        with _answered():
            return self.client.key_value_increment(key, 1)

    def delete(self, folder: str) -> None:
        """Forget all keys below ``folder``."""
        with _answered():
            self.client.key_value_delete(folder)


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AgreementError):
            raise
        text = str(error).partition("\n")[0]
        raise AgreementError(
            f"the key-value store of jax.distributed, where processes agree on a plan, does not answer: {text}; see "
            "whether process 0, which holds it, is still there"
        ) from error


_LOCK: Final = threading.Lock()
_STORE: list[Store] = []
"""The last one: what is counted by store begins anew with another."""


def store() -> Store | None:
    """The store of this program's processes; None before ``jax.distributed.initialize``."""
    client = _compat.key_value_client()
    if client is None:
        return None
    with _LOCK:
        if not _STORE or _STORE[0].client is not client:
            _STORE[:] = [Store(client)]
        return _STORE[0]


__all__ = ["Store", "store"]
