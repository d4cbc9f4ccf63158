"""GPT-2 small with ``jax.checkpoint`` on every block, for an H200 that is not there: what is undone, and when.

    python -m benchmarks.undo.run [POLICY ...]

For each policy the step as written, and what ``jaxtensile.jit`` makes of it at budgets between its
bytes and the bytes of the step without checkpoints; where JAX has ``jax_remat3``, with it as well. Every case
runs in a fresh process; results go to ``results-jax<version>.json`` and the table to ``results-jax<version>.md``.
FLOPs are matrix FLOPs of the traced program; device bytes are XLA's argument + output + temp - alias.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.fit.run import TARGET, fit, plain
from benchmarks.isolate import command, isolated, save

HERE = Path(__file__).parent
MODULE = "undo.run"
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the way from the bytes of the step as written to those without checkpoints."""


def case(name: str) -> dict[str, Any]:
    """One case, in this process: ``POLICY`` as written (``none``: no checkpoints), ``POLICY@BYTES`` by us."""
    import jax

    from benchmarks.workloads import gpt2

    policy, _, budget = name.partition("@")
    workload = gpt2.workload(remat=None if policy == "none" else getattr(jax.checkpoint_policies, policy))
    return {"policy": policy, **(fit(workload, int(budget)) if budget else plain(workload))}


def rows(policy: str, free: dict[str, Any], remat3: bool) -> dict[str, Any]:
    """The policy as written, and our programs at every share."""
    environment = {"JAX_REMAT3": str(int(remat3))}
    written = isolated(MODULE, policy, "policy", environment=environment)
    budgets = [written["device"] + round(s * (free["device"] - written["device"])) for s in SHARES]
    ours = [isolated(MODULE, f"{policy}@{budget}", "policy", environment=environment) for budget in budgets]
    return {**written, "remat3": remat3, "ours": ours}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, free = result["machine"], result["free"]
    lines = [
        f"# Undo, deviceless H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "GPT-2 small, batch 16 x 1024, bf16, Adam, `jax.checkpoint` on every block. MB (10^6 bytes) of argument + "
        "output + temp - alias as XLA allocates them; FLOPs relative to the step without checkpoints, which needs "
        f"{free['device'] / 1e6:,.1f} MB.",
        "",
        "| policy | budget MB | MB | FLOPs | predicted step time | rounds | planning s | XLA s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["policies"]:
        share = row["flops"] / free["flops"]
        name = row["policy"] + (", `jax_remat3`" if row.get("remat3") else "")
        lines.append(f"| {name} | as written | {row['device'] / 1e6:,.1f} | {share:.4f} | | | | {row['seconds']:.1f} |")
        for ours in row["ours"]:
            if not ours.get("fits"):
                lines.append(f"| | {ours.get('budget', 0) / 1e6:,.1f} | **failed** | | | | | |")
                continue
            lines.append(
                f"| | {ours['budget'] / 1e6:,.1f} | {ours['device'] / 1e6:,.1f} | {ours['flops'] / free['flops']:.4f} "
                f"| {ours['overhead_ratio']:+.1%} | {ours['rounds']} | {ours['planning_seconds']:.2f} "
                f"| {ours['compile_seconds']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("policies", nargs="*", help=f"of jax.checkpoint_policies; default: {', '.join(POLICIES)}")
    options = parser.parse_args()
    import jax

    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    result: dict[str, Any] = {
        "machine": machine,
        "target": TARGET,
        "shares": SHARES,
        "free": isolated(MODULE, "none", "policy"),
    }
    result["policies"] = []
    settings = (False, True) if hasattr(jax.config, "jax_remat3") else (False,)
    for policy, remat3 in product(options.policies or POLICIES, settings):
        result["policies"].append(rows(policy, result["free"], remat3))
        # Nothing is lost when it is interrupted.
        save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
