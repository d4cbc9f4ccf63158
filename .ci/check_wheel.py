"""Is the wheel what the checkout holds, once each, and does it work without the checkout?

python .ci/check_wheel.py files WHEEL    with any Python, in the checkout
python check_wheel.py use                with the Python the wheel was installed into, anywhere else
"""

import importlib
import pkgutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

FOLDERS = {"jaxtensile": "jaxtensile", "passes": "jaxtensile/passes", "runtime": "jaxtensile/runtime"}
WORKLOAD = """
import jax, jax.numpy as jnp, jaxtensile

def loss(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return (x * x).sum()

def small():
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jaxtensile.Workload(fun=jax.grad(loss), args=(like(64, 64), like(4096, 64)))
"""


def check_files(wheel: str) -> None:
    root = Path(__file__).resolve().parent.parent
    expected = {
        f"{there}/{path.relative_to(root / here).as_posix()}": path
        for here, there in FOLDERS.items()
        for path in (root / here).rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n]
        twice = [n for n, count in Counter(archive.namelist()).items() if count > 1]
        assert not twice, f"twice in the wheel: {twice}"
        assert set(names) == set(expected), f"wheel and checkout differ in {sorted(set(names) ^ set(expected))}"
        changed = [n for n in names if archive.read(n) != expected[n].read_bytes()]
        assert not changed, f"not as in the checkout: {changed}"
        assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist()), "no licence in the wheel"
    print(f"{wheel}: {len(names)} files, each once, as in the checkout")


def check_use() -> None:
    import jaxtensile

    for module in pkgutil.walk_packages(jaxtensile.__path__, "jaxtensile."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    home = Path(jaxtensile.__file__).parent
    assert "site-packages" in home.parts, f"not the installed package: {home}"
    for name in jaxtensile.__all__:
        getattr(jaxtensile, name)
    command = str(Path(sys.executable).with_name("jaxtensile"))
    assert "plan" in run(command, "--help")
    assert "cpu                compiles here" in run(command, "doctor")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.py"
        file.write_text(WORKLOAD)
        assert "budget" in run(command, "plan", f"{file}:small", "--budget", "1GiB", "--target", "cpu").lower()
    print(f"{home}: imports, helps, and plans")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "files":
        check_files(sys.argv[2])
    else:
        check_use()
