"""The server of a coordinator: one process with a socket.

    STARTING (lock, replay) → RECOVERING (charges known) → SERVING → DRAINING (a signal to end) → STOPPED

Invariant: one thread, waiting only for the next event: sockets, deaths, signals or the clock. Commands are carried out
in order, with one write of the journal and one per connection for a batch of events. A peer can end only its own
connection.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.daemon.endpoint import Endpoint
from jaxtensile.runtime.daemon.journal_file import JournalFile, boot_id
from jaxtensile.runtime.daemon.log import Log
from jaxtensile.runtime.daemon.metrics import LONGEST_REQUEST, answer, exposition
from jaxtensile.runtime.daemon.peers import Dead, Watched, credentials
from jaxtensile.runtime.daemon.streams import ENOUGH_UNREAD, READ_WITHIN, TAKEN, Stream
from jaxtensile.runtime.decide.events import (
    CapacityChanged,
    Close,
    Command,
    Compact,
    Connected,
    Disconnected,
    Event,
    Garbled,
    JournalFailed,
    JournalWorks,
    ProcessDied,
    Received,
    Record,
    Restarted,
    Send,
    Settings,
    SettingsChanged,
    Stopping,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Code, Error
from jaxtensile.runtime.protocol.wire import REQUESTS, ProtocolError, frame, take
from jaxtensile.units import Seconds

LOOK_EVERY: Final = 1.0
"""Seconds between checks of the socket's file, the lock and a failed journal, which send no events. A guess."""
GRACE: Final = 5.0
"""Seconds for jobs to release after a signal to end; also from terminating a process to killing it. A guess."""
HELLO_WITHIN: Final = 10.0
"""Seconds until a connection's first message, or it is closed. A guess."""
_AT_ONCE: Final = 64
"""Descriptors per turn: few, so that the answers of a batch come soon. A guess."""
_ACCEPTS: Final = 256
"""Connections accepted per turn: they are answered before more are accepted. A guess."""
COLLECT_EVERY, COLLECT_IN_ANY_CASE = 1.0, 60.0
"""Seconds between two collections of garbage while nobody waits, and while somebody always does: one takes some 10 ms
for 1,000 jobs. Guesses."""
_TICK_LATE: Final = 0.02
"""Seconds of delay: asking for the coordinator's next time costs too much per batch. A guess; deadlines are seconds."""
_SCRAPES: Final = 32
"""Connections to the metrics port, open to any user of the machine; scrapers are answered at once. A guess."""
_LOG_EVERY: Final = 0.1
"""Seconds between two writes of the log: rare enough to cost nothing, frequent enough for people. A guess."""
_LOG_LINES: Final = 64
"""Lines written at once; more are only counted. A guess: two screens."""
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_UNSEEN: Final = "your process cannot be seen from here"

Reading = tuple[Mapping[str, Capacity], Settings]


