"""How do messages become bytes of a stream, and what is said of bytes that are none?

Invariant: whatever bytes come, in whatever pieces, the answer is messages and at most one ``ProtocolError`` value, the
last; after it the stream cannot be understood any more and is to be closed. A frame is its length as an unsigned
32-bit big-endian number and that many bytes of msgpack, 64 KiB at most.
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
"""Bytes of one message at most, so that a peer can make the other keep no more; larger ladders are refused with an
error that says so. A guess."""
HEADER: Final = 4
"""Bytes of the length in front of each message: an unsigned 32-bit number, the shortest usual type that holds
``LIMIT``."""
_SAID: Final = 200
"""Letters of what is wrong with a message that are kept: enough for msgspec's sentence. Without a bound 4,200 wrong
frames kept 255 MB."""

REQUESTS: Final[Decoder[Request]] = Decoder(Request)
REPLIES: Final[Decoder[Reply]] = Decoder(Reply)
_ENCODER: Final = Encoder()
_SIZE: Final = Struct(">I").unpack_from

M = TypeVar("M")


class ProtocolError(CoordinatorError):
    """Bytes that are no message: a value that the decoder returns, and what the encoder raises."""


class Taken(msgspec.Struct, Generic[M], frozen=True, kw_only=True):
    """What was in a stream so far: whole messages, bytes of the next one, and why there can be no next one."""

    messages: tuple[M, ...] = ()
    rest: bytes = b""
    error: ProtocolError | None = None


def frame(message: Request | Reply) -> bytes:
    """The bytes of a message. Raises ``ProtocolError`` for one over the limit."""
    body = _ENCODER.encode(message)
    if len(body) > LIMIT:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {LIMIT}: send fewer rungs or leases")
    return len(body).to_bytes(HEADER, "big") + body


def take(pending: bytes, decoder: Decoder[M], most: int | None = None) -> Taken[M]:
    """The messages that ``pending`` begins with, at most so many. Feed ``rest`` and what was read next to the next
    call."""
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
    """How many bytes a reader may have to keep between two reads."""
    return HEADER + LIMIT


def _broken(found: list[M], why: str) -> Taken[M]:
    return Taken(messages=tuple(found), error=ProtocolError(why))
