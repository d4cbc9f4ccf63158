"""Messages come back as they were sent, however the stream is cut; whatever else comes is a value, never a crash."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.runtime.protocol.messages import (
    MOST_BYTES,
    VERSION,
    Ack,
    Admit,
    Beat,
    DeviceView,
    Error,
    Grant,
    Hello,
    LeaseView,
    Queued,
    Reclaim,
    Reject,
    Release,
    Released,
    Renew,
    Renewed,
    Revoke,
    Rung,
    Snapshot,
    Status,
    Token,
    Welcome,
)
from jaxtensile.runtime.protocol.wire import HEADER, LIMIT, REPLIES, REQUESTS, ProtocolError, frame, longest_rest, take

TOKEN = Token(3, 7)
ADMIT = Admit(job="bert", devices=("cuda:0",), ladder=(Rung(persistent=4, temp=2, host=1, seconds=0.5),), want=9)
REQUESTS_SAID = [
    Hello(version=VERSION),
    ADMIT,
    Ack(lease=1, token=TOKEN, rung=0, in_use=(5, 0)),
    Beat(lease=1, step=10, step_us=500, in_use=(5, 0), peak=6),
    Reclaim(lease=1, token=TOKEN, rung=0, in_use=(5, 0)),
    Release(lease=1, token=TOKEN),
    Renew(lease=1, token=TOKEN, ladder=ADMIT.ladder, rung=0, want=9),
    Status(after=4),
]
VIEW = DeviceView(device="cuda:0", capacity=9, reserve=1, charged=6, guaranteed=4)
LEASE = LeaseView(
    lease=1,
    job="bert",
    pid=7,
    state="held",
    resources=("cuda:0", "host"),
    charged=(6, 1),
    rung=0,
    rungs=1,
    priority=0,
    weight=1.0,
    step=10,
    step_us=500,
    peak=6,
)
REPLIES_SAID = [
    Welcome(version=VERSION, epoch=3, beat_within=10.0),
    Queued(job="bert", ahead=2),
    Grant(job="bert", lease=1, token=TOKEN, rung=0),
    Renewed(job="bert", lease=1, token=TOKEN, former=6),
    Reject(job="bert", reason="too large"),
    Revoke(job="bert", lease=1, token=TOKEN, rung=0, deadline=60.0),
    Released(lease=1),
    Error(code="busy", detail="1000 clients", retry_after=1.0),
    Snapshot(
        epoch=3,
        phase="serving",
        policy="fair",
        devices=(VIEW,),
        leases=(LEASE,),
        more=False,
        waiting=0,
        counters={"stale": 1},
    ),
]


def test_a_level_is_what_stays_and_what_a_step_needs():
    assert ADMIT.ladder[0].level == 6


def test_tokens_compare_by_epoch_then_by_sequence():
    assert Token(1, 9) < Token(2, 0) < Token(2, 1)


@given(st.integers(0, 5), st.data())
def test_frames_are_found_however_the_stream_is_cut(n, data):
    said = data.draw(st.lists(st.sampled_from(REQUESTS_SAID), min_size=n, max_size=n + 3))
    stream = b"".join(map(frame, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    heard, rest = [], b""
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        taken = take(rest + stream[a:b], REQUESTS)
        assert taken.error is None
        heard += taken.messages
        rest = taken.rest
        assert len(rest) <= longest_rest()
    assert heard == said and rest == b""


@pytest.mark.parametrize("message", REPLIES_SAID, ids=lambda m: type(m).__name__)
def test_answers_come_back_as_they_were_sent(message):
    assert take(frame(message), REPLIES).messages == (message,)
    assert take(frame(message), REQUESTS).error is not None


def packed(value):
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(HEADER, "big") + body


def changed(message, **values):
    return packed({**msgspec.to_builtins(message), **values})


@pytest.mark.parametrize(
    "stream",
    [
        (LIMIT + 1).to_bytes(HEADER, "big"),
        b"\xff" * HEADER,
        bytes(HEADER),
        packed([]),
        packed({"type": "GRANTED"}),
        packed({"type": "STATUS", "extra": 1}),
        changed(ADMIT, job=""),
        changed(ADMIT, job="x" * 129),
        changed(ADMIT, devices=[]),
        changed(ADMIT, ladder=[]),
        changed(ADMIT, ladder=[{"persistent": 1, "seconds": 1.0}] * 257),
        changed(ADMIT, ladder=[{"persistent": -1, "seconds": 1.0}]),
        changed(ADMIT, ladder=[{"persistent": MOST_BYTES + 1, "seconds": 1.0}]),
        changed(ADMIT, ladder=[{"persistent": 1, "seconds": 0.0}]),
        changed(ADMIT, ladder=[{"persistent": 1, "seconds": float("nan")}]),
        changed(ADMIT, ladder=[{"persistent": 1, "seconds": float("inf")}]),
        changed(ADMIT, weight=float("nan")),
        changed(ADMIT, weight=0.0),
        changed(ADMIT, priority=10**6),
        changed(ADMIT, floor="4GiB"),
        changed(REQUESTS_SAID[2], token=[1]),
        changed(REQUESTS_SAID[2], in_use=[-1]),
        changed(REQUESTS_SAID[2], in_use=[1] * 66),
        changed(REQUESTS_SAID[2], lease=-1),
    ],
)
def test_what_is_no_message_ends_the_stream_and_what_came_before_it_counts(stream):
    taken = take(frame(REQUESTS_SAID[0]) + stream + frame(REQUESTS_SAID[1]), REQUESTS)
    assert taken.messages == (REQUESTS_SAID[0],)
    assert isinstance(taken.error, ProtocolError) and taken.rest == b""


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_have_an_answer(body, framed):
    stream = len(body).to_bytes(HEADER, "big") + body if framed else body
    taken = take(stream, REQUESTS)
    assert taken.error is not None or taken.rest == stream or taken.messages or not stream


@given(st.sampled_from(REQUESTS_SAID), st.data())
def test_a_message_with_a_byte_changed_has_an_answer(message, data):
    stream = bytearray(frame(message))
    stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    taken = take(bytes(stream), REQUESTS)
    assert len(taken.messages) + (taken.error is not None) + bool(taken.rest) >= 1


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xc1", b"\xd9\xff"])
def test_deep_or_broken_nesting_is_no_crash(opening):
    body = opening * (LIMIT // len(opening))
    assert take(len(body).to_bytes(HEADER, "big") + body, REQUESTS).error is not None


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limit"):
        frame(Error(code="protocol", detail="x" * (LIMIT + 1)))


def test_the_largest_messages_are_below_the_limit():
    rung = Rung(persistent=MOST_BYTES, temp=0, host=MOST_BYTES, seconds=0.123456789)
    largest = Admit(job="x" * 128, devices=("y" * 128,) * 64, ladder=(rung,) * 256)
    assert len(frame(largest)) <= LIMIT + HEADER
    lease = msgspec.structs.replace(LEASE, job="x" * 128, faults=("f" * 40,) * 3)
    page = msgspec.structs.replace(REPLIES_SAID[-1], leases=(lease,) * 64, more=True)
    assert len(frame(page)) <= LIMIT


@pytest.mark.parametrize("name", ["\x1b[31mred", "nul\x00", "line\n", "tab\t", "\x9b", "", "x" * 129])
def test_a_name_has_no_control_characters(name):
    good = Admit(job="gpt-2 ✓", devices=("cpu:0",), ladder=(Rung(persistent=8, seconds=1.0),))
    assert take(frame(good), REQUESTS).messages == (good,)
    found = take(frame(msgspec.structs.replace(good, job=name)), REQUESTS)
    assert not found.messages and found.error is not None
