"""The shared store of a program's processes: the key-value store of ``jax.distributed``.

Invariant: if processes put several values ``first`` under one key, all see the same one.
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
    """Bytes by key, the same for all processes. Every method raises ``AgreementError`` if the store does not answer."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        """Set a key, replacing any value."""
        with _answered():
            self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def first(self, key: str, value: bytes) -> bytes:
        """Set a key that has no value; returns its value."""
        with _answered():
            try:
                self.client.key_value_set_bytes(key, value, allow_overwrite=False)
                return value
            except RuntimeError as error:
                if _PRESENT not in str(error):
                    raise
            return self.client.key_value_try_get_bytes(key)

    def get(self, key: str, wait: Seconds = 0.0) -> bytes | None:
        """The value, present or within ``wait`` seconds; else None."""
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
        """All values, by their keys below ``folder``."""
        with _answered():
            found = self.client.key_value_dir_get_bytes(folder)
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def count(self, key: str) -> int:
        """Count a call for that key; returns the number of calls so far, by all processes."""
        with _answered():
            return self.client.key_value_increment(key, 1)

    def delete(self, folder: str) -> None:
        """Delete all keys below ``folder``."""
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
"""The last store; counts per store begin anew with another."""


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
