"""Switches for each model of XLA's behaviour and each refinement of a search.

For tests and ablations (``benchmarks/ablation``): ``with switches.off("local_search"): ...``, or
``$JAXTENSILE_OFF=local_search,grow`` for a process. Values are right whatever is off; the checker is no switch. What is
off is in a plan's key and its report.

Switches belong to a context, like the precision of ``decimal``. Threads that plan for another one get its switches
(``_compat.configuration``). A plan ends with the switches it began with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from jaxtensile.errors import OptionError, unknown

VARIABLE: Final = "JAXTENSILE_OFF"


@dataclass(frozen=True, slots=True)
class Switch:
    """``does``: the effect while on. ``docs/switches.md`` lists where it is asked for."""

    name: str
    does: str


SWITCHES: Final = (
    # ---- spmd
    Switch("in_shards", "a program made of shard_maps is planned inside of them, as that of one device"),
    Switch("local_sizes", "a program that XLA divides among devices is planned with the sizes of one device"),
    Switch("exchanges", "what XLA gathers and adds up among devices are values of their own in plans"),
    # ---- passes/lifetimes
    Switch("added_products", "a product is added to what is there already, and is never stored"),
    Switch("joined_products", "a product is computed where it is added to another, and is never stored"),
    Switch("scattered_sums", "what is scattered into zeros and then added to something is scattered into that"),
    Switch("computed_updates", "updates in place compute what they write, which is then never stored"),
    Switch("prologues", "products compute cheap steps of what they read, which are then never stored"),
    Switch("slow_sums", "what a sum over few rows reads is stored where others read it too"),
    Switch("centred_sums", "what is centred by the totals of a slow sum is stored; in programs that are planned"),
    Switch("erf_arguments", "the argument of erf in 16 bits is stored where its gradient reads it"),
    Switch("widened_exponentials", "of a softmax in f32 of scores in 16 bits the exponentials are stored"),
    Switch("one_kernel", "what readers that end in one kernel read is computed once there"),
    Switch("shifted_reads", "kernels that read several places of a value compute it for each"),
    Switch("casts_first", "what is only widened is read through, by all that read it"),
    Switch("folded_transposes", "a matrix that is transposed next to a product is no other buffer"),
    Switch("splat_constants", "one number in every place is a constant inside a loop, and no buffer"),
    Switch("fusion_price", "a value that several kernels read is stored where that takes less traffic"),
    Switch("arithmetic_price", "that price counts exp, tanh, random numbers and the like"),
    Switch("rereads", "and how often a window reads an element"),
    Switch("slow_on_cpu", "XLA:CPU computes divisions, roots and what it rounds to 16 bits once"),
    Switch("expanded_draws", "a CPU draws random numbers in a loop over two words of each"),
    Switch("library_sums", "what a CPU's library reduces and does not compute is stored"),
    Switch("joined_rows", "XLA:CPU copies rows that are put together from buffers"),
    Switch("emitted_once", "XLA:CPU stores padded and concatenated arrays that are read at several places"),
    Switch("copies_take_time", "what is copied to the host is needed until somebody asks for the copy"),
    Switch("donated_late", "what takes over an argument that is still read has memory of its own and is copied"),
    Switch("outputs_written_over", "what an output is written over is there from the first on"),
    Switch("elementwise_in_place", "elementwise kernels write over what dies in them"),
    Switch("updates_in_place", "updates and loops write over what dies in them"),
    Switch("barriers_apart", "no elementwise kernel writes over what stands behind a barrier"),
    Switch("ordered_convolutions", "what a program is given is transposed for cuDNN, and no filter is reversed"),
    Switch("fused_convolutions", "cuDNN adds biases and arrays, and takes the relu"),
    Switch("tuples_apart", "no elementwise kernel writes over what a call of cuDNN or cuBLAS made"),
    Switch("split_products", "products with long sums and small results are split, and the parts stored"),
    Switch("loop_bodies", "bodies of loops copy slices, and carries that are still read"),
    Switch("moved_apart", "a kernel does not write over what it reads at other places"),
    Switch("rows_apart", "what needs sums of rows as well does not write over them"),
    Switch("complex_apart", "nothing is written over complex numbers on a GPU"),
    Switch("stacks_together", "loops stack into zeros that are made at once, in programs as they are written"),
    Switch("spread_groups", "products by groups become one, with a copy of the rows for each group"),
    Switch("decompositions_by_columns", "decompositions read and write transposed copies"),
    Switch("rows_on_cpu", "XLA:CPU copies matrices and images that are not laid out by rows"),
    Switch("padded_splits", "XLA:GPU pads products that it splits along what they sum over"),
    Switch("padded_convolutions", "cuDNN pads alike on both sides; what is padded otherwise is copied"),
    Switch("folded_pads", "zeros on both sides of a convolution are padded by it"),
    Switch("turned_filters", "the gradient of a dilated filter takes transposed copies"),
    Switch("pool_gradients", "the gradient of a max pool is a pool with places and a scatter"),
    Switch("expanded_pools", "the same on a CPU, where places are found in the forward pass"),
    Switch("shared_zeros", "zeros that gradients of pools add to are those that relu compares with"),
    Switch("sums_into_scatters", "what is added to a scatter into zeros is what it scatters into"),
    Switch("widened_halves", "16-bit numbers are computed in f32 where a device has no instructions for them"),
    Switch("output_reuse", "temporaries that fit lie where results will be"),
    # ---- passes/order
    Switch("bodies_scheduled", "bodies of loops run in XLA's order"),
    Switch("xla_orders", "estimates look at the three orders of XLA:GPU, beside that of the trace"),
    Switch("results_early", "and at results as early as they can be"),
    Switch("numbers_with_readers", "in those orders numbers are written by the first kernel that reads them"),
    Switch("spread_together", "rows that are spread alike come out of one kernel"),
    Switch("by_products", "what is little of something large comes right after it"),
    Switch("barriers_in_order", "what stands behind a barrier runs behind it"),
    Switch("own_copies", "products by groups make their own copies, behind barriers"),
    Switch("ties_before_large", "a barrier before something large is made has smaller work go first"),
    Switch("ties_of_sums", "barriers wait for what reads large buffers last"),
    Switch("ties_of_weights", "convolutions read weights from behind barriers"),
    # ---- passes/pack
    Switch("heap_holes", "estimates count the holes of XLA's heap"),
    # ---- passes/recompute
    Switch("level_cuts", "a forward part that is equally narrow everywhere is cut at even steps"),
    Switch("narrow_cuts", "segments end where fewer bytes cross than nearby alone"),
    Switch("cuts_behind_products", "of equal cut points those behind products are taken"),
    Switch("plateau", "the boundary is the highest step of those with about the most idle bytes"),
    Switch("segment_offsets", "segmentations of one length begin at several cut points"),
    Switch("sparing_cuts", "minimum cuts in which no product runs again are options too"),
    Switch("dear_steps", "between two cuts that differ in several dear ops there are more options"),
    Switch("segment_needs", "what segments need when they run again is learned from schedules"),
    Switch("price_bisection", "what two prices agree on is not asked at prices between them"),
    Switch("frontier", "the barrier of a stage is also over what was made before it and is read later"),
    Switch("frontier_stored", "but not over what would fuse into its readers"),
    Switch("late_clones", "what runs again late has a barrier of its own"),
    Switch("bare_stages", "a stage in which all fuses has no barrier"),
    Switch("forced_stores", "what is kept and would fuse is held by a barrier"),
    Switch("tied_constants", "what is made of constants alone is tied to its stage"),
    Switch("fused_at_readers", "what fuses is written down where it is read, once in a stage"),
    Switch("local_search", "in a plan that fits, what is dear to run again is kept for what is cheap"),
    # ---- passes/offload
    Switch("hidden_first", "copies that cost no time are made before those that do"),
    Switch("tighten", "where no copy is left, those under way at the peak are waited for"),
    Switch("feeders", "what fuses into an update moves with it"),
    Switch("small_early", "small values are made as soon as an update wants them"),
    Switch("below_the_peak", "state comes in once that adds nothing to the peak"),
    Switch("few_at_once", "few groups of state are on the device at once"),
    # ---- passes/seconds
    Switch("slices_read", "of a buffer of which a kernel takes slices alone it reads the slices"),
    Switch("draws_dear", "random numbers are as dear as products where a compiler stores them early"),
    # ---- passes/solvers
    Switch("lower_budgets", "a plan that misses, or is dear, is compared with plans for lower budgets"),
    Switch("easier_budgets", "the smallest plan is looked for at easier budgets too"),
    Switch("lower_least", "and below the smallest for as long as that leads lower"),
    Switch("lowest_of_all", "where a budget is missed, the plan that was found without one counts too"),
    Switch("peak_boundary", "where the first boundary does not lower the peak, the one at the peak is tried"),
    Switch("second_trial", "the cheapest plan that another boundary keeps from fitting is gone on with too"),
    Switch("by_seconds", "where nothing fits by FLOPs, what is cheap by seconds is tried too"),
    Switch("grow", "while bytes are left, more is kept"),
    Switch("hopeless_budgets", "budgets far below the smallest plan are not searched for"),
    Switch("mixed_copies", "copies are weighed against recomputation at several shares"),
    Switch("kept_trials", "what was laid out around later boundaries is remembered"),
    Switch("integer_programme", "plans of small programs are compared with those of an integer programme"),
    Switch("relaxations", "steps that count in it are found by its relaxation first"),
    Switch("programme_twice", "a dear answer is compared with one around two boundaries"),
    Switch("programme_drops", "an answer that does not fit is repaired by dropping something"),
    Switch("programme_traffic", "it charges a little of the traffic as well"),
    # ---- jaxtensile/rewrites
    Switch("sink", "what is made early and read late is made where it is read"),
    Switch("in_place_loops", "loops write what they stack over slices that they have read"),
    Switch("early_updates", "updates stand right behind their gradients"),
    Switch("parts", "with chunk=True the batch is worked on in parts"),
    Switch("inner", "loops inside of loops stack less"),
    Switch("slices", "large products are made slice by slice"),
    Switch("merge_branches", "a branch and its gradient are one"),
    Switch("sink_invariants", "loops make what they read"),
    Switch("strip_mine", "loops become loops of loops"),
    # ---- jaxtensile/search
    Switch("loops", "what loops stack is recomputed instead, or waits on the host"),
    Switch("loop_steps", "with steps between two rungs of that ladder"),
    Switch("loops_away", "and with stacks in host memory"),
    Switch("bodies", "bodies of loops and branches are planned as programs of their own"),
    Switch("bodies_in_order", "and kept in their order where XLA needs more than predicted"),
    Switch("updates_beside", "with a host budget, early updates are planned beside"),
    Switch("fewer_parts", "fewer parts than are enough are planned as well"),
    Switch("about", "where nothing fits, the cheapest of about as few bytes is taken"),
    # ---- jaxtensile/planner
    Switch("cse", "equal operations are one, as XLA has them"),
    Switch("counted_indices", "what indices count is a batch dimension of gathers and scatters"),
    Switch("hoist_invariants", "what no iteration changes is made in front of its loop, where XLA does so"),
    Switch("undo", "the program is planned without the user's own checkpoints too"),
    Switch("trials", "programs of which only the bytes are asked are compiled with fewer optimizations"),
    Switch("glance", "a hopeless budget takes one plan"),
    Switch("by_xla", "XLA's own rematerialization is a candidate"),
    Switch("shallow", "before bodies are planned, a smaller change is compiled"),
    Switch("lifted_parts", "after a plan that fits, fewer parts are tried"),
    Switch("lifted_plans", "after a plan that fits, cheaper ones are tried"),
    Switch("own_rules", "plans are made by the rules of the target's own compiler as long as XLA agrees with them"),
    Switch("within_reach", "an aim that no plan at hand meets is raised to one that some does"),
    Switch("halfway", "among them plans halfway to one that missed, which save much"),
    Switch(
        "contest", "the plan that fits has rivals, without copies and with products spared first; their kernels decide"
    ),
    Switch("two_misses", "after two misses the next aim is on the line through both"),
)
NAMES: Final = tuple(switch.name for switch in SWITCHES)


def _known(names: Iterable[str], source: str) -> frozenset[str]:
    """The names as a set; ``OptionError`` with the nearest name for an unknown one."""
    found = frozenset(names)
    for name in sorted(found.difference(NAMES)):
        hint = unknown(name, NAMES, "jaxtensile.switches.NAMES are all there are")
        raise OptionError(f"{source}: there is no switch {name!r}: {hint}")
    return found


_ALWAYS: Final = _known(filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))), f"${VARIABLE}")
_OFF: ContextVar[frozenset[str]] = ContextVar("off", default=_ALWAYS)


def on(name: str) -> bool:
    """Whether it is on, as everything is by default."""
    return name not in _OFF.get()


def switched_off() -> frozenset[str]:
    """All that is off here: part of the key of whatever depends on it and outlives a call."""
    return _OFF.get()


def notes() -> tuple[str, ...]:
    """For the report: what is off."""
    found = switched_off()
    return (f"switched off: {', '.join(sorted(found))}",) if found else ()


@contextmanager
def off(*names: str) -> Iterator[None]:
    """Switch these off in here, besides what is off already. It affects functions made and planned in here; existing
    plans stay."""
    before, more = switched_off(), _known(names, "switches.off()")
    with _set(before | more if more else before):
        yield


@contextmanager
def _set(found: frozenset[str]) -> Iterator[None]:
    token = _OFF.set(found)
    try:
        yield
    finally:
        _OFF.reset(token)


class _Noted(frozenset[str]):
    """An empty set that records the names it was asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return False


@contextmanager
def asked() -> Iterator[set[str]]:
    """The names asked for in here, with everything on: a switch that is not asked for changes nothing."""
    noted = _Noted()
    with _set(noted):
        yield noted.names


def handed_on() -> Callable[[], object]:
    """A function that switches off, in the thread that calls it, what is off here."""
    found = switched_off()
    return lambda: _OFF.set(found)


__all__ = ["NAMES", "SWITCHES", "VARIABLE", "Switch", "asked", "handed_on", "notes", "off", "on", "switched_off"]