class Server:
    """A coordinator behind a socket. ``reread``: returns the config's contents; ``metrics``: a listening TCP socket."""

    def __init__(
        self,
        place: Endpoint,
        reread: Callable[[], Reading],
        *,
        log: Log,
        metrics: socket.socket | None = None,
        parent: int | None = None,
        grace: Seconds = GRACE,
    ) -> None:
        capacities, settings = reread()
        self._place, self._reread, self._log, self._metrics, self._grace = place, reread, log, metrics, grace
        self._coordinator = Coordinator(capacities, settings)
        self._epoll = select.epoll()
        self._journal = JournalFile(place.journal)
        self._watched = Watched(self._epoll)
        self._streams: dict[int, Stream] = {}
        self._numbers: dict[int, Stream] = {}
        self._more: list[Stream] = []
        """Streams with more messages than were heard at once."""
        self._number = 0
        self._pending: list[Event] = []
        self._unwatched: list[Process] = []
        self._kills: list[tuple[Seconds, Process]] = []
        self._listener: socket.socket | None = None
        self._parent = parent
        self._parent_pidfd = -1
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Closed for a moment to refuse a connection if no descriptors are left."""
        self._look_at = self._wake_at = self._log_at = 0.0
        self._collected, self._littered = time.monotonic(), False
        self._seen = 0
        self._drained: Seconds | None = None
        self._stopped = False
        self._began = time.monotonic()

    # From beginning to end.

    def run(self) -> None:
        """Serve until a signal to end. Raises ``PlaceError`` or ``JournalError`` before it serves."""
        more_descriptors()
        self._place.take()
        known = self._journal.read(boot := boot_id())
        signals, _ = pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = self._signals(pipe[1])
        self._epoll.register(signals, select.EPOLLIN)
        try:
            if self._parent is not None:
                self._parent_pidfd = os.pidfd_open(self._parent)
                self._epoll.register(self._parent_pidfd, select.EPOLLIN)
            # The first record must be on disk: an epoch that is not on record may be used again.
            if self._carry_out(self._coordinator.handle(Restarted(known, boot), time.monotonic())):
                raise ConfigError(f"{self._place.journal} cannot be written: make room on its disk")
            self._listen()
            if self._metrics is not None:
                self._metrics.setblocking(False)
                self._epoll.register(self._metrics, select.EPOLLIN)
            more = {} if self._metrics is None else {"metrics": self._metrics.getsockname()[1]}
            facts = {"pid": os.getpid(), "epoch": self._coordinator.epoch, **more}
            self._log.tell("listening", socket=self._place.path, **facts)
            gc.collect()
            gc.freeze()
            gc.disable()
            while not self._stopped:
                self._turn(signals)
        finally:
            gc.enable()
            self._end(before, pipe)

    def _signals(self, descriptor: int) -> dict[signal.Signals, object]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before: dict[signal.Signals, object] = {n: signal.signal(n, _ignore) for n in numbers}
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        return before

    def _end(self, before: Mapping[signal.Signals, object], pipe: tuple[int, int]) -> None:
        for stream in [*self._streams.values()]:
            with suppress(OSError):
                stream.socket.send(stream.out, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            stream.socket.close()
        self._tell_log(force=True)
        left = len(self._coordinator.arbiter.leases)
        self._log.tell("stopped", leases=left, seconds=time.monotonic() - self._began)
        if self._listener is not None:
            self._listener.close()
        self._place.leave()
        self._watched.close()
        self._epoll.close()
        for descriptor in (self._spare, self._parent_pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        for descriptor in pipe:
            os.close(descriptor)

    def _listen(self) -> None:
        self._listener = self._place.bind()
        self._epoll.register(self._listener, select.EPOLLIN)

    # One turn.

    def _turn(self, signals: int) -> None:
        due = self._littered and time.monotonic() >= self._collected + COLLECT_EVERY
        ready = self._epoll.poll(0.0 if due else self._timeout(), _AT_ONCE)
        events, self._pending = self._pending, []
        now = time.monotonic()
        if due and (not (ready or events or self._more) or now >= self._collected + COLLECT_IN_ANY_CASE):
            gc.collect()
            self._collected, self._littered = now, False
        more, self._more = self._more, []
        for stream in more:
            self._hear(stream, b"", events)
        for descriptor, mask in ready:
            stream = self._streams.get(descriptor)
            if stream is not None:
                if stream.out:
                    self._write(stream)
                if mask & ~select.EPOLLOUT and stream.full is None and not stream.more and descriptor in self._streams:
                    self._read(stream, events)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(events, now)
            elif descriptor == signals:
                for number in os.read(signals, 64):
                    self._signalled(number, events, now)
            elif (process := self._watched.fired(descriptor)) is not None:
                self._died(process, events)
            elif descriptor == self._parent_pidfd:
                self._log.tell("parent_ended")
                self._stopped = True
            elif self._metrics is not None and descriptor == self._metrics.fileno():
                self._accept_scrape(self._metrics, now)
        if now >= self._wake_at:
            wake = self._coordinator.wake
            self._wake_at = float("inf") if wake is None else max(wake, now)
            if wake is not None and now >= wake:
                events.append(Tick())
        if now >= self._look_at:
            self._look(events, now)
            self._look_at = now + LOOK_EVERY
        if events:
            self._handle(events, now)
            self._littered = True
            self._wake_at = min(self._wake_at, now + _TICK_LATE)
        self._tell_log()
        if self._drained is not None and (now >= self._drained or not self._coordinator.arbiter.leases):
            self._stopped = True

    def _timeout(self) -> Seconds:
        if self._pending or self._more:
            return 0.0
        due = min(self._look_at, self._wake_at)
        if self._coordinator.chronicle.total > self._seen:
            due = min(due, self._log_at)
        return max(due - time.monotonic(), 0.0)

    def _handle(self, events: Sequence[Event], now: Seconds) -> None:
        # Who asks what needs no decision is answered before one, which may take long.
        if self._carry_out(self._coordinator.hear(events, now)):
            self._carry_out(self._coordinator.handle(JournalFailed(), now))
        if self._carry_out(self._coordinator.decide()):
            self._carry_out(self._coordinator.handle(JournalFailed(), now))

    def _tell_log(self, *, force: bool = False) -> None:
        """Log the events since the last lines, at most every ``_LOG_EVERY`` seconds unless ``force``."""
        chronicle, now = self._coordinator.chronicle, time.monotonic()
        if chronicle.total == self._seen or (now < self._log_at and not force):
            return
        missed, entries = chronicle.since(self._seen)
        self._seen, self._log_at = chronicle.total, now + _LOG_EVERY
        if len(entries) > _LOG_LINES:
            missed += len(entries) - _LOG_LINES
            entries = entries[-_LOG_LINES:]
        if missed:
            self._log.tell("too_much_to_tell", lines=missed)
        self._log.entries(entries)

    # Commands.

    def _carry_out(self, commands: Sequence[Command]) -> bool:
        """Carry out commands in order. True if the journal could not be written."""
        records: list[Record] = []
        changed: dict[int, Stream] = {}
        closed: list[Stream] = []
        failed = False
        for command in commands:
            kind = type(command)
            if kind is Record:
                records.append(command)  # pyright: ignore[reportArgumentType]
                continue
            if records:
                failed |= not self._append(records)
                records = []
            match command:
                case Send():
                    stream = self._numbers.get(command.connection)
                    if stream is not None and not (failed and command.after_record):
                        stream.out += self._framed(command)
                        changed[command.connection] = stream
                case Close():
                    if (stream := self._numbers.get(command.connection)) is not None:
                        closed.append(stream)
                case Watch():
                    self._watch(command.process)
                case Compact():
                    failed |= not self._replace(command)
                case Terminate():
                    self._watched.send(command.process, signal.SIGTERM)
                    self._kills.append((time.monotonic() + self._grace, command.process))
                case Record():
                    pass
        if records:
            failed |= not self._append(records)
        for stream in changed.values():
            self._write(stream)
        for stream in closed:
            self._drop(stream)
        return failed

    def _framed(self, command: Send) -> bytes:
        try:
            return frame(command.message)
        except ProtocolError as error:
            return frame(Error(code="protocol", detail=str(error)))

    def _append(self, records: Sequence[Record]) -> bool:
        try:
            self._journal.append([r.record for r in records])
        except OSError as error:
            self._journal_error(error)
            return False
        return True

    def _replace(self, command: Compact) -> bool:
        try:
            self._journal.replace(command.records)
        except OSError as error:
            self._journal_error(error)
            return False
        return True

    def _journal_error(self, error: OSError) -> None:
        self._coordinator.counters["journal errors"] += 1
        if self._coordinator.journal_works:
            self._log.tell("journal_error", file=self._place.journal, error=error.strerror or str(error))

    def _watch(self, process: Process) -> None:
        try:
            if not self._watched.watch(process):
                self._pending.append(ProcessDied(process))
        except OSError:  # no descriptors: tried again at the next look
            self._unwatched.append(process)

    # Connections.

    def _accept(self, events: list[Event], now: Seconds) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTS):
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._refuse_one(self._listener)
                    return
                continue  # it was gone before it was accepted
            link.setblocking(False)
            try:
                pid, uid = credentials(link)
                if uid != os.geteuid() or not pid:
                    why = f"user {uid} may not use the coordinator of user {os.geteuid()}"
                    self._refuse(
                        link, "not yours", why if pid else "your process cannot be seen from here", "wrong user"
                    )
                    continue
                process = self._watched.met(link, pid)
            except Dead:
                link.close()
                continue
            except OSError:
                self._refuse(link, "busy", "no descriptors are left", "busy")
                continue
            self._number += 1
            stream = self._open(link, self._number, process, now)
            self._numbers[self._number] = stream
            events.append(Connected(self._number, process))

    def _open(self, link: socket.socket, number: int, process: Process | None, now: Seconds) -> Stream:
        stream = Stream(link, number, process, now)
        self._streams[stream.descriptor] = stream
        self._epoll.register(stream.descriptor, select.EPOLLIN)
        return stream

    def _refuse_one(self, listener: socket.socket) -> None:
        """Refuse the next connection for lack of descriptors, with the help of the spare one."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            link, _ = listener.accept()
            link.setblocking(False)
            self._refuse(link, "busy", "no descriptors are left", "busy")
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _refuse(self, link: socket.socket, code: Code, detail: str, count: str) -> None:
        self._coordinator.counters[count] += 1
        again = 1.0 if code == "busy" else None
        with suppress(OSError):
            link.send(frame(Error(code=code, detail=detail, retry_after=again)), socket.MSG_NOSIGNAL)
        link.close()

    def _read(self, stream: Stream, events: list[Event]) -> None:
        data = stream.read()
        if data is None:
            return
        if stream.process is None:
            self._scraped(stream, data)
            return
        if not data:
            self._drop(stream, events)
            return
        self._hear(stream, data, events)

    def _hear(self, stream: Stream, data: bytes, events: list[Event]) -> None:
        """Take the next few messages of earlier and new bytes. More wait until these are answered and read, so that no
        peer takes all time or memory."""
        if stream.full is not None or self._streams.get(stream.descriptor) is not stream:
            return
        taken = take(stream.rest + data if stream.rest else data, REQUESTS, TAKEN)
        stream.rest = taken.rest
        stream.heard |= bool(taken.messages)
        for message in taken.messages:
            events.append(Received(stream.number, message))
        if taken.error is not None:
            events.append(Garbled(stream.number, str(taken.error)))
        stream.more = len(taken.messages) == TAKEN and taken.error is None
        if stream.more:
            self._more.append(stream)

    def _write(self, stream: Stream) -> None:
        given_up = stream.write()
        if given_up == "gone" and stream.process is not None:
            stream.out.clear()  # what it said before it went is heard all the same
        elif given_up == "gone" or (given_up and stream.process is not None):
            self._give_up(stream, given_up)
            return
        full = len(stream.out) > ENOUGH_UNREAD
        if full != (stream.full is not None):
            stream.full = time.monotonic() if full else None
            if stream.more and not full:
                self._more.append(stream)
        awaited = (0 if full else select.EPOLLIN) | (select.EPOLLOUT if stream.out else 0)
        if awaited != stream.awaited:
            stream.awaited = awaited
            self._epoll.modify(stream.descriptor, awaited)
        if stream.process is None and not stream.out and stream.heard:
            self._drop(stream)

    def _give_up(self, stream: Stream, why: str) -> None:
        self._coordinator.counters[why] += 1
        self._drop(stream)

    def _drop(self, stream: Stream, events: list[Event] | None = None) -> None:
        """Close a connection; its end becomes an event, of this turn or the next."""
        if self._streams.pop(stream.descriptor, None) is None:
            return
        self._epoll.unregister(stream.descriptor)
        stream.socket.close()
        if self._numbers.pop(stream.number, None) is not None:
            (self._pending if events is None else events).append(Disconnected(stream.number))

    def _died(self, process: Process, events: list[Event]) -> None:
        events.append(ProcessDied(process))
        for stream in [s for s in self._numbers.values() if s.process == process]:
            # What it said is not waited for any more; a process that it forked may still have it open.
            self._drop(stream, events)

    # Metrics.

    def _accept_scrape(self, listener: socket.socket, now: Seconds) -> None:
        try:
            link, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                self._refuse_one(listener)
            return
        link.setblocking(False)
        self._open(link, -1, None, now)
        others = [s for s in self._streams.values() if s.process is None]
        if len(others) > _SCRAPES:
            self._drop(others[0])

    def _scraped(self, stream: Stream, data: bytes) -> None:
        stream.rest += data
        whole = b"\r\n\r\n" in stream.rest or len(stream.rest) > LONGEST_REQUEST
        if not data:
            self._drop(stream)
        elif whole and not stream.heard:
            stream.heard = True
            now = time.monotonic()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            more = {
                "connections": len(self._numbers),
                "uptime_seconds": now - self._began,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "log_lines_dropped": self._log.dropped,
            }
            stream.out += answer(stream.rest, exposition(self._coordinator, now, more))
            self._write(stream)

    # Signals and the clock.

    def _signalled(self, number: int, events: list[Event], now: Seconds) -> None:
        if number == signal.SIGHUP:
            self._changed(events)
        elif self._drained is None:
            self._drained = now + self._grace
            events.append(Stopping())
            self._log.tell("ending", signal=signal.Signals(number).name, grace=self._grace)
        else:
            self._stopped = True

    def _changed(self, events: list[Event]) -> None:
        """Read the config again."""
        try:
            capacities, settings = self._reread()
        except ConfigError as error:
            self._coordinator.counters["config errors"] += 1
            self._log.tell("config_kept", error=str(error))
            return
        events.append(CapacityChanged(capacities))
        events.append(SettingsChanged(settings))
        self._log.tell("config_read")

    def _look(self, events: list[Event], now: Seconds) -> None:
        """Check things that send no events."""
        if self._place.displaced():
            # Another coordinator has the lock and the journal: whoever is connected here goes there.
            self._log.tell("displaced", socket=self._place.path)
            self._stopped = True
            return
        if self._place.lost():
            self._rebind()
        if not self._coordinator.journal_works or self._journal.lost():
            events.append(JournalWorks())
        for stream in [*self._streams.values()]:
            if (not stream.heard or stream.process is None) and now > stream.since + HELLO_WITHIN:
                self._drop(stream, events)
            elif stream.full is not None and now > stream.full + READ_WITHIN:
                self._give_up(stream, "slow")
        waiting, self._unwatched = self._unwatched, []
        for process in waiting:
            self._watch(process)
        for _, process in [k for k in self._kills if k[0] <= now]:
            self._watched.send(process, signal.SIGKILL)
        self._kills = [k for k in self._kills if k[0] > now]
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _rebind(self) -> None:
        """Bind a new socket file after the old one was lost; connections go on."""
        if self._listener is not None:
            self._epoll.unregister(self._listener)
            self._listener.close()
            self._listener = None
        try:
            self._listen()
            self._log.tell("bound_again", socket=self._place.path)
        except OSError as error:  # tried again at the next look
            self._log.tell("not_bound", socket=self._place.path, error=str(error))
        except Exception as error:
            self._log.tell("not_bound", socket=self._place.path, error=str(error))


def more_descriptors() -> int:
    """Raise the descriptor limit to the most allowed; the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _ignore(number: int, stack: FrameType | None) -> None:
    """Signals are handled from the wakeup descriptor."""
