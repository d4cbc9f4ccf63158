"""The recipes of ``docs/cluster.md`` can be read by what reads them, and what they name is there."""

import re
import shlex
import subprocess

import pytest

from jaxtensile.cli import main as cli
from jaxtensile.runtime.config import config as configs
from paths import ROOT

RECIPES = ROOT / "docs" / "recipes"


def test_kubernetes_with_kueue():
    yaml = pytest.importorskip("yaml")
    found = {d["kind"]: d for d in yaml.safe_load_all((RECIPES / "kueue.yaml").read_text())}
    assert found.keys() == {"ResourceFlavor", "ClusterQueue", "LocalQueue", "ConfigMap", "RayCluster"}
    assert all({"apiVersion", "metadata"} <= d.keys() for d in found.values())
    queue, flavors = found["ClusterQueue"], found["ClusterQueue"]["spec"]["resourceGroups"][0]["flavors"]
    assert found["LocalQueue"]["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert [f["name"] for f in flavors] == [found["ResourceFlavor"]["metadata"]["name"]]
    cluster = found["RayCluster"]
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == found["LocalQueue"]["metadata"]["name"]
    asked = {"cpu": 0, "nvidia.com/gpu": 0}
    groups = [(1, cluster["spec"]["headGroupSpec"])]
    groups += [(g["replicas"], g) for g in cluster["spec"]["workerGroupSpecs"]]
    for replicas, group in groups:
        spec = group["template"]["spec"]
        volumes = {v["name"]: v for v in spec["volumes"]}
        (container,) = spec["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == volumes.keys()
        for name in asked:
            asked[name] += replicas * int(container["resources"]["requests"].get(name, 0))
    assert volumes["machine"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    (file,) = found["ConfigMap"]["data"]
    assert environment["JAXTENSILE_CONFIG"].rpartition("/")[::2] == (
        mounts.intersection({"/etc/jaxtensile"}).pop(),
        file,
    )
    assert environment["XDG_RUNTIME_DIR"] in mounts
    configs.parse(found["ConfigMap"]["data"][file])
    quota = {r["name"]: r["nominalQuota"] for r in flavors[0]["resources"]}
    assert all(asked[name] <= quota[name] for name in asked), "Kueue would never admit it"


def test_slurm():
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert all(
        re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in script.read_text().splitlines() if "#SBATCH" in line
    )


@pytest.mark.parametrize("name", ["kueue.yaml", "slurm.sh"])
def test_the_commands_exist(name):
    text = (RECIPES / name).read_text().replace("\\\n", " ")
    (command,) = re.findall(r"jaxtensile (run [^\n#]+)", text)
    parsed = cli._parser().parse_args(shlex.split(command))
    assert parsed.on == "ray" and parsed.config
