"""Six trainings on a Ray cluster of two machines, both of which are this one.

    pip install 'jaxtensile[ray]'
    python examples/cluster.py

Each machine has a coordinator of its own that grants 45 MiB, room for three of the trainings of search.py as they are.
Each is submitted with a floor of 14 MiB, its smallest plan, and grows where there is room. On a real cluster there is
nothing to set up: `ray start` on each machine, then `jaxtensile run --on ray`.
"""

import argparse
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jaxtensile

HERE = Path(__file__).parent
RATES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
MACHINE = """
[device]
capacity = "45MiB"
reserve = 0
[coordinator]
min_hold = "1s"
"""


@contextmanager
def machines(folder, count):
    """A Ray cluster of so many nodes, each with a config and a socket of its own in its environment."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for k in range(count):
        place = folder / f"machine{k}"
        place.mkdir(mode=0o700)
        (place / "jaxtensile.toml").write_text(MACHINE)
        environment = {"JAXTENSILE_SOCKET": str(place / "s"), "JAXTENSILE_CONFIG": str(place / "jaxtensile.toml")}
        cluster.add_node(num_cpus=4, env_vars=environment)
    cluster.wait_for_nodes()
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of each training (default 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jt-") as folder, machines(Path(folder), 2) as address:
        cluster = jaxtensile.Cluster(address)
        jobs = []
        for rate in RATES:
            command = [sys.executable, "search.py", "--rate", str(rate), "--steps", str(options.steps)]
            jobs.append(cluster.submit(f"rate-{rate:g}", command, floor="14MiB", folder=str(HERE)))
        print(f"{len(jobs)} jobs on {len(cluster.nodes())} machines")
        for record in cluster.wait(jobs):
            print(f"{record.spec.name:<12} {record.state} after {record.waited:.0f} s, {record.attempt} attempt(s)")


if __name__ == "__main__":
    main()
