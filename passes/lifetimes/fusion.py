"""Values that become buffers, and the buffers that each op reads, once XLA has fused the program.

A fusible op (elementwise, broadcast, slice, …) disappears into its consumers, unless its result is needed in memory: by
a library call, a loop, a barrier, an output. A producer fuses into all of its consumers or none, and only while that
reads fewer bytes than writing the result once (priority fusion, ``xla/service/gpu/transforms/priority_fusion.cc``).
Consumers in one kernel count once.

Invariant: every value has a ``home``: itself if it is a buffer, the buffer it is a view of, or -1 if it never exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.ir.ir import OUTER, Graph, Op, Same, Value, consumers, producers
from jaxtensile.passes.lifetimes.added import added, joined_products, scattered, sums_of_scatters
from jaxtensile.passes.lifetimes.emitted import rows_joined, stored_at_places
from jaxtensile.passes.lifetimes.prologue import PRODUCT, Prologues, prologues
from jaxtensile.passes.lifetimes.summed import NO_LIBRARY, reduced_by_library
from jaxtensile.passes.lifetimes.sums import centred, read_by_slow_sums
from jaxtensile.passes.lifetimes.updates import read_stored
from jaxtensile.switches import on, switched_off
from jaxtensile.units import Bytes

VIEWS = frozenset(
    """reshape squeeze expand_dims bitcast_convert_type stop_gradient copy_p pvary name reduced_vary_cast
    vary_unreduced_cast""".split()
)
"""Same bytes in the same order: bitcasts in XLA."""

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p log2
    logistic lt max min mul ne neg nextafter not one_minus_square or population_count pow real imag complex conj
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square sub tan tanh xor mul_add clz eq_to le_to lt_to bessel_i0e bessel_i1e random_bits threefry2x32 erf_p
    mulhi""".split()
)
MOVES = frozenset(
    """broadcast_in_dim broadcast concatenate dynamic_slice gather iota pad rev slice split tile transpose copy
    stack unstack random_unwrap random_fold_in random_split random_gamma""".split()
)
SPREAD = "spread"
"""Copies of the rows of a product by groups (``expanded``)."""
STORED = "written copy"
"""Primitive of what XLA adds and stores (``passes.lowering``): no fusion makes it."""
_SHIFTS = frozenset("concatenate dynamic_slice gather pad rev slice".split())
REDUCTIONS = frozenset(
    """reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod reduce_xor argmax argmin reduce
    reduce_window reduce_window_sum reduce_window_max reduce_window_min""".split()
)
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
SCATTERS = frozenset("scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter-max".split())
IN_PLACE = SCATTERS | frozenset("scatter-sub scatter_min scatter_max dynamic_update_slice".split())
"""Write into operand 0 if nobody reads it afterwards."""
DECOMPOSITIONS = frozenset("cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd tridiagonal".split())
"""Library calls that write over a copy of their operand."""

DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
"""Random numbers."""
WORK = {
    **dict.fromkeys("exp exp2 log log1p logistic cbrt".split(), 1.0),
    "expm1": 6.0,
    **dict.fromkeys("tanh erf erfc erf_inv pow sin cos tan atan2 lgamma digamma".split(), 8.0),
    **dict.fromkeys(DRAWS, 32.0),
}
"""Arithmetic of one element, in bytes of memory traffic that take as long; ops not listed are free. Set so that
``tanh``, ``erf`` and the like are stored rather than computed twice, as XLA:GPU does (docs/xla.md)."""
EXPENSIVE = frozenset(WORK)

_SLOW = frozenset({"div", "sqrt", "rsqrt", "rem"})
"""Arithmetic that XLA:CPU does not repeat either (``InstructionFusion::IsExpensive`` in
``xla/service/instruction_fusion.cc``), nor ops that round to 16 bits and back."""

HALVES = frozenset({"bfloat16", "float16"})

SMALL = 1 << 26
"""Elements below which XLA:GPU stores values that it would compute twice in larger arrays: GPT-2's softmax at 62.9 and
75.5 million elements, H200, jax 0.10.2."""
ROW = 1 << 14
"""Elements of the longest row whose sums and what follows XLA:GPU computes in one kernel: measured from 1,024 to 32,768
(H200, docs/xla.md)."""
_MAX_LEAVES = 24
"""Most buffers that one kernel reads: bounds the work of the model. XLA:GPU's own limit is higher. A guess. At half and
at double no plan changes."""


