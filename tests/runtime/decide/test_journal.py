"""What a journal says is what was charged, whatever its end lost; another boot's says nothing."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from jaxtensile.runtime.decide.journal import (
    FORMAT,
    Admitted,
    Charged,
    Freed,
    Journal,
    JournalError,
    Opened,
    decode,
    encode,
    replay,
    revived,
)
from jaxtensile.runtime.decide.leases import HOST, Charge, Process, State
from jaxtensile.runtime.protocol.messages import Rung

OPENED = Opened(format=FORMAT, boot_id="boot", epoch=2, sequence=5, lease=3)
LADDER = (Rung(persistent=4, temp=2, seconds=2.0), Rung(persistent=9, host=1, seconds=1.0))


def admitted(lease, rung=0, sequence=6):
    charges = ((Charge(4, 2), Charge(0)), (Charge(9), Charge(1)))[rung]
    return Admitted(
        lease=lease,
        process=Process(70 + lease, 1),
        job="a",
        resources=("cuda:0", HOST),
        ladder=LADDER,
        low=0,
        high=1,
        priority=1,
        weight=2.0,
        rung=rung,
        sequence=sequence,
        charges=charges,
    )


def charged(lease, rung, sequence, charges, stuck=False):
    return Charged(lease=lease, rung=rung, sequence=sequence, charges=charges, stuck=stuck)


RECORDS = [
    OPENED,
    admitted(4),
    admitted(5, rung=1, sequence=7),
    charged(4, 1, 8, (Charge(9), Charge(1))),
    Freed(lease=5),
    charged(4, 0, 9, (Charge(9), Charge(1)), stuck=True),
]


def test_records_come_back_as_they_were_written():
    assert decode(b"".join(map(encode, RECORDS))) == RECORDS


def test_the_last_charge_of_each_lease_counts_and_the_highest_numbers():
    known = replay(RECORDS)
    assert known.leases.keys() == {4} and known.stuck == {4}
    assert known.leases[4].charges == (Charge(9), Charge(1)) and known.leases[4].rung == 0
    assert (known.epoch, known.sequence, known.lease, known.boot_id) == (2, 9, 5, "boot")
    lease = revived(known, known.leases[4], now=3.0)
    assert (lease.state, lease.connection, lease.rung, lease.since) == (State.QUARANTINED, None, 0, 3.0)
    assert lease.stuck and (lease.priority, lease.weight, lease.process) == (1, 2.0, Process(74, 1))


def test_a_journal_that_was_written_anew_keeps_the_numbers_of_leases_that_are_no_more():
    assert (replay([OPENED]).lease, replay([OPENED]).sequence, replay([OPENED]).leases) == (3, 5, {})


@given(st.integers(0, 2000))
def test_a_torn_end_loses_what_was_not_finished_and_nothing_else(cut):
    content = b"".join(map(encode, RECORDS))[: cut or None]
    found = decode(content)
    lines = content.count(b"\n")
    assert found == RECORDS[: len(found)] and len(found) - lines in (0, 1)
    assert len(found) == lines or content == b"".join(map(encode, found))[:-1], "all is there but its end"


@given(st.integers(0, len(RECORDS)))
def test_what_a_prefix_says_is_at_least_what_was_sent_before_its_end(n):
    """Records are written before what they are about is sent: so the charges of a prefix cover all that was told."""
    told = {}
    for record in RECORDS[:n]:
        if isinstance(record, Admitted | Charged):
            told[record.lease] = record.charges
        elif isinstance(record, Freed):
            told.pop(record.lease, None)
    known = replay(RECORDS[:n]).leases
    assert {k: a.charges for k, a in known.items()} == told


def test_another_boot_has_no_leases_and_a_higher_epoch():
    known = replay(RECORDS, boot_id="other")
    assert known.leases == {} and known.epoch == 2 and known.lease == 5
    assert replay([*RECORDS, Opened(format=FORMAT, boot_id="later", epoch=3)]).leases == {}
    assert replay([*RECORDS, Opened(format=FORMAT, boot_id="boot", epoch=3)]).leases.keys() == {4}
    assert replay([], boot_id="boot").epoch == 0


def test_a_broken_line_before_the_end_is_refused_with_its_number():
    lines = [encode(r) for r in RECORDS]
    lines[2] = b'{"what":"adm\n'
    with pytest.raises(JournalError, match="line 3 of the journal"):
        decode(b"".join(lines))
    with pytest.raises(JournalError, match="line 1 "):
        decode(b"\xff\xfe\n")


def test_no_bit_that_is_flipped_leads_to_other_charges():
    """It is told, also in the last line; the end of that is the one thing that is not missed."""
    content = b"".join(map(encode, RECORDS))
    for place in range(len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(JournalError, match=r"line \d of the journal is no record .* holds. End the jobs"):
            decode(bytes(flipped))
    assert decode(content[:-1]) == RECORDS


def test_a_journal_of_the_former_format_has_no_checksums_and_is_read():
    before = [structs.replace(OPENED, format=1), *RECORDS[1:]]
    content = b"".join(encode(r).partition(b" ")[2] for r in before)
    assert content.startswith(b"{") and decode(content) == before
    assert replay(decode(content)).leases == replay(RECORDS).leases


def test_another_format_is_refused():
    with pytest.raises(JournalError, match="format 99"):
        replay([Opened(format=99, boot_id="", epoch=1)])


def test_changes_of_unknown_leases_are_passed_over():
    assert replay([charged(9, 0, 1, ()), Freed(lease=9)]).leases == {}


class Short(io.BytesIO):
    def write(self, data):
        return super().write(data[:-1])


def test_records_are_appended_in_one_write_and_a_short_one_is_an_error():
    file = io.BytesIO()
    journal = Journal(file)
    journal.write(RECORDS[:2])
    journal.write(RECORDS[2:])
    assert decode(file.getvalue()) == RECORDS and journal.records == len(RECORDS)
    with pytest.raises(OSError, match="only"):
        Journal(Short()).write(RECORDS)
