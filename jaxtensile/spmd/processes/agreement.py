"""One decision, or one error, among several processes. In a round one leads and the others follow.

    member                      leader, the lowest of them
    question  ───────────────▶  all there, and all ask the same?
              ◀───────────────  answer, by ``lead``
    digest    ───────────────▶  all the same?        (of what each would run, by ``follow``)
              ◀── verdict ────  run, or an error

The first verdict stands, and all obey it. A process that fails, is interrupted, or misses another one writes an error,
unless a verdict exists. So all go on, or all raise one error.

No work has a time limit. A live process *beats*: it counts in the store, and is missed when its count stands still for
``PATIENCE``. A process that does not come is missed after the same time.

Rounds are numbered per set of members, whatever they are about. So functions called in different orders meet in one
round, which reports it. A round's keys are deleted once all members have read its verdict.

Invariant: ``agree`` returns in a member only after all members were found to hold the same digest.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from jaxtensile import errors
from jaxtensile.errors import AgreementError, BudgetError, Culprit, JaxtensileError, StoppedError
from jaxtensile.spmd.processes.keystore import Store
from jaxtensile.units import Seconds

VARIABLE: Final = "JAXTENSILE_AGREEMENT_TIMEOUT"
PATIENCE: Final[Seconds] = 40.0
"""Seconds without a sign of life. A compiler may block Python threads for some seconds; a program's first collective
waits about as long for an absent process."""
_BEAT: Final[Seconds] = 2.0
"""Seconds between two signs of life. A guess: twenty in ``PATIENCE``."""
_LOOK: Final[Seconds] = 1.0
"""Seconds between a waiting process's looks for a verdict. A guess."""
_SHOWN: Final = 80
"""Characters of a value in an error: a line."""
_NAMED: Final = 4
"""Processes named one by one in an error. A guess: a line."""

T = TypeVar("T")
Watch = Callable[[str], None]


class Question(msgspec.Struct, frozen=True):
    """``same``: values that must agree in all processes, by user-facing names. ``own``: the rest."""

    same: Mapping[str, str]
    own: bytes = b""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error raised in every process. ``kind``: its class in ``jaxtensile.errors``."""

    kind: str
    message: str
    needs: int | None = None
    has: int | None = None
    culprits: tuple[Culprit, ...] = ()

    def error(self) -> JaxtensileError:
        """The error as an exception."""
        kind = getattr(errors, self.kind)
        if issubclass(kind, BudgetError):
            return kind(self.message, needs=self.needs, has=self.has, culprits=self.culprits)
        return kind(self.message)


class Verdict(msgspec.Struct, frozen=True):
    """``failure``: None if all run the program of ``digest``."""

    digest: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Agreed:
    """The leader's answer, and the digest of its program."""

    answer: bytes
    digest: str


_ROUNDS: WeakKeyDictionary[Store, dict[tuple[int, ...], int]] = WeakKeyDictionary()
_COUNTING: Final = threading.Lock()


def agree(
    store: Store,
    me: int,
    members: Sequence[int],
    name: str,
    question: Question,
    lead: Callable[[Sequence[bytes], Watch], bytes],
    follow: Callable[[bytes, Watch], tuple[T, str]],
) -> tuple[T, Agreed]:
    """The result of ``follow`` on the leader's answer, in all ``members`` (ascending), or the same error in all.

    ``name``: of the thing decided. ``lead``: the members' ``own`` values, in their order → the answer; called in the
    first member alone. ``follow``: the answer → its result here and a digest; called in every member. They call their
    ``Watch`` now and then, which raises once another process has failed. An error of either is raised everywhere: as it
    is if ours, else as ``AgreementError``.
    """
    here = _Round(store, _folder(store, tuple(members)), me, tuple(members), name, patience())
    try:
        with here.beating():
            return here.held(question, lead, follow)
    finally:
        here.leave()


def _folder(store: Store, members: tuple[int, ...]) -> str:
    """The key folder of the members' next round."""
    with _COUNTING:
        counts = _ROUNDS.setdefault(store, {})
        number = counts[members] = counts.get(members, -1) + 1
    return f"jaxtensile/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}/{number}"