_FUSIBLE = ELEMENTWISE | MOVES | {OUTER, SPREAD}
_FUSIBLE_OR_VIEWS = _FUSIBLE | VIEWS
_READ_ANYWHERE = _FUSIBLE | REDUCTIONS
"""Ops that take their operands stored or not."""


def is_fusible(primitive: str) -> bool:
    """Whether XLA can compute the op inside its consumer."""
    return primitive in _FUSIBLE


def _is_computed_on_the_way(op: Op) -> bool:
    return op.primitive in _READ_ANYWHERE or op.primitive in VIEWS


def _is_in_place(op: Op) -> bool:
    return op.primitive in ELEMENTWISE or op.primitive in VIEWS


@dataclass(frozen=True, slots=True)
class Kernels:
    """The fused program.

    ``home[v]``: the value whose buffer holds ``v`` (-1: never materialised). ``reads[i]``: buffers that op ``i`` reads
    if it is the root of a kernel, else empty. ``is_root[i]``: op ``i`` launches. ``leaves[v]``: buffers that a fused
    value is computed from. ``by``: the compiler that fused. ``added``: by result of a kernel that adds a product or a
    scatter to an array, that product or scatter; by scatter, the zeros it would add to. Neither is a buffer.
    """

    home: list[int]
    reads: list[tuple[int, ...]]
    is_root: list[bool]
    leaves: list[tuple[int, ...]]
    by: Fuser = H200
    added: Mapping[int, int] = field(default_factory=dict[int, int])
    joined: Mapping[int, int] = field(default_factory=dict[int, int])

    def in_order(self, order: Sequence[int]) -> Kernels:
        """The same kernels for the ops in another order: fusion depends on who reads what, not on when."""
        return replace(self, reads=[self.reads[i] for i in order], is_root=[self.is_root[i] for i in order])


RECENT = 4
"""Graphs whose kernels are remembered: pricing and planning ask for the same ones. A guess, worth 8 % of a planning."""


def fuse(graph: Graph, *, by: Fuser | None = None, written: bool = False) -> Kernels:
    """Group ops into kernels. Linear in edges.

    ``by``: another compiler than the graph's. ``written``: the program is compiled as written; rules measured on such
    programs alone apply too.
    """
    return _fused(Same(graph), by or graph.fuser, written, switched_off())


