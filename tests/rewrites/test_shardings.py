"""Programs over several devices: planned per device, whether XLA divides them or the user does."""

import json

import pytest

from four_devices import on_four_devices

pytestmark = pytest.mark.xdist_group("shardings")  # one process: what all of them need is made once

PRELUDE = '''
import functools, sys
import jax, jax.numpy as jnp, numpy as np, jaxtensile
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtensile.program.trace import jaxprs_in

WIDTH, LAYERS, ROWS = 128, 8, 512
KINDS = AxisType.Auto, AxisType.Explicit
mesh = {kind: jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2) for kind in KINDS}

def arguments(kind=AxisType.Auto, weights=P()):
    rng = np.random.default_rng(0)
    place = functools.partial(NamedSharding, mesh[kind])
    made = [rng.normal(size=(WIDTH, WIDTH)).astype("f") / 12 for _ in range(LAYERS)]
    x = rng.normal(size=(ROWS, WIDTH)).astype("f")
    return [jax.device_put(w, place(weights)) for w in made], jax.device_put(x, place(P("data")))

def layer(x, w):
    x = jnp.tanh(x @ w)
    return x * jax.nn.sigmoid(x)

def forward(ws, x):
    for w in ws:
        x = layer(x, w)
    return x

def looped(ws, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0]

def trained(forward, mean=lambda x: x):
    def step(ws, x):
        loss, slopes = jax.value_and_grad(lambda ws: (forward(ws, x) ** 2).mean())(ws)
        return [w - 0.1 * mean(d) for w, d in zip(ws, slopes)], mean(loss)
    return step

def plain_bytes(step, *args):
    use = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    return use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes - use.alias_size_in_bytes

def sums(jaxpr):
    """The sums over devices of a program, in its order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith(("psum", "reduce_scatter")):
            yield eqn.primitive.name, eqn.outvars[0].aval.shape
        for body in jaxprs_in(eqn.params.values()):
            yield from sums(body)

def planned(step, share, args):
    budget = int(share * plain_bytes(step, *args()))
    ours = jaxtensile.jit(step, budget=budget, donate_argnums=0)
    report = ours.plan(*args())
    assert report.compiled.exact and report.compiled.device <= budget < report.baseline.device
    assert any("4 devices" in note for note in report.notes)
    assert [*sums(ours.trace(*args()).jaxpr)] == [*sums(jax.jit(step).trace(*args()).jaxpr)]
    expected, got = jax.jit(step)(*args()), ours(*args())
    for e, g in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert g.sharding.is_equivalent_to(e.sharding, g.ndim) and g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
    return report
'''
CASES = {
    "weights and rows divided": 'planned(trained(forward), 0.65, lambda: arguments(weights=P("model")))',
    "explicit axes": "planned(trained(forward), 0.65, lambda: arguments(AxisType.Explicit))",
    "a loop over layers": 'planned(trained(looped), 0.65, lambda: arguments(weights=P("model")))',
    "a loop over layers, explicit axes": """
def by_hand(ws, x):
    return jax.lax.scan(lambda x, w: (jax.lax.cond(w[0, 0] > 0, layer, layer, x, w), None), x, jnp.stack(ws))[0]

planned(trained(looped), 0.65, lambda: arguments(AxisType.Explicit))
planned(trained(by_hand), 0.75, lambda: arguments(AxisType.Explicit))
""",
    "branches, explicit axes": """
def branched(ws, x):
    for w in ws:
        x = jax.lax.cond(x.sum() > 0, layer, lambda x, w: jnp.cos(x @ w) * x, x, w)
    return x

planned(trained(branched), 0.8, lambda: arguments(AxisType.Explicit))
""",
    "what is made again has the types that it had": """
from jax.extend.core import jaxpr_as_fun
from jaxtensile.program.trace import retrace

def mixed(ws, x):
    y = jax.lax.while_loop(lambda s: s[1] < 3, lambda s: (layer(s[0], ws[0]), s[1] + 1), (x, 0))[0]
    return looped(ws, y) + jax.lax.cond(y.sum() > 0, lambda y: y @ ws[0], lambda y: y, y), jnp.sum(y, 0)

for kind in KINDS:
    closed = jax.jit(mixed).trace(*arguments(kind)).jaxpr
    again = retrace(jaxpr_as_fun(closed), closed)
    assert [str(a) for a in again.in_avals] == [str(a) for a in closed.in_avals]
    assert [str(a) for a in again.out_avals] == [str(a) for a in closed.out_avals]
    assert ("@data" in str(again.in_avals)) == (kind is AxisType.Explicit)
""",
    "what explicit types do not allow is left out": """
from jaxtensile.rewrites.split import SLICES
from jaxtensile.search import variants
from jaxtensile.search.registry import ways as rewritten
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.search.request import Request
from jaxtensile.program.trace import trace_jaxpr

def in_slices(x, w):
    y = jnp.einsum("ij,jk->ik", x, w, out_sharding=NamedSharding(mesh[AxisType.Explicit], P()))
    return sum((part ** 2).sum() for part in jnp.split(y, [3, 7], axis=0))

def made(spec):
    sharding = NamedSharding(mesh[AxisType.Explicit], spec)
    args = jax.device_put(jnp.ones((12, 8)), sharding), jnp.ones((8, 512))
    jaxpr = jax.jit(in_slices).trace(*args).jaxpr
    fields = dict(donated=(False, False), args=args, kwargs={}, budget=1, device=profile("nvidia-h200"), shards=4)
    job = Request(name="f", jaxpr=jaxpr, make=None, options={}, **fields)
    traced = trace_jaxpr(jaxpr, job.donated)
    costs = op_costs(traced.graph, job.device)
    return rewritten(variants.written(job, traced, costs, prepare), SLICES)

assert made(P())  # rows in threes and fours
assert not made(P("data"))  # rows of two devices
""",
    "a target of as many devices": """
given = jax.tree.leaves(arguments(weights=P("model")))
abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in given]
step = lambda ws, x: trained(forward)(ws, x)
ws, x = abstract[:-1], abstract[-1]
mine = (LAYERS * WIDTH * WIDTH // 2 + ROWS * WIDTH // 2) * 4
report = jaxtensile.jit(step, budget="1GiB", target="cpu").plan(ws, x)
assert report.compiled.argument == mine and any("4 devices" in note for note in report.notes), report
assert jaxtensile.estimate(step, ws, x, target="cpu").shards == 4
assert jaxtensile.estimate(step, ws, x, target="cpu", exact=True).argument == mine
""",
    "sizes on one device are found where a plan is needed": """
given = jax.tree.leaves(arguments(weights=P("model")))
step = jax.grad(lambda ws, x: (forward(ws, x) ** 2).mean())
args = given[:-1], given[-1]
plain = jax.jit(step).lower(*args).compile().memory_analysis()
plain = plain.argument_size_in_bytes + plain.temp_size_in_bytes + plain.output_size_in_bytes
for budget, need in (("1GiB", False), (int(plain * 0.9), True)):
    ours = jaxtensile.jit(step, budget=budget)
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5)
    report = ours.plan(*args)
    assert report.unchanged is not need and ("sizes" in report.seconds) is need, report
""",
    "an op that says how it is divided": """
@custom_partitioning
def ripple(x):
    return jnp.sin(x) * x

ripple.def_partition(
    infer_sharding_from_operands=lambda mesh, given, out: given[0].sharding,
    partition=lambda mesh, given, out: (mesh, lambda x: jnp.sin(x) * x, out.sharding, (given[0].sharding,)),
    sharding_rule="i j -> i j",
)
smooth = jax.custom_vjp(ripple)
smooth.defvjp(lambda x: (ripple(x), x), lambda x, slope: (slope * ripple(x),))

def forward(ws, x):
    for w in ws:
        x = jnp.tanh(smooth(x @ w))
    return x

report = planned(trained(forward), 0.85, arguments)
assert any("custom_partitioning" in note and "foreign code" in note for note in report.notes)
""",
    "a step that is divided by hand": """
divided = functools.partial(jax.shard_map, mesh=mesh[AxisType.Auto], in_specs=(P(), P("data")), out_specs=(P(), P()))
for forward in (forward, looped):
    step = divided(trained(forward, lambda x: jax.lax.pmean(x, "data")))
    report = planned(step, 0.65, arguments)
    assert report.recompute_flops < 0.34 * report.flops  # of one device both
    held = {decision.shape for decision in report.decisions if decision.dtype == "float32"}
    assert all(ROWS not in shape for shape in held), held
""",
    "the gradient of what is divided by hand, clipped and stepped outside": """
specs = [P()] * LAYERS

def step(state, x):
    ws, ms = state
    def loss(ws, x):
        return jax.lax.pmean((forward(ws, x) ** 2).mean(), "data")
    mapped = jax.shard_map(loss, mesh=mesh[AxisType.Auto], in_specs=(specs, P("data")), out_specs=P())
    value, slopes = jax.value_and_grad(mapped)(ws, x)
    scale = jnp.minimum(1.0, 1.0 / jnp.sqrt(sum((d ** 2).sum() for d in slopes)))
    ms = [0.9 * m + d * scale for m, d in zip(ms, slopes)]
    return ([w - 0.1 * m for w, m in zip(ws, ms)], ms), value

def args():
    ws, x = arguments()
    return (ws, [w * 0.1 for w in ws]), x

report = planned(step, 0.75, args)
assert not any("planned around" in note for note in report.notes), report.notes
assert report.recompute_flops < 0.34 * report.flops
""",
    "weights gathered by hand": """
def mapped(ws, x):
    def loss(ws, x):
        gathered = (jax.lax.all_gather(w, "model", axis=0, tiled=True) for w in ws)
        for w in gathered:
            x = layer(x, w)
        return jax.lax.pmean((x ** 2).mean(), ("data", "model"))
    specs = [P("model")] * LAYERS, P("data")
    return jax.shard_map(loss, mesh=mesh[AxisType.Auto], in_specs=specs, out_specs=P())(ws, x)

def step(ws, x):
    value, slopes = jax.value_and_grad(mapped)(ws, x)
    return [w - 0.1 * d for w, d in zip(ws, slopes)], value

report = planned(step, 0.7, lambda: arguments(weights=P("model")))
assert not any("planned around" in note for note in report.notes), report.notes
""",
    "work by hand that is not done part by part outside": """
def step(ws, x):
    def square(w):
        return jax.shard_map(lambda w: w * w, mesh=mesh[AxisType.Auto], in_specs=P("model"), out_specs=P("model"))(w)
    value, slopes = jax.value_and_grad(lambda ws: sum((square(w) @ w).sum() for w in ws))(ws)
    return [w - 0.1 * d for w, d in zip(ws, slopes)], value + x.sum()

ours = jaxtensile.jit(step, budget="1GiB", donate_argnums=0)
report = ours.plan(*arguments(weights=P("model")))
assert any("planned around, not inside: dot_general at" in note for note in report.notes), report.notes
try:
    jaxtensile.jit(step, budget=1, donate_argnums=0).plan(*arguments(weights=P("model")))
except jaxtensile.BudgetError as error:
    assert "shard_maps are planned around, not inside: dot_general at" in str(error), error
else:
    raise AssertionError("nothing fits one byte")
expected, got = jax.jit(step)(*arguments(weights=P("model"))), ours(*arguments(weights=P("model")))
for e, g in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
    np.testing.assert_allclose(g, e, rtol=1e-5)
""",
    "an error speaks of one device": """
ws, x = arguments(weights=P("model"))
by_all = NamedSharding(mesh[AxisType.Auto], P(("data", "model")))
state = jax.ShapeDtypeStruct((4 * ROWS, WIDTH), "float32", sharding=by_all)

def step(ws, state, x):
    new, loss = trained(forward)(ws[:2], x)
    return new, 0.9 * state + loss

args = ws[:2], state, x
mine = (2 * WIDTH * WIDTH // 2 + ROWS * WIDTH + ROWS * WIDTH // 2) * 4
plain = plain_bytes(step, *args)
try:
    jaxtensile.jit(step, budget=mine - 1, donate_argnums=0).plan(*args)
except jaxtensile.BudgetError as error:
    assert f"the arguments alone are {mine / 1024:.2f}KiB on each of 4 devices" in str(error), error
    assert mine < error.needs <= plain and "shard the program further" in str(error), error
else:
    raise AssertionError("it fits")
report = jaxtensile.jit(step, budget=plain, donate_argnums=0).plan(*args)
assert report.lower_bound == mine and mine < report.predicted.device <= plain, report
""",
    "partial sums come in and go out": """
ways = [P(None, None, unreduced={name}) for name in ("data", "model")]
x = np.arange(16.0, dtype="f").reshape(8, 2)
for budget in (None, "1GiB"):
    ours = jaxtensile.jit(lambda x: jax.sharding.reshard(x + x, P(None, None)), budget=budget)
    with jax.set_mesh(mesh[AxisType.Explicit]):
        for name, way in zip(("data", "model"), ways):
            rows, columns = jax.device_put(x, P(None, name)), jax.device_put(x.T, P(name, None))
            make = jaxtensile.jit(functools.partial(jnp.einsum, "xy,yz->xz", out_sharding=way), budget=budget)
            sums = make(rows, columns)
            assert sums.sharding.spec.unreduced == {name}
            np.testing.assert_allclose(ours(sums), 2 * x @ x.T, rtol=1e-6)
            np.testing.assert_allclose(ours(sums), 2 * x @ x.T, rtol=1e-6)
    assert ours._cache_size() == 2
""",
}


RUN = """
import json, sys, traceback
failed = {}
for name, case in json.load(sys.stdin).items():
    try:
        exec(case, dict(globals()))
    except Exception:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """What went wrong in which case, all of them run in one process of four CPU devices."""
    done = on_four_devices(PRELUDE + RUN, tmp_path_factory.mktemp("home"), json.dumps(CASES))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_on_four_devices(case, failed):
    assert case not in failed, failed[case]
