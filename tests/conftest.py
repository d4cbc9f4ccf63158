"""One environment for all tests: JAX on the CPU, reproducible examples, no test that cannot run here."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

import compiled_once
import jax_lines
from paths import ROOT

sys.path.append(str(ROOT))  # benchmarks/ is not installed; appended, so that an installed wheel wins

# Before anything imports JAX: tests are about this machine's CPU and about compile-only devices.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What fails in the planner is raised; in use it is left out (tests/test_faults.py).
os.environ["JAXTENSILE_STRICT"] = "1"

COMPILED = compiled_once.folder()
# No test reads or writes the user's own cache; plans are made with published rates unless a test measures.
os.environ["JAXTENSILE_PLAN_CACHE"] = "off"  # every plan of a test is made by it
CACHE = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxtensile-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# In the background of a shell Ctrl-C is ignored, and every process that a test starts would ignore it as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two busy cores make single examples slow at random; the same examples every time keep CI honest.
settings.register_profile("jaxtensile", deadline=None, derandomize=True)
settings.load_profile("jaxtensile")

COMPILERS = {
    "cuda_aot": ("jax_plugins.xla_cuda13", "nvidia.cu13", "nvidia.cuda_nvcc"),
    "tpu_aot": ("libtpu",),
}


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--oldest", action="store_true", help="only what CI tests on its oldest JAX line (jax_lines.py)")


def pytest_sessionstart(session: pytest.Session) -> None:
    if getattr(session.config.option, "dist", "no") != "no":
        return  # in the workers, not in the process that hands them their tests
    kernels = compiled_once.Kernels(COMPILED, Path(os.environ["XDG_CACHE_HOME"], "kernels"))
    compiled_once.quicken(COMPILED, kernels.file)
    session.config.add_cleanup(kernels.keep)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("oldest"):
        items[:], others = jax_lines.split(items)
        config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, modules in COMPILERS.items():
        missing = [m for m in modules if not installed(m)]
        if missing and item.get_closest_marker(mark):
            pytest.skip(f"extra {mark.replace('_', '-')} is not installed: no {', '.join(missing)}")


@pytest.fixture(autouse=True)
def not_shared() -> None:
    """No test is spared a plan by another one that has planned the same function."""
    if (module := sys.modules.get("jaxtensile.api.shared_dispatch")) is not None:
        module._KNOWN.clear()


@pytest.fixture(autouse=True)
def published_rates() -> Iterator[None]:
    """No test leaves rates that it has measured to the next one, whose plans would be others."""
    yield
    left = list(Path(CACHE, "jaxtensile", "profiles").glob("*"))
    for file in left:
        file.unlink()
    assert not left, f"left in the cache of all tests: {left}; give $XDG_CACHE_HOME of its own to what measures"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests counted, over all of them and over all processes, so that nobody has to believe it.

    ``record_property("counted", text)`` counts one, ``record_property("differential: NAME", n)`` that many programs,
    ``record_property("coordinator: WHAT", n)`` that much of what its model did, ``"chaos: WHAT"`` of real processes.
    """
    reports = [r for rs in terminalreporter.stats.values() for r in rs if getattr(r, "when", "") == "call"]
    properties = [(key, value) for r in reports for key, value in r.user_properties]
    libraries = Counter(text for key, text in properties if key == "counted")
    generated: Counter[str] = Counter()
    for key, count in properties:
        if key.startswith("differential: "):
            generated[key.removeprefix("differential: ")] += count
    for prefix, title in (("coordinator: ", "in its model"), ("chaos: ", "among real processes")):
        walked: Counter[str] = Counter()
        for key, count in properties:
            if key.startswith(prefix):
                walked[key.removeprefix(prefix)] += count
        if walked:
            terminalreporter.section(f"the coordinator {title}")
            files = {r.fspath for r in reports if any(key.startswith(prefix) for key, _ in r.user_properties)}
            broken = any(r.failed and r.fspath in files for r in reports)
            found = "an invariant was broken in " if broken else "no invariant broken in "
            terminalreporter.line(found + ", ".join(f"{n} {what}" for what, n in walked.items()))
    if libraries or generated:
        terminalreporter.section("jaxtensile.jit beside jax.jit")
    if generated:
        terminalreporter.line("generated: " + ", ".join(f"{count} {name}" for name, count in generated.items()))
    for text, count in sorted(libraries.items()):
        terminalreporter.line(f"{text}: {count}")
