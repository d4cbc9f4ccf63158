"""Changes of plan that all processes of a program make before the same step.

Each process has a lease of its machine's coordinator, whose rung is the highest that it *may* run. All processes run
one rung: the lowest of these.

    process                         leader, the lowest of them
    may: a rung  ──────────────▶    is the lowest of them another than the one that runs?
                 ◀── change
    at: steps it has begun,
        the rung it may now ───▶    all said it?
                 ◀── last: the most steps, the lowest rung
    the step after the last one runs that rung

A process that has sent ``at`` begins no further step until it knows the last step. Steps contain collectives, so no
process ends a step before all have begun it, and the numbers of steps begun differ by one at most. Hence every process
begins the last step, and none has begun the next one.

Another thread than the stepping one sends ``at``. So a process sends it also while it waits for others inside a step.

A process whose lease must shrink sends a lower ``may``. It gives bytes back only once ``allows`` is true: the running
rung is low enough, and so is the rung that it sent for a change under way.

Invariant: every process runs the same rung in the same step, and none above what it may be on.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import jax

from jaxtensile.errors import AgreementError
from jaxtensile.spmd.processes.agreement import patience
from jaxtensile.spmd.processes.keystore import Store, store
from jaxtensile.units import Seconds

_LOOK: Final[Seconds] = 0.05
"""Seconds between two looks of the leader at what the others may. A guess: less than most steps."""
_WAIT: Final[Seconds] = 1.0
"""Seconds that the others wait for the store at a time. As ``agreement._LOOK``."""


class Together:
    """One job in several processes. ``members``: they, ascending. ``patience``: seconds without an answer of one."""

    def __init__(
        self, store: Store, folder: str, me: int, members: Sequence[int], patience: Seconds, name: str
    ) -> None:
        self._store, self._folder, self._me, self.members = store, folder, me, tuple(members)
        self._patience, self._name = patience, name
        self._news = threading.Condition()
        self.rung = -1
        """The one that steps run."""
        self._begun = 0
        self._change = 0
        """Number of the next change; the first is where all begin."""
        self._may = -1
        self._pending: int | None = None
        """What this process said that it may, of a change that is under way."""
        self._last: tuple[int, int] | None = None
        """The last step before that, and the rung of the next, once they are known."""
        self._over = False
        self._failed: AgreementError | None = None
        self._thread: threading.Thread | None = None

    @property
    def leads(self) -> bool:
        return self._me == self.members[0]

    def may(self, rung: int) -> None:
        """This process may be on a rung, and any below."""
        with self._news:
            self._may = rung
        self._store.put(f"{self._folder}/may/{self._me}", str(rung).encode())

    def allows(self, rung: int) -> bool:
        """Whether a process that may be on no more than that can do without what is above."""
        with self._news:
            return self.rung <= rung and self._may <= rung and (self._pending is None or self._pending <= rung)

    def in_turn(self, act: Callable[[], None]) -> None:
        """Do something in all processes one after the other, in their order; nothing after one that failed.

        So of two jobs that want the same machines, neither waits for the other with what it has.
        """
        for p in self.members:
            if p == self._me:
                break
            self._require_admitted(p)
        try:
            act()
        except BaseException as error:
            self._store.put(f"{self._folder}/admitted/{self._me}", (str(error) or type(error).__name__).encode())
            raise
        self._store.put(f"{self._folder}/admitted/{self._me}", b"")
        for p in self.members:
            self._require_admitted(p)

    def _require_admitted(self, p: int) -> None:
        """Wait for a process's turn to end. Raises ``AgreementError`` if it failed."""
        if said := self._awaited(f"admitted/{p}"):
            raise AgreementError(f"job {self._name!r} is not admitted by process {p}: {said.decode()}")

    def begin(self) -> None:
        """Wait until all have said what they may, and begin the first step with the lowest."""
        if self.leads:
            for p in self.members:
                self._awaited(f"may/{p}")
            self._store.put(f"{self._folder}/change/0", str(self._lowest()).encode())
        self.rung, self._change, self._begun = int(self._awaited("change/0")), 1, 1
        self._thread = threading.Thread(target=self._watch, name="jaxtensile-together", daemon=True)
        self._thread.start()

    def step(self) -> int:
        """The rung of the step that begins now. Waits while it is not known whether it changes."""
        with self._news:
            ends = time.monotonic() + self._patience
            while self._pending is not None and self._last is None and self._failed is None:
                if not self._news.wait(ends - time.monotonic()) and time.monotonic() >= ends:
                    raise AgreementError(
                        f"job {self._name!r} waits for {self._patience:g} s for all of processes "
                        f"{', '.join(map(str, self.members))} to say where they are: see their logs, and start all "
                        "again"
                    )
            if self._failed is not None:
                raise self._failed
            if self._last is not None and self._last[0] == self._begun:
                self.rung, self._pending, self._last = self._last[1], None, None
                self._news.notify_all()
            self._begun += 1
            return self.rung

    def close(self) -> None:
        """It is over."""
        with self._news:
            self._over = True
            self._news.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # The thread.

    def _watch(self) -> None:
        try:
            while not self._over:
                if self.leads and self._pending is None:
                    self._propose()
                if self._store.get(self._key("change"), 0.0 if self.leads else _WAIT) is not None:
                    self._follow()
                elif self.leads:
                    with self._news:
                        self._news.wait_for(lambda: self._over, _LOOK)
        except AgreementError as error:
            with self._news:
                self._failed = error
                self._news.notify_all()

    def _propose(self) -> None:
        if self._lowest() != self.rung:
            self._store.put(self._key("change"), b"")

    def _follow(self) -> None:
        """A change: say where this process is, learn what is the last step before it, and wait until it is made."""
        with self._news:
            self._pending = self._may
            said = f"{self._begun} {self._pending}"
        self._store.put(f"{self._key('at')}/{self._me}", said.encode())
        if self.leads:
            at = [_numbers(self._awaited(f"at/{self._change}/{p}")) for p in self.members]
            last = f"{max(begun for begun, _ in at)} {min(may for _, may in at)}"
            self._store.put(self._key("last"), last.encode())
        last = _numbers(self._awaited(f"last/{self._change}"))
        with self._news:
            self._last = last
            self._news.notify_all()
            self._news.wait_for(lambda: self._over or self._pending is None)
        if self.leads:  # all have read of the change before: they have said where they are in this one
            for what in ("change", "at", "last"):
                with suppress(AgreementError):
                    self._store.delete(f"{self._folder}/{what}/{self._change - 1}")
        self._change += 1

    def _key(self, what: str) -> str:
        return f"{self._folder}/{what}/{self._change}"

    def _lowest(self) -> int:
        return min(int(rung) for rung in self._store.below(f"{self._folder}/may").values())

    def _awaited(self, key: str) -> bytes:
        """A value that another process will give; no time limit, as the process may compile or wait for its lease."""
        while not self._over:
            if (found := self._store.get(f"{self._folder}/{key}", _WAIT)) is not None:
                return found
        raise AgreementError(f"job {self._name!r} has ended while it waited")


def _numbers(said: bytes) -> tuple[int, int]:
    first, second = said.split()
    return int(first), int(second)


_COUNTS: Final[Counter[tuple[str, tuple[int, ...]]]] = Counter()


def together(name: str, members: Sequence[int]) -> Together:
    """Another job of that name in these processes, which all begin theirs in the same order. Raises ``AgreementError``
    without ``jax.distributed``."""
    shared = store()
    if shared is None:
        raise AgreementError(
            f"job {name!r} runs on devices of {len(members)} processes, and they have no way to agree on a plan: call "
            "jax.distributed.initialize() first"
        )
    _COUNTS[name, tuple(members)] += 1
    digest = hashlib.sha256(repr((name, members)).encode()).hexdigest()[:16]
    folder = f"jaxtensile/job/{digest}/{_COUNTS[name, tuple(members)]}"
    return Together(shared, folder, jax.process_index(), members, patience(), name)


__all__ = ["Together", "together"]
