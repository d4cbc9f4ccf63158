"""Every workload beside what a user can do by hand, for an H200 that is not there.

    python -m benchmarks.dominance.run [--again] [WORKLOAD ...]

Peers, each compiled on the same step: ``jax.checkpoint`` policies on every block (``remat=`` of
benchmarks/workloads), two of which offload, and XLA's own rematerialization at several slop factors. At the
bytes of each peer ``jaxtensile.jit`` plans the step without checkpoints; where the peer holds bytes on the
host, with as many host bytes; once as it is, once with ``chunk=True``, which may work on the batch in parts. Then it is
asked for less than the best policy needs, and less again while it gets it: without the host, and with the state
(``offload_state=True``) and whatever else helps on the host, in the same two ways.

FLOPs are matrix and convolution FLOPs, of the traced program for policies and ours, of the optimized HLO for
XLA's own rematerialization; device bytes are XLA's argument + output + temp - alias. Peers run in fresh
processes, our plans of one workload in one, which compiles the plain step once. Results go to
``results-jax<version>.json`` and ``.md`` row by row; rows that are there are not measured again without ``--again``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.fit.run import HOST, TARGET, fit, plain
from benchmarks.isolate import isolated, save, streamed

HERE = Path(__file__).parent
MODULE = "dominance.run"
SLOPS = (10, 5, 3)
"""Percent of the device's memory that XLA's rematerialization aims at."""
OFFLOADING = ("save_and_offload_only_these_names", "offload_dot_with_no_batch_dims")
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable", *OFFLOADING)
PEERS = (*POLICIES, *(f"xla_slop_{n}" for n in SLOPS))
WAYS = ("", ":chunk")
"""What follows a question: as it is, and in parts."""
BELOW = {0: 0.9, HOST: 0.6}
"""Share of the best policy's bytes that is asked for first, by the host bytes allowed."""
SMALLER, STEPS = 0.8, 5
"""Budgets lower by this factor are asked for as long as they fit, and this often at most."""


