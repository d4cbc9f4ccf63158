"""Texts of errors as people saved them: of GPUs, their allocator, TPUs and a CPU; alone, and with the function."""

import subprocess
import sys
from textwrap import dedent

import pytest

from jaxtensile.cli import main as cli
from jaxtensile.tuning.explained import by_text
from jaxtensile.tuning.saved_error import SavedError, read
from jaxtensile.units import GIB, MIB
from paths import ROOT

BUFFER = (
    "ValueError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 4.39G. That was not "
    "possible. There are 2.30G free.; (0x0x0_HBM0)"
)
REQUEST = "Resource exhausted: Failed to allocate request for 87.48GiB (93935126000B) on device ordinal 0"


def of(name):
    return read((ROOT / f"tests/golden/out_of_memory_{name}.txt").read_text())


def test_a_program_of_a_gpu():
    saved = of("gpu")
    assert (saved.device, saved.asked, saved.needs) == ("GPU", 6 * MIB, 12 * MIB)
    assert saved.parts == {"arguments": 6 * MIB, "output": 6 * MIB}
    first, second = saved.lived
    assert (first.what, first.kind, first.source) == ("concatenate", "f32[4096,128,3]", "multinerf/models.py:689")
    assert (second.what, second.count, second.nbytes) == ("argument", 2, 768 << 10)
    assert by_text(saved)[-1].endswith("donate what the step replaces, or shard it")


def test_the_allocator_of_a_gpu():
    saved = of("pool")
    assert (saved.device, saved.asked, saved.capacity) == ("GPU", int(2.25 * GIB), 8 * GIB)
    assert (saved.in_use, saved.largest) == (5368712192, GIB) and saved.free == 8 * GIB - 5368712192
    assert [(kind.what, kind.count) for kind in saved.lived] == [("piece", 5), ("piece", 12)]
    assert by_text(saved)[-1].endswith("leaves room for it (the free bytes are in pieces): --budget 5.00GiB")
    assert any("in 5 pieces of 1.00GiB" in line for line in by_text(saved))


def test_a_program_of_a_tpu():
    saved = of("tpu")
    assert (saved.device, saved.asked) == ("TPU", None)
    assert (saved.needs, saved.capacity) == (int(63.80 * GIB), int(30.75 * GIB))
    (kind,) = saved.lived
    assert (kind.what, kind.kind, kind.count, kind.nbytes) == ("dot_general", "f32[32,4096,4096]", 2, 4 * GIB)
    assert kind.source == "air/attention_module.py:1059"
    assert by_text(saved)[-1].endswith("jaxtensile exec --budget 24.60GiB -- python ...")


def test_padding_of_a_tpu_is_the_advice():
    assert "s32[8388608,8,4] is mostly padding" in by_text(of("padded"))[-1]


@pytest.mark.parametrize(
    ("text", "device", "asked", "free"),
    [
        (BUFFER, "TPU", int(4.39 * GIB), int(2.30 * GIB)),
        (REQUEST, "device", int(87.48 * GIB), None),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", "device", 1 << 46, None),
    ],
)
def test_one_line(text, device, asked, free):
    saved = read(text)
    assert (saved.device, saved.asked, saved.free) == (device, asked, free)
    assert "FILE:FUNCTION" in by_text(saved)[-1]


@pytest.mark.parametrize("text", ["", "ValueError: no such thing", "x" * 10_000])
def test_a_text_without_an_error_is_told(text):
    with pytest.raises(SavedError, match=rf"a text of {len(text)} letters has no RESOURCE_EXHAUSTED: save all"):
        read(text)


def test_the_error_of_this_machine_and_the_function(tmp_path, capsys):
    script = "import jax.numpy as jnp\njnp.zeros((1 << 44,), jnp.float32).block_until_ready()"
    died = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True)
    (tmp_path / "error.txt").write_text(died.stderr)
    (tmp_path / "net.py").write_text(
        dedent("""
        import jax, jax.numpy as jnp, jaxtensile
        def loss(w, x):
            for _ in range(4):
                x = x + jnp.tanh(x @ w)
            return (x * x).sum()
        def make(batch=1 << 16):
            args = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 4096), (batch, 4096)))
            return jaxtensile.Workload(fun=jax.grad(loss), args=args)
        """)
    )
    assert cli.main(["estimate", "--explain", str(tmp_path / "error.txt")]) == cli.DONE
    assert "had no room for 64.00TiB more" in capsys.readouterr().out
    given = ["estimate", f"{tmp_path}/net.py:make", "--target", "nvidia-rtx-4090"]
    assert cli.main([*given, "--explain", str(tmp_path / "error.txt")]) == cli.DONE
    told = capsys.readouterr().out
    assert "net.py:" in told and "loss needs about" in told and "planned for 80% of it" in told
    assert "the smallest plan: " in told and "what helps most: " in told.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "estimate needs FILE:FUNCTION"),
        (["--explain", "/nowhere/x"], "cannot read /nowhere/x: No such file"),
        (["--explain", "/nowhere/x", "--exact"], "leave --baseline, --budget, --exact"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    assert cli.main(["estimate", *arguments]) == cli.WRONG_USE
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err
