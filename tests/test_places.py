"""A place is told from where the reader is, and text that is no place stays as it is."""

from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.places import short_place


def test_places_are_told_from_where_the_reader_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_place(f"{tmp_path}/nets/model.py:41:8 (block)") == "nets/model.py:41 (block)"
    assert short_place("/somewhere/else/nets/model.py:41") == "nets/model.py:41"
    assert short_place("/v/lib/python3.11/site-packages/flax/linen/linear.py:5:1 (f.<locals>.g)") == (
        "flax/linen/linear.py:5 (f.<locals>.g)"
    )
    assert short_place("<iota>") == "<iota>"


@given(st.text(max_size=40))
def test_any_place_is_told(source):
    assert isinstance(short_place(source), str)