@lru_cache(maxsize=RECENT)
def _fused(same: Same[Graph], by: Fuser, written: bool, off: frozenset[str]) -> Kernels:
    graph, twice = same.it, by.twice
    values, ops = graph.values, graph.ops
    read_by = consumers(graph)
    wanted: set[int] = set(graph.outputs)
    views = _views(graph, read_by, wanted)
    products = (
        prologues(graph, views, read_by, numbers=written) if by.products and on("prologues") else Prologues.none(graph)
    )
    joined = rows_joined(graph) if not twice and on("joined_rows") else frozenset[int]()
    must_exist = _needed_in_memory(graph, views, wanted, products, joined, by.scatters)
    _store_arguments_of_erf(graph, read_by, must_exist)
    alone = _read_by_one_kernel(graph, read_by, must_exist, joined) if on("one_kernel") else [False] * len(ops)
    slow = [False] * len(values)
    if twice:
        slow = (read_by_slow_sums if written else centred)(graph, read_by, ELEMENTWISE, VIEWS)
    pairs = joined_products(graph, read_by) if by.joins else dict[int, int]()
    for v in pairs:
        must_exist[v] = True
    for v in sums_of_scatters(graph, read_by) if not twice and on("scattered_sums") else ():
        must_exist[v] = True
    library = NO_LIBRARY
    if not twice and on("library_sums"):
        library = reduced_by_library(graph, read_by, lambda op: op.primitive in VIEWS, wanted)
    if not twice and on("emitted_once"):
        for v in stored_at_places(
            graph,
            read_by,
            must_exist,
            fusible=lambda op: op.primitive in _FUSIBLE_OR_VIEWS and op.primitive != OUTER and op.id not in joined,
            moves=lambda op: op.primitive in MOVES,
            costly=lambda op: op.primitive in WORK or _is_slow_on_cpu(graph, op),
        ):
            must_exist[v] = True
    readers = _readers(graph, read_by, views, must_exist)
    home = list(range(len(values)))
    leaves: list[tuple[int, ...]] = [() for _ in values]
    work = [0.0] * len(values)  # arithmetic inside a fused value, in bytes of traffic that take as long
    for v in graph.inputs:
        leaves[v] = (v,)
    reads: list[tuple[int, ...]] = [()] * len(ops)
    is_root = [False] * len(ops)
    for i, op in enumerate(ops):
        name, operands = op.primitive, op.operands
        if i in library.inside or (library.reads and name in REDUCTIONS):
            own = [(home[v],) if home[v] in library.reads else leaves[v] for v in operands]
            sources = tuple(dict.fromkeys(chain.from_iterable(own)))
        elif len(operands) == 1:
            sources = leaves[operands[0]]  # each once already
        else:
            sources = tuple(dict.fromkeys(chain.from_iterable([leaves[v] for v in operands])))
        if views[i] and operands and op.results:
            v, r = operands[0], op.results[0]
            home[r] = home[v]
            leaves[r] = leaves[v]
            work[r] = work[v]
            continue
        if name == "optimization_barrier":
            for v, r in zip(op.slots or operands, op.results, strict=True):
                home[r] = home[v] if v >= 0 and home[v] >= 0 else r
                leaves[r] = (home[r],)
            reads[i] = sources
            is_root[i] = True
            continue
        if i in library.inside:
            home[op.results[0]], leaves[op.results[0]] = -1, sources
            continue
        if name in _FUSIBLE and (by.outer or name != OUTER) and i not in joined:
            r0 = op.results[0]
            effort = work[operands[0]] if len(operands) == 1 else sum([work[v] for v in dict.fromkeys(operands)])
            if name in WORK and on("arithmetic_price"):
                effort += by.work * WORK[name] * math.prod(values[r0].shape)
            stored = must_exist[r0] or (len(op.results) > 1 and any(must_exist[r] for r in op.results))
            others = readers[r0]
            if products.inside[r0]:
                others = [o for o in others if not products.silent[o]]
            users = 1 if alone[i] else len(others)
            if users == 1 and len(read_by[r0]) > 1 and any(ops[o].primitive in _SHIFTS for o in read_by[r0]):
                users = len(others) if on("shifted_reads") else 1  # which read other places of it in the same kernel
            if twice:
                stored = stored or (slow[r0] and not alone[i])
                stored = stored or (
                    name == "exp"
                    and _is_widened_exponential(graph, op, sources, read_by, by)
                    and on("widened_exponentials")
                )
                times = sum([ops[o].rereads for o in others]) if users > 1 else users
                if times != users and not on("rereads"):
                    times = users
                nbytes = values[r0].nbytes
                fused = not stored and _worth_fusing(effort, nbytes, users, times, sources, values, again=written)
            else:
                effort += _is_slow_on_cpu(graph, op) and on("slow_on_cpu")
                fused = not stored and (users <= 1 or not effort)
            if fused and r0 in library.reads:
                reads[i], is_root[i] = sources, True
                leaves[r0], work[r0] = (sources, effort) if r0 in library.again else ((r0,), 0.0)
                continue
            if fused:
                for r in op.results:
                    home[r] = -1
                    leaves[r] = sources
                    work[r] = effort
                continue
        reads[i] = sources
        is_root[i] = True
        for r in op.results:
            leaves[r] = (r,)
    sums = scattered(graph, read_by, home, is_root)
    for op in ops if sums else ():
        if op.primitive in IN_PLACE and op.results[0] in sums:  # which waits for what it is added to
            (step,) = read_by[op.results[0]]
            reads[step] += reads[op.id]
    made = producers(graph) if pairs else []
    for v, product in [*pairs.items()]:
        step, maker = made[v], made[product]
        if not (is_root[step] and is_root[maker] and product in reads[step]):
            del pairs[v]
            continue
        reads[step] = tuple(b for b in dict.fromkeys((*reads[step], *reads[maker])) if b != product)
    if twice:
        sums = added(graph, read_by, home, reads, is_root, generated=by.products) | sums
    return Kernels(home=home, reads=reads, is_root=is_root, leaves=leaves, by=by, added=sums, joined=pairs)


