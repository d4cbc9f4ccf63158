"""Seconds of each op: a roofline, in which fused ops cost no traffic of their own.

Rules are keyed by primitive. An unknown primitive pays for the traffic of its operands and results, and is reported by
name. A rate is the peak times a share that real programs reach, or nearly the rate measured on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.ir.ir import COLLECTIVES, OUTER, Graph, Op
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Costs
from jaxtensile.passes.lifetimes.fusion import (
    DRAWS,
    ELEMENTWISE,
    EXPENSIVE,
    IN_PLACE,
    MOVES,
    REDUCTIONS,
    VIEWS,
    WORK,
    Kernels,
    fuse,
)
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

MATMUL_SHARE = 0.75
"""Dense bf16 products reach 790 of 989 TFLOP/s on an H200 (measured); real shapes a little less."""
COPY_SHARE = 0.85
"""Streaming kernels reach 4.3 of 4.8 TB/s on an H200 (measured)."""
FUSED_SHARE = 0.04
"""Cost of recomputing a fused elementwise value, as a share of streaming it through memory: not nothing, so that of
equal plans the one with less wins. A guess."""
EXPENSIVE_TIMES = 4
"""Factor on ``FUSED_SHARE`` for expensive ops (``fusion.EXPENSIVE``). A guess; a stored one is a kernel, and priced as
such."""

LIBRARY_SHARE = 0.1
"""Share of the rate outside the matrix units that factorizations and sparse products reach, at most. A guess on the
safe side: they are not recomputed for little."""
LIBRARY = frozenset(
    """cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr eigh eig schur hessenberg tridiagonal svd
    triangular_solve tridiagonal_solve symmetric_product spsolve bcoo_dot_general bcoo_dot_general_sampled
    bcoo_spdot_general bcsr_dot_general coo_matvec coo_matmat coo_spmv coo_spmm csr_matvec csr_matmat csr_spmv
    csr_spmm""".split()
)
"""Products and factorizations that do not use the matrix units."""
FREE = (
    frozenset(
        """optimization_barrier create_token after_all axis_index stage pin unpin tie random_clone platform_index
        dimension_size dim_as_value shape_assertion inspect_sharding debug_print empty empty2 iota_2x32_shape
        unreachable dce_sink create_linear""".split()
    )
    | VIEWS
    | {TO_HOST, TO_DEVICE}
)
"""Primitives that take no time."""
_SCANS = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
_SORTS = frozenset("sort top_k approx_top_k".split())
UNKNOWN = 10.0
"""Passes over operands and results for a primitive without a rule, as for a special function or a transform. A guess on
the safe side."""
BETWEEN_DEVICES = 10.0
"""Time of bytes between devices over that of bytes in memory: an H200 reads 4.8 TB/s and sends 450 GB/s over NVLink
(data sheet)."""

TAKES = frozenset("slice dynamic_slice gather split unstack".split())
"""They read only as much of their operands as their results hold."""

KNOWN = (
    ELEMENTWISE
    | MOVES
    | REDUCTIONS
    | IN_PLACE
    | LIBRARY
    | FREE
    | COLLECTIVES
    | _SCANS
    | _SORTS
    | {OUTER}
    | frozenset(
        """dot_general conv_general_dilated scaled_dot scaled_matmul scaled_matmul_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
        dot_product_attention_bwd_wrapper scan while cond jit pjit shard_map custom_jvp_call device_put fft
        reshard sharding_constraint layout_constraint random_seed random_wrap select_and_scatter_add
        select_and_gather_add ragged_dot ragged_dot_general rng_bit_generator""".split()
    )
)


def op_costs(graph: Graph, device: DeviceProfile, *, body: bool = False) -> Costs:
    """Seconds of each op of ``graph`` on ``device``, and the charge that solvers pay to run it again.

    ``body``: ``graph`` is the body of a loop or branch. The charge is matrix time plus the rest at
    ``device.traffic_weight``; at a weight of 1 or more, the seconds.
    """
    kernels = fuse(graph)
    touched = _touched(graph, kernels) if on("slices_read") else None
    bandwidth = device.reached("memory_bandwidth", COPY_SHARE)
    weight = device.traffic_weight

    def both(op: Op) -> tuple[float, float]:
        """Seconds and charge."""
        if op.bodies:
            inner = [op_costs(inside, device, body=True) for inside in op.bodies]
            seconds, charge = max((sum(c.seconds), sum(c.charge)) for c in inner)
            launch, trips = device.kernel_launch, op.runs
            return launch + seconds * trips, weight * launch + charge * trips
        launch, compute, traffic = parts(op)
        return launch + max(compute, traffic), compute + weight * (launch + traffic)

    def parts(op: Op) -> tuple[float, float, float]:
        """Launch, matrix and traffic seconds."""
        if op.primitive in FREE:
            return 0.0, 0.0, 0.0
        written = sum(graph.values[r].nbytes for r in op.results)
        if op.primitive in DRAWS and device.backend.draws_dear and not body and on("draws_dear"):
            # XLA:TPU stores what it draws, long before it is read: BERT's step at batch 128 whose dropout masks are
            # drawn again has 28 arrays of 1.5 GiB of it at once (libtpu with jax 0.10.2). Charged like products, masks
            # are kept. An iteration of a loop draws when it runs.
            drawn = sum(math.prod(graph.values[r].shape) for r in op.results)
            return device.kernel_launch, WORK[op.primitive] * drawn / bandwidth, written / bandwidth
        if not kernels.is_root[op.id]:
            share = FUSED_SHARE * (EXPENSIVE_TIMES if op.primitive in EXPENSIVE else 1)
            return 0.0, 0.0, written * share / bandwidth
        if op.primitive in IN_PLACE:
            written = sum(graph.values[v].nbytes for v in op.operands[1:])
        read = sum(graph.values[b].nbytes for b in kernels.reads[op.id]) if touched is None else touched[op.id]
        if op.primitive in MOVES or op.primitive in IN_PLACE:
            read = min(read, written)
        compute = op.flops / matmul_rate(op, graph, device)
        traffic = (read + written + 2 * op.workspace) / bandwidth
        return device.kernel_launch, compute + _passes(op, graph) * traffic, traffic

    rows = [both(op) for op in graph.ops]
    seconds = tuple(seconds for seconds, _ in rows)
    return Costs(seconds=seconds, charge=seconds if weight >= 1 else tuple(charge for _, charge in rows))


def _touched(graph: Graph, kernels: Kernels) -> list[Bytes]:
    """Bytes that each op's kernel reads; only the slices of a buffer that it slices."""
    of: list[Mapping[int, Bytes]] = [{} for _ in graph.values]
    for v in graph.inputs:
        of[v] = {v: graph.values[v].nbytes}
    found: list[Bytes] = []
    for op in graph.ops:
        read: dict[int, Bytes] = {}
        for v in dict.fromkeys(op.operands):
            for b, nbytes in of[v].items():
                read[b] = min(read.get(b, 0) + nbytes, graph.values[b].nbytes)
        for r in op.results:
            home, made = kernels.home[r], graph.values[r].nbytes
            taken = {b: min(nbytes, made) for b, nbytes in read.items()} if op.primitive in TAKES else read
            of[r] = taken if home < 0 else {home: graph.values[home].nbytes}
        # What a kernel adds its result to, say, it reads beside its operands.
        whole = sum(graph.values[b].nbytes for b in kernels.reads[op.id] if b not in read)
        found.append(whole + sum(read[b] for b in kernels.reads[op.id] if b in read))
    return found


