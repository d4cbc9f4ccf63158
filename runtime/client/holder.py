"""The job's side of the coordinator's protocol, without a socket.

Invariant: a job uses at most what its rung needs, or while it moves what covers both rungs. It moves only at step
boundaries and only to a rung told on its current connection, and reports it. When the connection ends, it stays: the
coordinator may be gone, and its last grant known to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    AskTurn,
    Begin,
    Done,
    End,
    Error,
    Grant,
    Hello,
    Reclaim,
    Reject,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Revoke,
    Token,
    Withdraw,
)
from jaxtensile.units import Bytes, Seconds

Phase = Literal["waiting", "holding", "releasing", "ended"]


class Holder:
    """One job of a process. ``held``: the rung it is on; ``target``: the rung it was told; -1 for none."""

    __slots__ = (
        "_asked",
        "_clamp",
        "_connected",
        "_number",
        "_renewal",
        "_turns",
        "_unsaid",
        "admit",
        "asks",
        "ending",
        "held",
        "lease",
        "moving",
        "phase",
        "reason",
        "target",
        "token",
        "turn",
        "turns",
    )

    def __init__(self, admit: Admit, number: int = 0, *, clamp: bool = True) -> None:
        self.admit = admit
        self._number = number
        self._asked = False
        """The coordinator may have received the request."""
        self.phase: Phase = "waiting"
        self.lease = 0
        self.token = Token(0, 0)
        self.held = self.target = self.moving = -1
        self.reason = ""
        """Why it was rejected."""
        self._clamp = clamp
        self._connected = False
        self._renewal: tuple[Admit, int] | None = None
        """The ladder that was asked for, and the rung of it that covers what the job holds."""
        self._unsaid = False
        """It connected during a move: it reports its rung after the move."""
        self.turns = False
        """Whether a step needs a turn."""
        self._turns = 0
        """How many turns it has asked for."""
        self.turn = self.asks = -1
        """The numbers of the turn it has, and of the one it waits for; -1: none."""
        self.ending = False
        """Whether others wait for the turn it has."""

    def connected(self, in_use: Sequence[Bytes]) -> list[Request]:
        """Requests to send first on a new connection."""
        self._connected = True
        self._unsaid = self.moving >= 0
        return [Hello(version=VERSION), *self._introduced(in_use)]

    def disconnected(self) -> None:
        """Stay on the rung, and do not grow before a new grant."""
        self._connected = False
        self.ending = False  # who waited asks again, and then it is told again
        if self._clamp:
            self.target = self.held if self.moving < 0 else self.moving

    def received(self, message: Reply, in_use: Sequence[Bytes]) -> list[Request]:
        """The answer to a message; ``in_use``: bytes held on each device, then of host memory."""
        match message:
            case Renewed() if self._is_for_me(message):
                if self._renewal is not None and self.token.sequence == message.former:
                    self.admit, self.held = self._renewal
                    self.target = self.held
                self.token, self._renewal = message.token, None
                return [self._ack(in_use)] if self.moving < 0 else []
            case Grant() | Revoke() if self._is_for_me(message):
                self._renewal = None  # that crossed what is said of the former ladder, and does not count
                self.lease, self.token, self.target = message.lease, message.token, message.rung
                self.turns = message.turns
                if self.phase == "waiting":
                    self.held, self.phase = message.rung, "holding"  # in this order: others read it without a lock
                if isinstance(message, Revoke) and self.held == message.rung and self.moving < 0:
                    return [self._ack(in_use)]
            case Begin(lease=lease, turn=turn) if lease == self.lease and turn == self.asks:
                self.turn, self.asks = turn, -1
            case End(lease=lease, turn=turn) if lease == self.lease and turn == self.turn:
                self.ending = True
            case Released(lease=lease) if self.phase == "releasing" and lease == self.lease:
                self.phase = "ended"
            case Reject(reason=reason) if self.phase == "waiting":
                self.reason, self.phase = reason, "ended"
            case Error(code="in use", lease=lease) if self.phase == "releasing" and lease == self.lease:
                self.reason, self.phase = message.detail, "ended"
            case Error(code="no room", lease=lease) if lease == self.lease:
                self._renewal = None
            case Error(code="unknown lease", lease=lease) if self.phase == "holding" and lease == self.lease:
                # Nobody knows of it, so nothing may be held by it.
                self.reason, self.phase = message.detail, "ended"
            case _:
                pass
        return []

    def renew(self, admit: Admit, rung: int, in_use: Sequence[Bytes]) -> list[Request]:
        """Ask for the ladder of ``admit`` between two steps; ``rung`` of it covers the bytes held.

        Empty unless connected, on the rung told, and without a pending renewal. ``renewing``: an answer is to come.
        """
        at_rest = self.phase == "holding" and self.moving < 0 and self.target == self.held
        if not at_rest or self._renewal is not None or not self._connected:
            return []
        self._renewal = admit, rung
        return [
            Renew(
                lease=self.lease,
                token=self.token,
                ladder=admit.ladder,
                rung=rung,
                floor=admit.floor,
                want=admit.want,
                in_use=tuple(in_use),
                suspended=admit.suspended,
            )
        ]

    @property
    def renewing(self) -> bool:
        """Whether the answer to ``renew`` is still to come."""
        return self._renewal is not None

    def ask_turn(self) -> list[Request]:
        """Ask for a turn, unless it has one that nobody else waits for."""
        if self.phase != "holding" or self.asks >= 0 or (self.turn >= 0 and not self.ending):
            return []
        said = self.end_turn(0.0, ())
        self._turns += 1
        self.asks = self._turns
        return [*said, *self._asked_turn()]

    def end_turn(self, cost: Seconds, in_use: Sequence[Bytes]) -> list[Request]:
        """It has no turn any more, and waits for none. ``cost``: as in ``Done``."""
        turns = [turn for turn in (self.turn, self.asks) if turn >= 0]
        self.turn, self.asks, self.ending = -1, -1, False
        if not self._connected or self.phase != "holding":
            return []
        return [Done(lease=self.lease, turn=turn, cost=cost, in_use=tuple(in_use)) for turn in turns]

    def _asked_turn(self) -> list[Request]:
        return [AskTurn(lease=self.lease, turn=self.asks)] if self._connected and self.asks >= 0 else []

    def _is_for_me(self, message: Grant | Revoke | Renewed) -> bool:
        known = self.phase == "waiting" or (self.phase == "holding" and message.lease == self.lease)
        return known and message.job == self.admit.job and message.token > self.token

    def boundary(self) -> int | None:
        """The rung to move to, called between two steps; None: stay."""
        if self.phase != "holding" or self.moving >= 0 or self.target == self.held:
            return None
        self.moving = self.target
        return self.moving

    def moved(self, in_use: Sequence[Bytes]) -> list[Request]:
        """The job is on its new rung and holds nothing of the other one any more."""
        self.held, self.moving = self.moving, -1
        if not self._connected:
            return []
        if self._unsaid:
            return self._introduced(in_use)
        return [self._ack(in_use)] if self.held == self.target else []

    def release(self, in_use: Sequence[Bytes]) -> list[Request]:
        """The job is done, or stops waiting; ``in_use``: bytes that the allocator keeps."""
        if self.phase == "waiting":
            self.phase = "releasing" if self._asked else "ended"
        elif self.phase == "holding":
            self.phase, self.held, self.target, self.moving = "releasing", -1, -1, -1
            self.turn, self.asks, self.ending = -1, -1, False
        else:
            return []
        return self._introduced(in_use) if self._connected else []

    def _introduced(self, in_use: Sequence[Bytes]) -> list[Request]:
        held = tuple(in_use)
        match self.phase:
            case "waiting":
                self._asked = True
                return [structs.replace(self.admit, number=self._number)]
            case "holding" if self.moving < 0:
                self._unsaid = False
                said = Reclaim(lease=self.lease, token=self.token, rung=self.held, in_use=held, turn=self.turn)
                return [said, *self._asked_turn()]
            case "releasing" if not self.lease:
                return [Withdraw(job=self.admit.job, number=self._number)]
            case "releasing":
                return [Release(lease=self.lease, token=self.token, in_use=held)]
            case _:
                return []

    def _ack(self, in_use: Sequence[Bytes]) -> Ack:
        return Ack(lease=self.lease, token=self.token, rung=self.held, in_use=tuple(in_use))
