"""Plans of large decoders over devices that are not here, beside their memory and the policies of ``jax.checkpoint``.

    python -m benchmarks.spmd.large [--only WORD ...] [--again]

A Llama of 7B or 70B parameters in bfloat16, its layers in a scan, weights and momentum divided by FSDP, 2,048 tokens a
sequence; the step is a gradient with momentum. Its mesh has no devices: ``target="nvidia-h200:8x8"`` says which they
are. Budgets are the device's memory and what XLA allocates for the same program with a policy on every layer. FLOPs are
of products, in the jaxpr, over those of the plain program. Seconds are wall clock: of the whole call of ``.plan()``,
its compiles included, and of one compile of the plain program. Collectives as in ``plans.py``.

Rows are kept in ``large-jax<version>.json``; a run takes what is missing, with ``--again`` everything.
"""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, run_missing
from benchmarks.spmd.plans import bytes_of, collectives, told

HERE = Path(__file__).parent
MODULE = "spmd.large"
GIB = 1 << 30
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAXTENSILE_PLAN_CACHE": "off"}
MODELS = {
    "7B": {"width": 4096, "hidden": 11008, "heads": 32, "layers": 32},
    "70B": {"width": 8192, "hidden": 28672, "heads": 64, "layers": 80},
}
CASES = (
    ("7B", "nvidia-h200:8", 8),
    ("70B", "nvidia-h200:8x8", 4),
    ("7B", "nvidia-a100-40gb:8", 4),
    ("7B", "nvidia-h200:8x64", 8),
)
"""Model, target, and sequences on each device."""
POLICIES = {"no batch": "dots_with_no_batch_dims_saveable", "nothing": "nothing_saveable"}


def name_of(model: str, target: str, rows: int) -> str:
    return f"{model}, {target}, {rows} sequences a device"


def case(name: str) -> dict[str, Any]:
    """One of ``CASES`` by its name."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, AxisType
    from jax.sharding import PartitionSpec as P

    import jaxtensile
    from benchmarks.spmd import programs as p
    from jaxtensile.devices.profiles import kind_and_shape, profile
    from jaxtensile.program.trace import jaxpr_flops

    model, target, rows = next(c for c in CASES if name_of(*c) == name)
    count = math.prod(kind_and_shape(target)[1])
    sizes = p.Sizes(**MODELS[model], vocab=32000, batch=rows * count, length=2048, gated=True, dtype=jnp.bfloat16)
    options: dict[str, Any] = {"donate_argnums": (0, 1)}

    def program(mesh: Any, policy: Any = None) -> tuple[Any, Any]:
        loss = functools.partial(p.loss_of, constrain=p.constrained(mesh, p.ALONG_BATCH), policy=policy)
        return p.stepped(loss), p.arguments(sizes, mesh, p.first_that_divides("batch", count), P("batch"), True)

    there = p.mesh_of(jaxtensile.target_devices(target), (count,), ("batch",))

    def compiled(policy: Any = None) -> tuple[Any, float, float]:
        step, args = program(there, policy)
        traced = jax.jit(step, **options).trace(*args)
        started = time.perf_counter()
        return traced.lower().compile(), time.perf_counter() - started, jaxpr_flops(traced.jaxpr)

    made, seconds, flops = compiled()
    row: dict[str, Any] = {
        "capacity": profile(target).capacity,
        "plain": {"bytes": bytes_of(made), "collectives": collectives(made)},
        "compile": round(seconds, 1),
        "budgets": {},
    }
    nowhere = AbstractMesh((count,), ("batch",), axis_types=(AxisType.Auto,))
    step, args = program(nowhere)
    started = time.perf_counter()
    static = jaxtensile.estimate(step, *args, target=target, **options)
    row["static"] = {"bytes": static.device, "seconds": round(time.perf_counter() - started, 2)}
    for said, budget in (("the device", "100%"), *POLICIES.items()):
        found: dict[str, Any] = {}
        if said in POLICIES:
            by_hand, _, again = compiled(getattr(jax.checkpoint_policies, budget))
            found["hand"] = {"bytes": bytes_of(by_hand), "flops": round(again / flops, 4)}
            budget = found["hand"]["bytes"]
        started = time.perf_counter()
        planned = jaxtensile.jit(step, budget=budget, target=target, **options)
        try:
            report = planned.plan(*args)
        except jaxtensile.BudgetError as error:
            found["ours"] = {"refused": str(error), "needs": error.needs}
        else:
            found["ours"] = {
                "bytes": report.compiled.device,
                "predicted": report.predicted.device,
                "flops": round((report.flops + report.recompute_flops) / report.flops, 4),
                "rounds": report.rounds,
                "unchanged": report.unchanged,
                "collectives": collectives(planned.lower(*args).compile()),
            }
        found["ours"]["seconds"] = round(time.perf_counter() - started, 1)
        row["budgets"][said] = found
    return row


def table(result: dict[str, Any]) -> str:
    out = heading("Large sharded programs", result["machine"], __doc__)
    out += [f"Commit {result['commit']}.", "", "GiB are 2^30 bytes of one device.", ""]
    out += [
        "| program | plain GiB (estimated, s), of | budget | by hand GiB, FLOPs | ours GiB, FLOPs | plan s | compile s "
        "| collectives: plain; ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if "crash" in row:
            out.append(f"| {name} | crashed: {row['crash'].splitlines()[-1][:100]} | | | | | | |")
            continue
        static, plain = row["static"], row["plain"]
        first = f"{plain['bytes'] / GIB:.1f} ({static['bytes'] / GIB:.1f}, {static['seconds']})"
        for said, found in row["budgets"].items():
            ours, hand = found["ours"], found.get("hand")
            by_hand = f"{hand['bytes'] / GIB:.2f}, {hand['flops']:.3f}" if hand else ""
            here = (
                f"**refused**, needs {ours['needs'] / GIB:.2f}"
                if "needs" in ours
                else f"{ours['bytes'] / GIB:.2f}, {ours['flops']:.3f}"
            )
            counts = f"{told(plain['collectives'])}; {told(ours.get('collectives', {}))}"
            out.append(
                f"| {name} | {first}, {row['capacity'] / GIB:.0f} | {said} | {by_hand} | {here} | {ours['seconds']} "
                f"| {row['compile']} | {counts} |"
            )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these in their name")
    parser.add_argument("--again", action="store_true", help="known rows too")
    options = parser.parse_args()
    known = (name_of(*c) for c in CASES)
    names = [name for name in known if not options.only or any(word in name for word in options.only)]
    made = run_missing(MODULE, HERE / "large", names, table, again=options.again, limit=1500, environment=ENVIRONMENT)
    print(table(made))


if __name__ == "__main__":
    main()
