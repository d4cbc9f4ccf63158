"""What was compiled before is found, what is damaged is not, and tests may do without either."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import compiled_once
from compiled_once import Folder, Kernels


@pytest.fixture
def kept(tmp_path):
    return Folder(tmp_path)


def test_what_was_put_is_found_by_another(kept):
    kept.put("a", b"program")
    assert Folder(kept.path).get("a") == b"program" and kept.get("b") is None
    kept.put("a", b"other")
    assert kept.get("a") == b"other" and [p.name for p in kept.path.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 99])
def test_what_is_damaged_is_not_there(kept, damage):
    kept.put("a", b"program")
    (kept.path / "a").write_bytes(damage)
    assert kept.get("a") is None
    kept.put("a", b"program")
    assert kept.get("a") == b"program"


def test_nothing_is_kept_where_nothing_can_be(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTENSILE_TESTS_CACHE", "off")
    assert compiled_once.folder() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXTENSILE_TESTS_CACHE", str(tmp_path / "file"))
    assert compiled_once.folder() is None
    Folder(tmp_path / "gone").put("a", b"program")
    assert Folder(tmp_path / "gone").get("a") is None


def test_a_folder_is_for_one_machine_and_begins_anew_when_it_is_full(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTENSILE_TESTS_CACHE", str(tmp_path))
    compiled_once.folder().put("a", b"program")
    assert compiled_once.folder().get("a") == b"program"
    with monkeypatch.context() as patch:
        patch.setattr(compiled_once, "_machine", lambda: ("another",))
        assert compiled_once.folder().get("a") is None
    monkeypatch.setattr(compiled_once, "LIMIT", 1)
    assert compiled_once.folder().get("a") is None


def test_what_one_of_several_adds_to_the_kernels_is_there_afterwards(kept, tmp_path):
    """Of two that add to the same, the first; joined, XLA may refuse them."""
    first, second = (Kernels(kept, tmp_path / name) for name in ("one", "two"))
    first.keep()
    assert kept.get(Kernels.NAME) is None
    first.file.write_bytes(b"a")
    second.file.write_bytes(b"b")
    first.keep()
    second.keep()
    later = Kernels(kept, tmp_path / "three")
    assert later.file.read_bytes() == b"a"
    with later.file.open("ab") as file:
        file.write(b"c")
    later.keep()
    assert kept.get(Kernels.NAME) == b"ac"


@pytest.mark.skipif(compiled_once.folder() is None, reason="JAXTENSILE_TESTS_CACHE=off")
def test_a_program_is_compiled_once():
    """Compiled by JAX, forgotten, and found again: the same bytes, the same values."""

    def found():
        jax.clear_caches()
        hits = []
        with pytest.MonkeyPatch.context() as patch:
            real = Folder.get
            patch.setattr(Folder, "get", lambda self, key: hits.append(got := real(self, key)) or got)
            compiled = jax.jit(lambda x: jnp.tanh(x @ x).sum() + 0.123).lower(jnp.ones((16, 16))).compile()
        return compiled, hits[-1] is not None

    (first, _), (second, hit) = found(), found()
    assert hit
    one, two = first.memory_analysis(), second.memory_analysis()
    for name in ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes"):
        assert getattr(one, name) == getattr(two, name)
    assert first(jnp.ones((16, 16))) == second(jnp.ones((16, 16)))


def test_the_users_own_cache_is_another():
    assert Path(os.environ["XDG_CACHE_HOME"]).name.startswith("jaxtensile-tests-")
