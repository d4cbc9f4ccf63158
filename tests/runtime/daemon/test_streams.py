"""A peer that is given up: is it known why?"""

import socket

import pytest

from jaxtensile.runtime.daemon.streams import MOST_UNREAD, Stream


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield Stream(ours, 1, None, 0.0), theirs


def test_what_cannot_be_written_yet_is_kept(pair):
    stream, peer = pair
    data = bytes(range(256)) * (MOST_UNREAD // 256)
    stream.out += data * 2
    got = b""
    while stream.out:
        assert stream.write() in (None, "slow")
        got += peer.recv(1 << 20)
    assert got == data * 2


def test_a_peer_that_does_not_read_is_slow_and_one_that_left_is_gone(pair):
    stream, peer = pair
    told = []
    while not told:
        stream.out += bytes(MOST_UNREAD // 4)
        told = [why for why in [stream.write()] if why]
    assert told == ["slow"] and len(stream.out) > MOST_UNREAD
    peer.close()
    assert stream.write() == "gone" and stream.out