def _passes(op: Op, graph: Graph) -> float:
    """Passes over memory of a kernel that needs more than one, else 0; charged as work, so that it is not repeated for
    nothing."""
    longest = max((d for v in op.operands for d in graph.values[v].shape), default=1)
    levels = math.log2(max(longest, 2))
    if op.primitive in _SORTS:
        return max(levels**2 / 4, 1.0)  # a network of comparisons, some of its steps at a time
    if op.primitive in _SCANS:
        return max(levels / 2, 1.0)  # a tree of partial results, two levels at a time
    if op.primitive == "fft":
        return 2.0
    if op.primitive in COLLECTIVES:
        return BETWEEN_DEVICES
    return 0.0 if op.primitive in KNOWN else UNKNOWN


def launches(graph: Graph, device: DeviceProfile) -> Seconds:
    """Seconds to launch all kernels, bodies of loops included; a device that works faster waits for them."""
    kernels = fuse(graph)
    total = 0.0
    for op in graph.ops:
        if op.bodies:
            total += max(launches(body, device) for body in op.bodies) * op.runs
        elif kernels.is_root[op.id] and op.primitive not in VIEWS:
            total += device.kernel_launch
    return total


def matmul_rate(op: Op, graph: Graph, device: DeviceProfile) -> float:
    """FLOP/s for the operand type of ``op``, on the matrix units if it can use them."""
    if op.primitive in LIBRARY:
        return device.reached("elementwise_flops", LIBRARY_SHARE)
    wide = any(graph.values[v].dtype in ("float32", "float64", "complex64") for v in op.operands)
    return device.reached("matmul_flops_f32" if wide else "matmul_flops_bf16", MATMUL_SHARE)


def unknown_primitives(graph: Graph) -> tuple[str, ...]:
    """Primitives without a rule, bodies included, sorted."""
    names: set[str] = set()
    for op in graph.ops:
        if op.primitive not in KNOWN:
            names.add(op.primitive)
        for body in op.bodies:
            names.update(unknown_primitives(body))
    return tuple(sorted(names))