def policy(name: str) -> Callable[..., Any]:
    """A ``jax.checkpoint`` policy; the one that goes by names offloads what enters each block."""
    import jax

    from benchmarks.workloads.remat import BLOCK_INPUT

    found = getattr(jax.checkpoint_policies, name)
    if name == "save_and_offload_only_these_names":
        return found(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return found("device", "pinned_host") if name in OFFLOADING else found


def measure_peer(name: str, peer: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """XLA's bytes and the FLOPs of one workload as a peer makes it; ``none``: as it is; ``flags``: compiler options."""
    from benchmarks import workloads
    from benchmarks.hlo import hlo_flops

    def look(executable: Any) -> dict[str, Any]:
        return {"hlo_flops": hlo_flops(executable.as_text())}

    if peer.startswith("xla_slop_"):
        slop = {"xla_gpu_memory_limit_slop_factor": int(peer.removeprefix("xla_slop_"))}
        return plain(workloads.workload(name), flags={**flags, **slop}, look=look)
    return plain(workloads.workload(name, remat=None if peer == "none" else policy(peer)), flags=flags, look=look)


def ours(name: str, asked: list[str], flags: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Our programs of one workload, each as soon as it is there; ``asked``: ``BYTES:HOST BYTES`` or ``least:BYTES:HOST
    BYTES``, and ``:chunk`` after it for work in parts."""
    from benchmarks import workloads

    workload = workloads.workload(name)
    for question in asked:
        budget, host, *more = question.removeprefix("least:").split(":")
        chunk = more == ["chunk"]
        make = least if question.startswith("least:") else fit
        try:
            answer = make(workload, int(budget), TARGET, int(host), flags, chunk)
        except Exception as error:
            answer = {"crash": f"{type(error).__name__}: {error}"[-2000:]}
        yield {"asked": question, **answer}


def least(workload: Any, budget: int, target: str, host: int, flags: Mapping[str, Any], chunk: bool) -> dict[str, Any]:
    """The smallest program found: at ``budget`` and step by step lower, or higher where that is refused.

    ``refused``: the highest budget that was, twice at most.
    """
    found: dict[str, Any] = {}
    refused: list[int] = []
    needs = 0
    for _ in range(STEPS):
        answer = fit(workload, budget, target, host, flags, chunk, offload_state=host > 0)
        if not answer["fits"]:
            refused.append(budget)
            needs = answer["needs"]
        elif not found or answer["device"] < found["device"]:
            found = answer
        lower = int(SMALLER * found["device"]) if found else 0
        if len(refused) == 2 or (refused and 0 < lower <= max(refused)):
            break
        budget = lower or (needs if needs > budget else int(budget / SMALLER))
    return {**(found or {"fits": False, "needs": needs}), "refused": max(refused, default=0)}


def question(peer: dict[str, Any]) -> str:
    """What we are asked at the peer's bytes."""
    return f"{peer['device']}:{peer['host']}"


def flops(peer: dict[str, Any], base: dict[str, Any]) -> float:
    """Of the peer, relative to the plain step; XLA's own rematerialization shows in its HLO alone."""
    kind = "hlo_flops" if peer["peer"].startswith("xla") else "flops"
    return peer[kind] / base[kind] if base[kind] else 1.0


def wins(peer: dict[str, Any], base: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether we fit into the peer's bytes with no more FLOPs."""
    return bool(answer.get("fits")) and answer["flops"] / base["flops"] <= flops(peer, base) * (1 + 1e-6)


def at(row: dict[str, Any], peer: dict[str, Any], way: str = "") -> dict[str, Any] | None:
    """Our program at the peer's bytes, None while it is not measured; the plain one where the peer saves nothing;
    ``way``: of ``WAYS``."""
    base = row["peers"]["none"]
    if peer["device"] >= base["device"]:
        return {"fits": True, "device": base["device"], "flops": base["flops"]}
    return row["ours"].get(question(peer) + way)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, rows = result["machine"], result["workloads"]
    lines = [
        f"# Dominance, deviceless H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "MB (10^6 bytes) of argument + output + temp - alias as XLA allocates them; matrix FLOPs relative to the plain "
        "step. At a peer's bytes: we win when we fit with no more FLOPs. `(plain)`: the peer saves nothing, so the "
        "plain step fits. In parts: with `chunk=True`.",
        "",
        "## At the bytes of each peer",
        "",
        "| workload | peer | its MB | its host MB | its FLOPs | our MB | our FLOPs | | in parts, MB | FLOPs | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    missing = Counter[str]()
    """Rows that are not measured yet, by workload."""
    again: list[str] = []
    won, total, trivial = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), 0
    for name in rows:
        base = rows[name]["peers"].get("none", {})
        if "device" not in base:
            missing[name] += 1
            continue
        lines.append(f"| {name} | none | {base['device'] / 1e6:,.1f} | | 1.0000 | | | | | | |")
        for label in PEERS:
            peer = rows[name]["peers"].get(label)
            if peer is None:
                missing[name] += 1
                continue
            if "device" not in peer:
                why = peer.get("refusal") or peer.get("crash", "").strip().rpartition("\n")[2]
                lines.append(f"| | {label} | no program: {why[:120]} | | | | | | | | |")
                continue
            line = f"| | {label} | {peer['device'] / 1e6:,.1f} | {peer['host'] / 1e6:,.1f} | {flops(peer, base):.4f} "
            for way in WAYS:
                answer = at(rows[name], peer, way)
                cells, good = _cells(peer, base, answer)
                line += cells
                if answer is None:
                    missing[name] += 1
                    continue
                won[way], total[way] = won[way] + good, total[way] + 1
                again += [] if good else [f"{name} --asked {question(peer)}{way}"]
            trivial += peer["device"] >= base["device"]
            lines.append(line + "|")
    lines += ["", f"Won {won['']} of {total['']} points; in {trivial} of them the peer saves nothing."]
    lines[-1] += f" In parts: {won[':chunk']} of {total[':chunk']}."
    if again:
        lines += ["", "The lost ones again: `python -m benchmarks.dominance.run --case` and", ""]
        lines += [*(f"- `{command}`" for command in dict.fromkeys(again))]
    lines += ["", *_smallest(rows, missing)]
    if missing := +missing:
        told = (f"{count} of {name}" for name, count in missing.items())
        lines += ["", f"**Partial**: not measured yet are rows: {', '.join(told)}."]
    return "\n".join(lines) + "\n"


def _cells(peer: dict[str, Any], base: dict[str, Any], answer: dict[str, Any] | None) -> tuple[str, bool]:
    """Our bytes, FLOPs and a verdict, and whether we win."""
    if answer is None:
        return "| | | not measured ", False
    good = wins(peer, base, answer)
    if answer.get("fits"):
        verdict = ("won" if good else "**more FLOPs**") + ("" if peer["device"] < base["device"] else " (plain)")
        return f"| {answer['device'] / 1e6:,.1f} | {answer['flops'] / base['flops']:.4f} | {verdict} ", good
    if "needs" not in answer:
        return "| crashed | | **does not fit** ", False
    over = answer["needs"] - peer["device"]
    short = f", {over / peer['device']:.1%} over" if over > 1e6 else f", {over} bytes over"
    return f"| needs {answer['needs'] / 1e6:,.1f} | | **does not fit**{short} ", False


def least_questions(peers: Mapping[str, dict[str, Any]]) -> dict[tuple[int, str], str]:
    """What we are asked to find the smallest, by host bytes and way."""
    found = {}
    for host, way in itertools.product(reversed(BELOW), reversed(WAYS)):
        label = best(peers, host > 0)
        if label:
            found[host, way] = f"least:{int(BELOW[host] * peers[label]['device'])}:{host}{way}"
    return found


def best(peers: Mapping[str, dict[str, Any]], host: bool) -> str:
    """The policy with the fewest bytes, of those that offload as well where ``host``; none: empty."""
    named = [n for n in POLICIES if "device" in peers.get(n, {}) and (host or n not in OFFLOADING)]
    return min(named, key=lambda n: peers[n]["device"], default="")


def smallest(row: dict[str, Any], host: int, way: str) -> dict[str, Any] | None:
    """The smallest of our programs of a way, whatever was asked, with no more than ``host`` bytes allowed."""
    own = ((q, a) for q, a in row["ours"].items() if a.get("fits") and q.endswith(":chunk") == bool(way))
    allowed = [a for q, a in own if int(q.removesuffix(way).rpartition(":")[2]) <= host]
    return min(allowed, key=lambda a: a["device"], default=None)


def _smallest(rows: dict[str, Any], missing: Counter[str]) -> list[str]:
    lines = [
        "## The smallest program",
        "",
        "The best policy is the one with the fewest bytes, without and with the offloading ones; ours the smallest of "
        f"all that were made. `host`: with `host_budget` of {HOST >> 30} GiB and `offload_state=True`; the ratio is to "
        "the best policy of all. `refused`: what was asked for in vain.",
        "",
        "| workload | in parts | best policy | MB | our MB | ratio | our FLOPs | refused | best with offload | MB "
        "| our MB, host | ratio | our FLOPs | refused |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    said: list[str] = []
    for way in reversed(WAYS):
        share: dict[int, list[float]] = {0: [], HOST: []}
        for name, row in rows.items():
            if "device" not in row["peers"].get("none", {}):
                continue
            asked = least_questions(row["peers"])
            line = f"| {name} | {'yes' if way else ''} "
            for host in share:
                label, own = best(row["peers"], host > 0), smallest(row, host, way)
                known = row["ours"].get(asked.get((host, way), ""))
                missing[name] += known is None
                if not label or own is None:
                    line += "| | | | | | "
                    continue
                if known is not None:
                    share[host].append(own["device"] / row["peers"][label]["device"])
                line += (
                    f"| {label} | {row['peers'][label]['device'] / 1e6:,.1f} | {own['device'] / 1e6:,.1f} "
                    f"| {own['device'] / row['peers'][label]['device']:.3f} "
                    f"| {own['flops'] / row['peers']['none']['flops']:.4f} "
                    f"| {'not asked yet' if known is None else format((known.get('refused') or 0) / 1e6, ',.1f')} "
                )
            lines.append(line + "|")
        said.append(
            f"{'In parts' if way else 'As it is'}: lower than the best policy without the host in "
            f"{sum(r < 1 for r in share[0])} of {len(share[0])}; at most 0.6 of the best policy of all, with the host, "
            f"in {sum(r <= 0.6 for r in share[HOST])} of {len(share[HOST])}."
        )
    return [*lines, "", " ".join(said)]


def measure(name: str, row: dict[str, Any], keep: Callable[[], None]) -> None:
    """What is missing in the row of one workload; ``keep`` is called after each piece.

    What XLA has compiled of GPU kernels for one program is there for the next: bytes are the same, time is not shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        _measure(name, row, keep, ("--kernels", str(Path(folder, "kernels"))))


def _measure(name: str, row: dict[str, Any], keep: Callable[[], None], kernels: tuple[str, ...]) -> None:
    for peer in ("none", *PEERS):
        if peer not in row["peers"]:
            row["peers"][peer] = {"peer": peer, **isolated(MODULE, f"{name}:{peer}", "peer", kernels)}
            keep()
    base = row["peers"]["none"]
    saving = [p for p in row["peers"].values() if p.get("device", base["device"]) < base["device"]]
    asked = (question(p) for p in sorted(saving, key=lambda p: -p["device"]))
    same = dict.fromkeys(asked)
    every = [*(q + way for way in reversed(WAYS) for q in same), *least_questions(row["peers"]).values()]
    wanted = [q for q in every if q not in row["ours"]]
    while wanted:
        for answer in streamed(MODULE, name, (*kernels, "--asked", *wanted)):
            if not wanted:
                break
            # A process that dies answers nothing to what it was asked last.
            row["ours"][answer.setdefault("asked", wanted[0])] = answer
            if "crash" in answer:
                print(answer["crash"], file=sys.stderr)
            wanted.remove(answer["asked"])
            keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="default: all")
    parser.add_argument("--again", action="store_true", help="measure rows that are there as well")
    parser.add_argument("--table", action="store_true", help="write the table anew from the recorded rows")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--asked", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--kernels", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from benchmarks.machine import describe, kernel_cache

    flags = kernel_cache(options.kernels) if options.kernels else {}
    if options.case and options.asked:
        for answer in ours(options.case, options.asked, flags):
            print(json.dumps(answer), flush=True)
        return
    if options.case:
        print(json.dumps(measure_peer(*options.case.split(":"), flags)))
        return
    from benchmarks import workloads

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": machine, "workloads": {}}
    if not options.table:
        known["machine"] = machine
    rows = {name: known["workloads"].get(name, {"peers": {}, "ours": {}}) for name in workloads.NAMES}
    result = {"machine": known["machine"], "target": TARGET, "workloads": rows}
    for name in [] if options.table else options.names or list(workloads.NAMES):
        if options.again:
            rows[name] = {"peers": {}, "ours": {}}
        measure(name, rows[name], lambda: save(path, result, table))
        rows[name]["date"] = machine["date"]
    save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
