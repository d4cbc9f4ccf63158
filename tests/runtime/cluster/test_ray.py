"""A Ray cluster of two nodes on this machine, each with a coordinator of its own. Only where Ray is installed."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from daemons import until
from jaxtensile.cli import main as cli
from jaxtensile.runtime.cluster.submit import Cluster
from jaxtensile.runtime.daemon.inquiry import ask
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.units import MIB
from paths import ROOT

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'jaxtensile[ray]'; benchmarks/concurrent too"
)
MACHINE = '[device]\ncapacity = "{mib}MiB"\nreserve = 0\nturns = false\n'
JOB = """
import os, sys, time
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.runtime.daemon.endpoint import DEVICES_VARIABLE, JOB_VARIABLE, VARIABLE
from jaxtensile.runtime.client.socket_link import SocketLink

admit = Admit(
    job=os.environ[JOB_VARIABLE],
    devices=(os.environ[DEVICES_VARIABLE],),
    ladder=(Rung(persistent=int(sys.argv[1]) << 20, seconds=0.01),),
)
client = Client(admit, SocketLink.to(os.environ[VARIABLE]))
client.wait(60)
print("has its lease", flush=True)
until = time.monotonic() + 60
while not os.path.exists(sys.argv[2]) and time.monotonic() < until:
    time.sleep(0.02)
client.release()
sys.exit(int(sys.argv[3]))
"""
CONFIG = """
[cluster]
address = "{address}"
[jobs.one]
command = ["python", "job.py", "30", "go", "0"]
least = "30MiB"
[jobs.two]
command = ["python", "job.py", "20", "go", "3"]
least = "20MiB"
[jobs.large]
command = ["true"]
least = "50MiB"
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    from ray.cluster_utils import Cluster as RayCluster

    cluster, sockets = RayCluster(), {}
    for mib in (40, 24):
        place = tmp_path_factory.mktemp(f"n{mib}")
        place.chmod(0o700)
        (place / "jaxtensile.toml").write_text(MACHINE.format(mib=mib))
        environment = {
            "JAXTENSILE_SOCKET": str(place / "s"),
            "JAXTENSILE_CONFIG": str(place / "jaxtensile.toml"),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        node = cluster.add_node(num_cpus=2, object_store_memory=80 * MIB, env_vars=environment)
        sockets[node.node_id] = place / "s"
    cluster.wait_for_nodes()
    yield cluster.address, sockets
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def folder(tmp_path, nodes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "jaxtensile.toml").write_text(CONFIG.format(address=nodes[0]))
    return tmp_path


def test_jobs_run_where_they_fit_and_are_told_of(folder, nodes, capfd):
    """Also while the cluster's coordinator is killed."""
    cluster = Cluster(nodes[0], rules=Rules(refuse_after=2.0))  # who is first starts the coordinator by its rules
    until(lambda: all(report.serving for _, report in cluster.nodes()), limit=60)
    os.kill(cluster.coordinator_pid(), signal.SIGKILL)
    (folder / "go").touch()
    assert cli.main(["run", "--on", "ray"]) == 1
    printed = capfd.readouterr().out
    assert "one | has its lease" in printed and "two | FAILED, exit 3" in printed
    assert "large | REFUSED: it needs 50.00MiB on a device, and the cluster can grant 40.00MiB there" in printed
    table = {line.split()[0]: line.split()[1] for line in printed[printed.rindex("\njob ") :].splitlines()[2:5]}
    assert table == {"one": "done", "two": "exit", "large": "refused"}
    assert not [lease for path in nodes[1].values() for lease in ask(path).leases]


def test_a_job_without_a_floor_is_told_what_to_write(folder, capfd):
    text = (folder / "jaxtensile.toml").read_text().replace('least = "20MiB"\n', "")
    (folder / "jaxtensile.toml").write_text(text)
    assert cli.main(["run", "--on", "ray", "two"]) == 2
    assert "job 'two' has no least" in capfd.readouterr().err


def test_a_job_in_a_plain_task_has_its_lease_from_the_coordinator_of_its_machine(folder, nodes):
    cluster = Cluster(nodes[0])
    until(lambda: all(report.serving for _, report in cluster.nodes()), limit=60)

    @ray.remote(num_cpus=1)
    def train(go):
        import time

        import jax.numpy as jnp

        import jaxtensile

        for name in ("JAXTENSILE_SOCKET", "JAXTENSILE_CONFIG"):
            os.environ.pop(name, None)  # so that nothing but the agent says where the coordinator is
        with jaxtensile.job("in a task") as job:
            step = jaxtensile.jit(lambda x: jnp.sin(x) * 2, job=job)
            value = step(jnp.ones(8))
            until = time.monotonic() + 60
            while not os.path.exists(go) and time.monotonic() < until:
                time.sleep(0.02)
            return float(value[0]), job.budget

    for node, path in nodes[1].items():
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        go = folder / node
        found = train.options(scheduling_strategy=affinity).remote(str(go))
        (lease,) = until(
            lambda path=path: [a for a in ask(path).leases if a.job == "in a task" and a.rung >= 0], limit=60
        )
        go.touch()
        value, budget = ray.get(found)
        assert abs(value - 1.6829) < 1e-3 and 0 < budget <= lease.charged[0]


def test_a_job_that_is_cancelled_ends_and_one_that_is_killed_is_started_again(folder, nodes):
    cluster = Cluster(nodes[0])
    command = ["python", "job.py", "4", "never", "0"]
    one, two = [cluster.submit(name, command, floor="4MiB", folder=str(folder), retries=1) for name in ("x", "y")]

    def leases():
        return {lease.job: lease.pid for path in nodes[1].values() for lease in ask(path).leases if lease.rung >= 0}

    until(lambda: {"x", "y"} <= leases().keys(), limit=60)
    os.kill(leases()["y"], signal.SIGKILL)
    cluster.cancel([one])
    (record,) = cluster.wait([one], timeout=60)
    assert record.state == "cancelled"
    until(lambda: cluster.jobs([two]).records[0].attempt == 2, limit=60)
    until(lambda: leases().keys() == {"y"}, limit=60)
    (again,) = cluster.jobs([two]).records
    assert (again.failures, again.status, again.state) == (1, 128 + signal.SIGKILL, "placed")
    (Path(folder) / "never").touch()
    (record,) = cluster.wait([two], timeout=60)
    assert record.state == "done" and json.dumps(record.reason) == '""'


def test_a_job_of_two_machines_has_its_leases_on_both_at_once(folder, nodes):
    cluster = Cluster(nodes[0])
    command = ["python", str(ROOT / "tests" / "job_of_two.py"), str(folder / "stop")]
    job = cluster.submit("both", command, floor="4MiB", hosts=2)
    held = [{"both"} for _ in nodes[1]]
    until(lambda: [{a.job for a in ask(path).leases if a.rung >= 0} for path in nodes[1].values()] == held, limit=90)
    (record,) = cluster.jobs([job]).records
    assert [place.node for place in record.places] == sorted(report.node for _, report in cluster.nodes())
    (folder / "stop").touch()
    (record,) = cluster.wait([job], timeout=90)
    assert (record.state, record.attempt) == ("done", 1), record.reason
