"""Host memory is what this process may use: every kind of control group that can bound it does."""

import os
import resource
from pathlib import Path

import pytest

import jaxtensile
from jaxtensile.devices import hardware
from jaxtensile.devices.hardware import host_memory
from jaxtensile.units import GIB, MIB

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
UNLIMITED_V1 = "9223372036854771712"
V2 = "31 23 0:26 {top} {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 25 0:30 {top} {mount} rw,nosuid shared:15 - cgroup cgroup rw,memory"
NO_MEMORY = "36 25 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def machine(root, groups, mounts, limits):
    """A folder with the files that the kernel shows: ``limits`` by path."""
    files = {
        "proc/self/cgroup": "".join(f"{line}\n" for line in groups),
        "proc/self/mountinfo": "".join(f"{line}\n" for line in mounts),
        **{path: f"{limit}\n" for path, limit in limits.items()},
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "mounts", "limits", "expected"),
    [
        pytest.param(
            ["0::/user.slice/run.scope"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            {"sys/fs/cgroup/user.slice/run.scope/memory.max": 700 * MIB},
            700 * MIB,
            id="version 2, a group of its own",
        ),
        pytest.param(
            ["0::/user.slice/run.scope"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            {
                "sys/fs/cgroup/user.slice/memory.max": 300 * MIB,
                "sys/fs/cgroup/user.slice/run.scope/memory.max": "max",
            },
            300 * MIB,
            id="version 2, the group above",
        ),
        pytest.param(
            ["0::/"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            {"sys/fs/cgroup/memory.max": 500 * MIB, "sys/fs/cgroup/inner/memory.max": 5},
            500 * MIB,
            id="version 2, a container that sees itself as the root",
        ),
        pytest.param(
            ["11:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/"],
            [NO_MEMORY, V1.format(top="/docker/abc", mount="/sys/fs/cgroup/memory")],
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": 400 * MIB},
            400 * MIB,
            id="version 1, a container that sees where it is",
        ),
        pytest.param(
            ["4:memory:/batch/job"],
            [V1.format(top="/", mount="/sys/fs/cgroup/memory")],
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/memory/batch/memory.limit_in_bytes": 200 * MIB,
                "sys/fs/cgroup/memory/batch/job/memory.limit_in_bytes": UNLIMITED_V1,
                "sys/fs/cgroup/memory/other/memory.limit_in_bytes": 5,
            },
            200 * MIB,
            id="version 1, a batch system's job",
        ),
        pytest.param(
            ["4:memory:/job", "0::/job"],
            [
                V1.format(top="/", mount="/sys/fs/cgroup/memory"),
                V2.format(top="/", mount="/sys/fs/cgroup/unified"),
            ],
            {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 600 * MIB,
                "sys/fs/cgroup/unified/job/memory.max": 100 * MIB,
            },
            100 * MIB,
            id="both versions, the lower limit",
        ),
        pytest.param(
            ["0::/job"],
            [V2.format(top="/", mount="/sys/fs/a\\040cgroup")],
            {"sys/fs/a cgroup/job/memory.max": 100 * MIB},
            100 * MIB,
            id="a mount with a blank",
        ),
        pytest.param(
            ["0::/job"],
            [V2.format(top="/", mount="/sys/fs/cgroup")],
            {"sys/fs/cgroup/job/memory.max": 10**6 * GIB},
            PHYSICAL,
            id="a limit above the machine's memory",
        ),
        pytest.param(
            ["0::/job"], [V2.format(top="/", mount="/sys/fs/cgroup")], {}, PHYSICAL, id="a kernel without the files"
        ),
        pytest.param(["nonsense"], ["nonsense"], {}, PHYSICAL, id="files that nobody knows"),
    ],
)
def test_the_lowest_limit_counts(tmp_path, groups, mounts, limits, expected):
    assert host_memory(machine(tmp_path, groups, mounts, limits)) == expected


def test_a_machine_without_control_groups_has_all_its_memory(tmp_path):
    assert host_memory(tmp_path) == PHYSICAL


def test_this_machine_has_memory_for_this_process():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert MIB < used * 1000 < host_memory() <= PHYSICAL


def test_nobody_else_asks_the_kernel():
    root = Path(jaxtensile.__file__).parent
    files = [*root.rglob("*.py"), *(root / "passes").rglob("*.py"), *(root / "runtime").rglob("*.py")]
    words = ("SC_PHYS_PAGES", "memory.max", "limit_in_bytes", "/proc/meminfo")
    assert [p.name for p in files if any(word in p.read_text() for word in words)] == ["hardware.py"]


@pytest.fixture
def environment(monkeypatch):
    """One without the variables that the import of the package has set."""
    for name in ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_LIBRARY_PATH", *hardware.WITHOUT_TPU):
        monkeypatch.delenv(name, raising=False)
    return os.environ


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("tpu", [False, True])
@pytest.mark.parametrize("library", [False, True])
def test_plugins_are_told_what_is_not_here(monkeypatch, environment, gpu, tpu, library):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: gpu)
    monkeypatch.setattr(hardware, "has_tpu", lambda: tpu)
    monkeypatch.setattr(hardware, "find_spec", lambda name: object() if library else None)
    before = dict(environment)
    hardware.quiet_plugins()
    cuda = {} if gpu else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    assert environment == before | cuda | (hardware.WITHOUT_TPU if library and not tpu else {})


def test_what_the_user_set_stays(monkeypatch, environment):
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(hardware, "has_tpu", lambda: False)
    mine = dict.fromkeys(("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "TPU_LIBRARY_PATH", *hardware.WITHOUT_TPU), "mine")
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    hardware.quiet_plugins()
    assert {name: environment[name] for name in mine} == mine
