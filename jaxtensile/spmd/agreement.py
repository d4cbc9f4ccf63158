"""How do several processes come to one decision, or to one error? A round: one leads, the others follow.

    member                      leader, the lowest of them
    question  ───────────────▶  all there, and all ask the same?
              ◀───────────────  answer, by ``lead``
    digest    ───────────────▶  all the same?        (of what each would run, by ``follow``)
              ◀── verdict ────  run, or an error

The verdict is put down once: the first one stands, and everybody goes by it. Whoever fails, is interrupted, or misses
another process puts an error there, unless there is a verdict already. So either all go on or all raise one error.

Nobody waits for a fixed time for work. A process that takes part *beats*: it counts in the store while it lives, and
it is missed when its count stands still for ``PATIENCE``. A process that has not come is missed after the same time.
Rounds are counted, by their members, whatever they are about: two functions that are called in another order meet in
one round, and are told. The keys of a round are deleted when all its members have read its verdict.

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
from jaxtensile.spmd.keystore import Store
from jaxtensile.units import Seconds

VARIABLE: Final = "JAXTENSILE_AGREEMENT_TIMEOUT"
PATIENCE: Final[Seconds] = 40.0
"""Seconds without a sign of life. A compiler may keep Python threads from running for some seconds; the first
collective of a program waits about as long for a process that does not come."""
_BEAT: Final[Seconds] = 2.0
"""Seconds between two signs of life. A guess: twenty in ``PATIENCE``."""
_LOOK: Final[Seconds] = 1.0
"""Seconds after which a process that waits looks for a verdict. A guess."""
_SHOWN: Final = 80
"""Characters of a value in an error: a line."""
_NAMED: Final = 4
"""Processes that an error names one by one. A guess: a line."""

T = TypeVar("T")
Watch = Callable[[str], None]


class Question(msgspec.Struct, frozen=True):
    """``same``: what must be the same in all processes, by names that a user knows; ``own``: what need not be."""

    same: Mapping[str, str]
    own: bytes = b""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error that is raised in every process. ``kind``: its class in ``jaxtensile.errors``."""

    kind: str
    message: str
    needs: int | None = None
    has: int | None = None
    culprits: tuple[Culprit, ...] = ()

    def error(self) -> JaxtensileError:
        """The error itself."""
        kind = getattr(errors, self.kind)
        if issubclass(kind, BudgetError):
            return kind(self.message, needs=self.needs, has=self.has, culprits=self.culprits)
        return kind(self.message)


class Verdict(msgspec.Struct, frozen=True):
    """``failure``: None where all run what has ``digest``."""

    digest: str = ""
    failure: Failure | None = None


@dataclass(frozen=True)
class Agreed:
    """What all have agreed on: the leader's answer, and the digest of what it leads to."""

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
    """What ``follow`` makes of the leader's answer, in all ``members`` (ascending), or the same error in all of them.

    ``name``: of what is decided; ``lead``: what is ``own`` to the members, in their order → the answer, called in the
    first member alone; ``follow``: the answer → what it is here and its digest, called in every member. What either
    raises is raised everywhere: as it is where it is an error of ours, else as ``AgreementError``. They call what they
    are given now and then, which raises once another process has failed.
    """
    here = _Round(store, _folder(store, tuple(members)), me, tuple(members), name, _patience())
    try:
        with here.beating():
            return here.held(question, lead, follow)
    finally:
        here.leave()


def _folder(store: Store, members: tuple[int, ...]) -> str:
    """Where the next round of these members is held."""
    with _COUNTING:
        counts = _ROUNDS.setdefault(store, {})
        number = counts[members] = counts.get(members, -1) + 1
    return f"jaxtensile/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}/{number}"


def _patience() -> Seconds:
    given = os.environ.get(VARIABLE, "")
    try:
        return max(float(given), 2 * _BEAT) if given else PATIENCE
    except ValueError:
        raise AgreementError(f"${VARIABLE}={given!r} is no number of seconds: leave it out for {PATIENCE:g}") from None


class _Over(StoppedError):
    """There is a verdict, and it is an error."""


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
    """Whether the verdict is an error, as far as it is known here."""

    def held(
        self,
        question: Question,
        lead: Callable[[Sequence[bytes], Watch], bytes],
        follow: Callable[[bytes, Watch], tuple[T, str]],
    ) -> tuple[T, Agreed]:
        """The round, from the question to the verdict."""
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
        """The leader's answer, once all are there and ask the same."""
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
        """The verdict: what stands against running what has ``digest``."""
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
        """Raise what differs in them."""
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
        """What is put there. Raises ``_Over`` where the verdict is an error."""
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
        """Called during work: there is no use in it any more once the round is over."""
        if self.over:
            raise _Over

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Meanwhile give signs of life, and look for those of the others."""
        stop = threading.Event()
        thread = threading.Thread(target=self.beat, args=(stop,), name="jaxtensile-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def beat(self, stop: threading.Event) -> None:
        """In a thread of its own. The leader looks for all, the others for the leader."""
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
        """The verdict that stands: this one, unless there is one already."""
        stands = self.store.first(f"{self.folder}/verdict", msgspec.msgpack.encode(verdict))
        return msgspec.msgpack.decode(stands, type=Verdict)

    def failure_of(self, error: BaseException) -> Failure:
        """The error as all are to raise it."""
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
        """This member has read the verdict; the last one tidies up."""
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


__all__ = ["Agreed", "Question", "agree"]