def patience() -> Seconds:
    """Seconds without a sign of life after which a process is missed. Raises ``AgreementError``."""
    given = os.environ.get(VARIABLE, "")
    try:
        return max(float(given), 2 * _BEAT) if given else PATIENCE
    except ValueError:
        raise AgreementError(f"${VARIABLE}={given!r} is no number of seconds: leave it out for {PATIENCE:g}") from None


class _Over(StoppedError):
    """The verdict is an error."""


@dataclass
class _Round:
    store: Store
    folder: str
    me: int
    members: tuple[int, ...]
    name: str
    patience: Seconds
    doing: str = "asks"
    over: bool = False
    """Whether the verdict is known to be an error."""

    def held(
        self,
        question: Question,
        lead: Callable[[Sequence[bytes], Watch], bytes],
        follow: Callable[[bytes, Watch], tuple[T, str]],
    ) -> tuple[T, Agreed]:
        """Hold the round, from the question to the verdict."""
        try:
            answer = self.answered(question, lead)
            self.doing = "compiles"
            made, digest = follow(answer, self.watch)
            self.put(f"digest/{self.me}", digest.encode())
            failure = self.checked(digest)
        except BaseException as error:
            failure = self.settled(Verdict(failure=self.failure_of(error))).failure
            if failure is None or not isinstance(error, Exception):
                raise
            raise failure.error() from (None if isinstance(error, _Over) else error)
        if failure is not None:
            raise failure.error()
        return made, Agreed(answer, digest)

    def answered(self, question: Question, lead: Callable[[Sequence[bytes], Watch], bytes]) -> bytes:
        """The leader's answer, once all members are there and ask the same."""
        self.put(f"question/{self.me}", msgspec.msgpack.encode(question))
        if self.me != self.members[0]:
            self.doing = "waits for the plan"
            return self.wait_for("answer")
        found = [self.wait_for(f"question/{p}") for p in self.members]
        questions = [msgspec.msgpack.decode(q, type=Question) for q in found]
        self.same_questions([q.same for q in questions])
        self.doing = "plans"
        answer = lead([q.own for q in questions], self.watch)
        self.put("answer", answer)
        return answer

    def checked(self, digest: str) -> Failure | None:
        """The verdict on running the program of ``digest``: its failure, or None."""
        try:
            if self.me != self.members[0]:
                self.doing = "waits for the verdict"
                told = self.wait_for("verdict")
                return msgspec.msgpack.decode(told, type=Verdict).failure
            for p in self.members:
                theirs = self.wait_for(f"digest/{p}").decode()
                if theirs != digest:
                    raise AgreementError(
                        f"process {p} would not run the same {self.name} as process {self.me}: their programs differ "
                        f"(digests {theirs[:12]} and {digest[:12]}); leave out of the function what is not the same in "
                        "all processes: constants of their own, jax.process_index(), other compiler flags"
                    )
            verdict = Verdict(digest)
        except AgreementError as error:
            verdict = Verdict(failure=self.failure_of(error))
        return self.settled(verdict).failure

    def same_questions(self, questions: Sequence[Mapping[str, str]]) -> None:
        """Raise ``AgreementError`` if the questions differ."""
        names = dict.fromkeys(name for q in questions for name in q)
        differ = [name for name in names if len({q.get(name) for q in questions}) > 1]
        if not differ:
            return
        told: list[str] = []
        for name in differ[:_NAMED]:
            asked: dict[str, list[int]] = {}
            for p, q in zip(self.members, questions, strict=True):
                asked.setdefault(_short(q.get(name, "unknown")), []).append(p)
            told.append(f"{name} is " + ", ".join(f"{value} in {_named(ps)}" for value, ps in asked.items()))
        raise AgreementError(
            f"the processes of {self.name} ask for different things: {'; '.join(told)}. One plan serves all of them: "
            "call the same function with the same options in all, in the same order"
        )

    # ---- waiting --------------------------------------------------------------------------------

    def wait_for(self, key: str) -> bytes:
        """Wait for the value of a key. Raises ``_Over`` if the verdict is an error."""
        while True:
            if self.failed():
                raise _Over
            found = self.get(key, _LOOK)
            if found is not None:
                return found

    def failed(self) -> bool:
        """Whether the verdict is an error."""
        found = self.get("verdict")
        self.over = found is not None and msgspec.msgpack.decode(found, type=Verdict).failure is not None
        return self.over

    def watch(self, _: str) -> None:
        """Called during work; raises once the round has failed."""
        if self.over:
            raise _Over

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Give signs of life, and look for those of the others, meanwhile."""
        stop = threading.Event()
        thread = threading.Thread(target=self.beat, args=(stop,), name="jaxtensile-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def beat(self, stop: threading.Event) -> None:
        """The thread's work: the leader looks for all members, the others for the leader."""
        leader = self.members[0]
        others = [p for p in self.members if p != self.me] if self.me == leader else [leader]
        heard: dict[int, tuple[bytes, Seconds]] = {p: (b"", time.monotonic()) for p in others}
        count = 0
        while not stop.wait(_BEAT if count else 0) and not self.over:
            count += 1
            with suppress(AgreementError):  # who waits for the store says so
                self.put(f"beat/{self.me}", f"{count} {self.doing}".encode())
                beats = self.store.below(f"{self.folder}/beat")
                for p in others:
                    now = beats.get(str(p), b"")
                    if now != heard[p][0]:
                        heard[p] = now, time.monotonic()
                if self.failed():
                    return
                silent = [p for p in others if time.monotonic() - heard[p][1] > self.patience]
                if silent:
                    error = self.missed(silent[0], heard[silent[0]][0])
                    self.over = self.settled(Verdict(failure=self.failure_of(error))).failure is not None

    def missed(self, process: int, beat: bytes) -> AgreementError:
        if beat:
            return AgreementError(
                f"process {process} {beat.decode().partition(' ')[2]} in the call of {self.name}, and has given no "
                f"sign of life for {self.patience:g} s: see its log for why it ended, and start all processes again; "
                f"${VARIABLE} is how many seconds to wait"
            )
        absent = [p for p in self.members if self.get(f"question/{p}") is None]
        return AgreementError(
            f"{_named(absent or [process])} of {_named(self.members)} did not come to this call of {self.name} within "
            f"{self.patience:g} s: all processes have to make the same calls in the same order, .plan(), .lower() and "
            f".trace() too; if it has ended, see its log; ${VARIABLE} is how many seconds to wait"
        )

    # ---- the end --------------------------------------------------------------------------------

    def settled(self, verdict: Verdict) -> Verdict:
        """The verdict that stands: this one, unless one exists."""
        stands = self.store.first(f"{self.folder}/verdict", msgspec.msgpack.encode(verdict))
        return msgspec.msgpack.decode(stands, type=Verdict)

    def failure_of(self, error: BaseException) -> Failure:
        """The failure for all to raise."""
        kind = type(error).__name__
        if isinstance(error, BudgetError):
            return Failure(
                kind=kind,
                message=str(error),
                needs=error.needs,
                has=error.has,
                culprits=error.culprits,
            )
        if isinstance(error, JaxtensileError) and getattr(errors, kind, None) is type(error):
            return Failure(kind=kind, message=str(error))
        lines = str(error).strip().splitlines()
        what = f"{kind}: {lines[0][:300]}" if lines else kind
        ended = "failed" if isinstance(error, Exception) else "was interrupted"
        return Failure(
            kind=AgreementError.__name__,
            message=f"process {self.me} {ended} while it {self.doing} in the call of {self.name}, so that none of "
            f"{_named(self.members)} runs it: {what}",
        )

    def leave(self) -> None:
        """Leave a read verdict; the last member deletes the round's keys."""
        with suppress(AgreementError):
            if self.store.count(f"{self.folder}/left") == len(self.members):
                self.store.delete(self.folder)

    def put(self, key: str, value: bytes) -> None:
        self.store.put(f"{self.folder}/{key}", value)

    def get(self, key: str, wait: Seconds = 0.0) -> bytes | None:
        return self.store.get(f"{self.folder}/{key}", wait)


def _named(processes: Sequence[int]) -> str:
    """``process 3``, or ``processes 0, 1 and 2``."""
    names = [str(p) for p in processes]
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    return f"process {names[0]}" if len(names) == 1 else f"processes {', '.join(names[:-1])} and {names[-1]}"


def _short(value: str) -> str:
    return (
        value if len(value) <= _SHOWN else f"{value[: _SHOWN - 16]}… ({hashlib.sha256(value.encode()).hexdigest()[:8]})"
    )


__all__ = ["Agreed", "Question", "agree", "patience"]