def _is_slow_on_cpu(graph: Graph, op: Op) -> bool:
    return op.primitive in _SLOW or any(graph.values[v].dtype in HALVES for v in (*op.operands, op.results[0]))


def _store_arguments_of_erf(graph: Graph, read_by: list[list[int]], must_exist: list[bool]) -> None:
    """Store 16-bit arguments of ``erf``: XLA rounds them once, computes polynomials in f32, and gradients read the
    rounded ones."""
    for op in graph.ops:
        if op.primitive in ("erf", "erfc"):
            for v in op.operands:
                value = graph.values[v]
                if value.dtype in HALVES and len(read_by[v]) > 1 and math.prod(value.shape) < SMALL:
                    must_exist[v] = must_exist[v] or on("erf_arguments")


def _is_widened_exponential(
    graph: Graph, op: Op, sources: tuple[int, ...], read_by: list[list[int]], by: Fuser
) -> bool:
    """Whether ``op`` makes exponentials that XLA stores instead of the scores: of an f32 softmax of 16-bit scores.

    Only in small arrays, if they are divided and a gradient reads them too (``Fuser.exponentials``): a softmax alone is
    one kernel. In rows of one kernel also for ``log_softmax``, which takes the logarithm of their sum off all of a row:
    a cross entropy takes 10 bytes a logit then, 6 by ``logsumexp`` (H200, jax 0.10.2 and 0.12).
    """
    result = graph.values[op.results[0]]
    count = math.prod(result.shape)
    readers = [graph.ops[o] for o in read_by[result.id]]
    quotients = [reader.results[0] for reader in readers if reader.primitive == "div"]
    divided = bool(quotients) and (len(readers) > 2 or any(len(read_by[v]) > 1 for v in quotients))
    sums = [reader.results[0] for reader in readers if reader.primitive == "reduce_sum"]
    logs = [op.results[0] for op in _behind_views(graph, sums, read_by) if op.primitive == "log"]
    off = [op.results[0] for op in _behind_views(graph, logs, read_by) if op.primitive == "sub"]
    logged = any(math.prod(graph.values[v].shape) == count for v in off)
    return (
        result.dtype == "float32"
        and count <= SMALL
        and ((divided and by.exponentials) or (logged and result.shape[-1:] <= (ROW,)))
        and len(read_by[result.id]) > 1
        and any(graph.values[s].dtype in HALVES and math.prod(graph.values[s].shape) == count for s in sources)
    )


def _behind_views(graph: Graph, values: Sequence[int], read_by: list[list[int]]) -> list[Op]:
    """Ops that read ``values``, directly or through views and broadcasts."""
    found, left = list[Op](), list(values)
    while left:
        for o in read_by[left.pop()]:
            op = graph.ops[o]
            if op.primitive in VIEWS or op.primitive == "broadcast_in_dim":
                left += op.results
            else:
                found.append(op)
    return found


def _worth_fusing(
    effort: float,
    nbytes: Bytes,
    users: int,
    times: float,
    sources: Sequence[int],
    values: Sequence[Value],
    *,
    again: bool = False,
) -> bool:
    """Whether computing a value in every reader beats writing it once and reading it back.

    ``times``: how often the ``users`` compute an element. Further reads of a written value hit the cache; with
    ``again`` they read memory, as XLA assumes at any size (max pools, H200, jax 0.10.2).
    """
    if len(sources) > _MAX_LEAVES:
        return False
    if users <= 1:
        return True
    read = sum([min(values[s].nbytes, nbytes) for s in sources])
    fused = times * (read + effort)
    unfused = read + effort + nbytes + (times if again else users) * nbytes
    return fused < unfused or not on("fusion_price")


def _readers(graph: Graph, read_by: list[list[int]], views: list[bool], must_exist: list[bool]) -> list[Sequence[int]]:
    """For each value the ops that read it, or read an unstored view or widened copy of it."""
    out: list[Sequence[int]] = [*read_by]
    for op in reversed(graph.ops):
        if not op.operands or len(op.results) != 1 or must_exist[op.results[0]]:
            continue
        v, r = op.operands[0], op.results[0]
        if (views[op.id] or _widens(graph, op)) and out[r] and len(out[v]) + len(out[r]) <= _MAX_LEAVES:
            out[v] = tuple(dict.fromkeys([*(o for o in out[v] if o != op.id), *out[r]]))
    return out


