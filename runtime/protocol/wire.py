"""Messages as bytes of a stream.

A frame is a length (unsigned 32-bit big-endian) and that many bytes of msgpack, at most 64 KiB.

Invariant: any bytes, in any pieces, give messages and at most one ``ProtocolError`` value, as the last. After it the
stream must be closed.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import DecodeError, MsgspecError
from msgspec.msgpack import Decoder, Encoder

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.protocol.messages import Reply, Request
from jaxtensile.units import KIB, Bytes

LIMIT: Final = 64 * KIB
"""Bytes of one message at most: bounds what a peer keeps for the other. Larger ladders are refused with an error. A
guess."""
HEADER: Final = 4
"""Bytes of the length before each message: an unsigned 32-bit number, the shortest usual type that holds ``LIMIT``."""
_SAID: Final = 200
"""Letters kept of an error about a message, enough for msgspec's sentence: without a bound, 4,200 wrong frames kept 255
MB."""

REQUESTS: Final[Decoder[Request]] = Decoder(Request)
REPLIES: Final[Decoder[Reply]] = Decoder(Reply)
_ENCODER: Final = Encoder()
_SIZE: Final = Struct(">I").unpack_from

M = TypeVar("M")


class ProtocolError(CoordinatorError):
    """Bytes that are no message: a value from the decoder, raised by the encoder."""


class Taken(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """A stream so far: whole messages, bytes of the next, and why there can be no next one."""

    messages: tuple[M, ...] = ()
    rest: bytes = b""
    error: ProtocolError | None = None


def frame(message: Request | Reply) -> bytes:
    """A message's bytes. Raises ``ProtocolError`` above the limit."""
    body = _ENCODER.encode(message)
    if len(body) > LIMIT:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {LIMIT}: send fewer rungs or leases")
    return len(body).to_bytes(HEADER, "big") + body


def take(pending: bytes, decoder: Decoder[M], most: int | None = None) -> Taken[M]:
    """The first messages of ``pending``, ``most`` at most. Pass ``rest`` and newly read bytes to the next call."""
    found: list[M] = []
    at, end = 0, len(pending)
    while end - at >= HEADER and len(found) != most:
        (size,) = _SIZE(pending, at)
        if size > LIMIT:
            return _broken(found, f"a frame of {size} bytes is over the limit of {LIMIT}")
        begin = at + HEADER
        if end - begin < size:
            break
        try:
            found.append(decoder.decode(pending[begin : begin + size]))
        except (MsgspecError, DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            # What it says is wrong it repeats, be it as long as the frame.
            return _broken(found, f"a frame of {size} bytes is no message: {str(wrong)[:_SAID]}")
        at = begin + size
    return Taken(messages=tuple(found), rest=pending[at:])


def longest_rest() -> Bytes:
    """Bytes that a reader may have to keep between two reads."""
    return HEADER + LIMIT


def _broken(found: list[M], why: str) -> Taken[M]:
    return Taken(messages=tuple(found), error=ProtocolError(why))
