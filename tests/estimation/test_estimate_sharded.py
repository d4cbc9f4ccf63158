"""The estimate of a program over several devices is of one of them, as XLA has it."""

import json

import pytest

from four_devices import on_four_devices

PROGRAM = """
import contextlib, functools, json
import jax, jax.numpy as jnp, numpy as np, jaxtensile
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

WIDTH, HIDDEN, LAYERS, ROWS = 128, 512, 3, 2048
DEVICES = np.array(jax.devices())
line = Mesh(DEVICES, ("batch",))
grid = Mesh(DEVICES.reshape(2, 2), ("batch", "model"))
typed = Mesh(DEVICES, ("batch",), axis_types=(AxisType.Explicit,))

def block(x, w, gather=lambda w, axis: w):
    up, down = gather(w["up"], 0), gather(w["down"], 0)
    return x + jnp.tanh(x @ up) @ down

def loss(ws, x, block=block):
    if isinstance(ws, dict):
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, ws)
    else:
        for w in ws:
            x = block(x, w)
    return (x * x).mean()

def stepped(loss):
    def step(ws, momentum, x):
        value, slopes = jax.value_and_grad(loss)(ws, x)
        momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, slopes)
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum, value
    return step

def arguments(mesh, up, down, stacked=False):
    def placed(shape, spec):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
    if stacked:
        up, down = P(None, *up), P(None, *down)
        ws = {"up": placed((LAYERS, WIDTH, HIDDEN), up), "down": placed((LAYERS, HIDDEN, WIDTH), down)}
    else:
        ws = [{"up": placed((WIDTH, HIDDEN), up), "down": placed((HIDDEN, WIDTH), down)} for _ in range(LAYERS)]
    return ws, ws, placed((ROWS, WIDTH), P("batch"))

FSDP = P("batch"), P("batch")

def along_batch(x, w):
    return lax.with_sharding_constraint(block(x, w), NamedSharding(line, P("batch")))

def mapped(ws, x):
    gather = functools.partial(lax.all_gather, axis_name="batch", tiled=True)
    local = functools.partial(loss, block=lambda x, w: block(x, w, lambda w, axis: gather(w, axis=axis)))
    specs = jax.tree.map(lambda _: P("batch"), ws)
    body = lambda ws, x: lax.pmean(local(ws, x), "batch")
    return jax.shard_map(body, mesh=line, in_specs=(specs, P("batch")), out_specs=P())(ws, x)

def by_type(x, w):
    return block(x, w, lambda w, axis: jax.sharding.reshard(w, P()))

CASES = {
    "DP": (loss, arguments(line, P(), P()), None),
    "FSDP": (loss, arguments(line, *FSDP), None),
    "TP": (loss, arguments(grid, P(None, "model"), P("model")), None),
    "FSDP, scan": (functools.partial(loss, block=along_batch), arguments(line, *FSDP, stacked=True), None),
    "FSDP, explicit": (functools.partial(loss, block=by_type), arguments(typed, *FSDP), typed),
    "FSDP, shard_map": (mapped, arguments(line, *FSDP), None),
}
PARTS = "argument", "output", "temp", "alias"
told = {}
for name, (fun, args, mesh) in CASES.items():
    step = stepped(fun)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        use = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
        found = jaxtensile.estimate(step, *args, donate_argnums=(0, 1))
    told[name] = {
        "xla": {part: getattr(use, f"{part}_size_in_bytes") for part in PARTS},
        "ours": found.to_dict(),
        "held": sum(h.nbytes for h in found.held),
        "text": str(found),
    }
small = args[2], args[2]
add = lambda x, y: x + y
told["exact"] = jaxtensile.estimate(add, *small, exact=True).to_dict()
told["there"] = jaxtensile.estimate(add, *small, target="nvidia-h200").to_dict()
print(json.dumps(told))
"""
CASES = ("DP", "FSDP", "TP", "FSDP, scan", "FSDP, explicit", "FSDP, shard_map")
WITHIN = 0.15
"""Of XLA's bytes: about as far as the estimates of such programs on one device are."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    done = on_four_devices(PROGRAM, tmp_path_factory.mktemp("home"))
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_figures_are_of_one_device(told, name):
    xla, ours = told[name]["xla"], told[name]["ours"]
    assert [ours[part] for part in ("argument", "output", "alias")] == [
        xla[part] for part in ("argument", "output", "alias")
    ]
    device = xla["argument"] + xla["output"] + xla["temp"] - xla["alias"]
    assert ours["low"] <= device <= ours["high"]
    assert ours["device"] == pytest.approx(device, rel=WITHIN)
    assert told[name]["held"] == ours["temp"] and ours["shards"] == 4


def test_the_text_says_whose_bytes_they_are(told):
    assert "note: arguments are sharded over 4 devices; bytes are per device\n" in told["TP"]["text"]
    assert "all together" not in told["TP"]["text"] and "one ratio" not in told["TP"]["text"]


def test_exact_and_for_a_target_it_is_the_same_device(told):
    exact, there = told["exact"], told["there"]
    assert exact["exact"] and exact["argument"] == there["argument"] == 2 * 2048 * 128 * 4 // 4
    assert [part["name"] for part in there["parts"]] == ["program", "rounding", "fragmentation", "context"]