def _widens(graph: Graph, op: Op) -> bool:
    """Whether ``op`` casts to an equally wide or wider type: XLA fuses such casts into every reader first."""
    is_cast = op.primitive == "convert_element_type" and bool(op.operands)
    return is_cast and graph.values[op.operands[0]].nbytes <= graph.values[op.results[0]].nbytes and on("casts_first")


def _views(graph: Graph, read_by: list[list[int]], wanted: set[int]) -> list[bool]:
    """For each op whether its result is its operand's buffer: bitcasts, and matrices transposed next to products.

    A product reads a matrix in either order, and writes one in either order if nobody wants the other: XLA folds the
    transpose into it.
    """
    out = [op.primitive in VIEWS for op in graph.ops]
    transposes = [op for op in graph.ops if op.primitive == "transpose"]
    made = producers(graph) if transposes else []
    for op in transposes:
        if op.operands and len(graph.values[op.results[0]].shape) == 2:
            source, result = op.operands[0], op.results[0]
            readers = read_by[result]
            read = bool(readers) and all(graph.ops[o].primitive == PRODUCT for o in readers)
            written = made[source] >= 0 and graph.ops[made[source]].primitive == PRODUCT and len(read_by[source]) == 1
            folded = (read and result not in wanted) or (written and source not in wanted)
            out[op.id] = folded and on("folded_transposes")
    return out


def _needed_in_memory(
    graph: Graph, views: list[bool], wanted: set[int], products: Prologues, joined: frozenset[int], scatters: bool
) -> list[bool]:
    """Values that some reader takes as a buffer. Views, and values computed inside products, pass the demand to their
    base. ``joined``: other fusible ops that read buffers. ``scatters``: whether scatters compute their operands."""
    needed = [False] * len(graph.values)
    multiplied = [False] * len(graph.values)
    """Products read the operands of this value instead."""

    def multiply(operands: Iterable[int]) -> None:
        for v in operands:
            (multiplied if products.inside[v] else needed)[v] = True

    # XLA makes a constant of a loop that is one number in every place inside of the loop (WhileLoopConstantSinking).
    splats = {r for op in graph.ops if op.primitive == "broadcast_in_dim" and not op.operands for r in op.results}
    updates = any(op.primitive in IN_PLACE for op in graph.ops) and on("computed_updates")
    made = producers(graph) if updates else []
    for v in wanted:
        needed[v] = True
    for op in reversed(graph.ops):
        name = op.primitive
        if len(op.results) == 1 and multiplied[op.results[0]]:
            multiply(op.operands)
        if views[op.id]:
            if op.results and needed[op.results[0]]:
                for v in op.operands[:1]:  # none where it is a view of a literal
                    needed[v] = True
        elif products.silent[op.id] and name == PRODUCT:
            multiply(op.operands)
        elif name in IN_PLACE and updates:
            for v in read_stored(graph, op, made, scatters, _is_computed_on_the_way, _is_in_place):
                needed[v] = True
        elif name not in _READ_ANYWHERE or op.id in joined:
            inside = set(op.slots[: op.carried[0]]) & splats
            if inside and not on("splat_constants"):
                inside = set[int]()
            for v in op.operands:
                needed[v] = needed[v] or v not in inside
    return needed


def _read_by_one_kernel(
    graph: Graph, read_by: list[list[int]], must_exist: list[bool], joined: frozenset[int]
) -> list[bool]:
    """For each op whether all its readers end in one kernel, so that it is computed once there. ``joined``: ops that
    are kernels of their own."""
    ops = graph.ops
    sink = list(range(len(ops)))
    alone = [False] * len(ops)
    for op in reversed(ops):
        if op.primitive not in _FUSIBLE_OR_VIEWS or op.id in joined:
            continue
        readers = read_by[op.results[0]] if len(op.results) == 1 else [o for r in op.results for o in read_by[r]]
        if not readers:
            continue
        end = sink[readers[0]]
        if len(readers) > 1 and any(sink[o] != end for o in readers):
            continue
        # No kernel, but another name for what several read, or numbers that each of them makes of it.
        if ops[end].primitive in VIEWS or _widens(graph, ops[end]):
            continue
        alone[op.id] = True
        if not any(must_exist[r] for r in op.results):
            sink[op.id] = end
    return alone
