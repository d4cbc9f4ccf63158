"""One plan for the devices of several processes, made by the first process.

It decides everything: whether the program fits as it is, the plan, the compiler options. The others get the plan as
data, as in the plan cache, with its rates and budget, and compile that program alone. Nothing runs until all hold the
same text and options.

Invariant: every process of a call runs one program, or all raise one error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import msgspec

from jaxtensile._compat import JAX_VERSION, lower
from jaxtensile.clock import Watch, nothing
from jaxtensile.devices.measured import jaxlib_version
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.errors import AgreementError
from jaxtensile.faults import told, unless_faulty
from jaxtensile.planner import pipeline
from jaxtensile.planner.plan_cache import FLAGS, Entry, Plans, package, plan_cache
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.search.recipe import fingerprint
from jaxtensile.search.request import Fitted, Request
from jaxtensile.spmd.location import placements
from jaxtensile.spmd.processes.agreement import Agreed, Question, agree
from jaxtensile.spmd.processes.keystore import store
from jaxtensile.switches import switched_off
from jaxtensile.units import Bytes
from jaxtensile.xla.target import is_absent

_OF_ONE_PROCESS: Final = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Flags that may differ, as they do not change the compiled program."""


class Answer(msgspec.Struct, frozen=True):
    """``entry``: the plan; None: the program as it is. ``device``, ``budget``: those it was made for."""

    entry: Entry | None
    device: DeviceProfile
    budget: Bytes


def members_of(devices: Sequence[Any]) -> tuple[int, ...]:
    """The processes of these devices that must agree; none if the devices are this process's alone or absent."""
    if jax.process_count() == 1 or not devices or is_absent(devices[0]):
        return ()
    found = tuple(sorted({d.process_index for d in devices}))
    return found if found != (jax.process_index(),) else ()


def fit(
    request: Request, devices: Sequence[Any], *, budget: object, known: dict[str, Agreed], baseline: bool = False
) -> Fitted:
    """``pipeline.fit``, with one plan for all processes of the call.

    ``devices``: of the call. ``budget``: as the user wrote it. ``known``: earlier agreements by question, which need no
    other process. Raises ``AgreementError`` in all processes, or in none.
    """
    members = members_of(devices)
    if not members:
        return pipeline.fit(request, baseline=baseline, plans=plan_cache())
    me = jax.process_index()
    if me not in members:
        raise AgreementError(
            f"process {me} has none of the devices of {request.name}, which are those of processes "
            f"{', '.join(map(str, members))}: plan it there"
        )
    request = replace(request, options={**request.device.backend.alike, **request.options})
    question = _question(request, devices, budget)
    key = hashlib.sha256(msgspec.msgpack.encode(question.same, order="deterministic")).hexdigest()
    here = _Here(request, members, baseline)
    if key in known:
        before = known[key]
        fitted, digest = here.follow(before.answer, nothing)
        if digest != before.digest:
            raise AgreementError(
                f"{request.name} has become another program than the one that was agreed on (digests {digest[:12]} and "
                f"{before.digest[:12]}): call its clear_cache() in all processes, so that they agree anew"
            )
        return fitted
    shared = store()
    if shared is None:
        raise AgreementError(
            f"{request.name} runs on devices of {len(members)} processes, and they have no way to agree on a plan: "
            "call jax.distributed.initialize() first"
        )
    fitted, known[key] = agree(shared, me, members, request.name, question, here.lead, here.follow)
    return fitted


def _question(request: Request, devices: Sequence[Any], budget: object) -> Question:
    program = unless_faulty(lambda: _told(request), told)
    where = placements(request.args, request.kwargs)
    same = {
        "the version of jaxtensile": package()[:12],
        "the version of jax": ".".join(map(str, JAX_VERSION)),
        "the version of jaxlib": jaxlib_version(),
        **{f"${name}": _flags(os.environ.get(name, "")) for name in FLAGS},
        "the function": request.name,
        "the traced program": program,
        "the device kind": request.device.name,
        "the devices": ", ".join(str(d.id) for d in devices),
        "where the arguments are": "; ".join(where),
        "budget": repr(budget),
        "solver": repr(request.solver),
        "the weight of memory traffic, which objective= gives": str(request.device.traffic_weight),
        "undo": str(request.undo),
        "chunk": str(request.chunk),
        "offload_state": str(request.place is not None),
        "host_budget": "none" if not request.host_budget else "given",
        "keep_unused": str(request.keep_unused),
        "what is switched off": ", ".join(sorted(switched_off())) or "nothing",
        "compiler_options": repr(sorted((name, repr(value)) for name, value in request.options.items())),
    }
    return Question(same, msgspec.msgpack.encode(request.budget))


def _told(request: Request) -> str:
    graph = trace_jaxpr(request.jaxpr, request.donated, keep_unused=request.keep_unused).graph
    return f"one of {len(graph.ops)} operations ({fingerprint(graph)[:12]})"


def _flags(given: str) -> str:
    return " ".join(sorted(flag for flag in given.split() if not flag.startswith(_OF_ONE_PROCESS)))


class _Kept:
    """Plans of earlier processes; ``entry``: the last one found or kept."""

    def __init__(self, plans: Plans | None) -> None:
        self.plans = plans
        self.entry: Entry | None = None

    @property
    def folder(self) -> Path:
        assert self.plans is not None, "asked only of what was found there"
        return self.plans.folder

    def find(self, key: str) -> Entry | None:
        self.entry = self.plans.find(key) if self.plans is not None else None
        return self.entry

    def keep(self, entry: Entry) -> None:
        self.entry = entry
        if self.plans is not None:
            self.plans.keep(entry)

    def pass_over(self, key: str, problem: str) -> None:
        if self.plans is not None:
            self.plans.pass_over(key, problem)


@dataclass
class _Here:
    """This process in a round. ``made``: the leader's own result."""

    request: Request
    members: tuple[int, ...]
    baseline: bool
    made: Fitted | None = None

    def lead(self, own: Sequence[bytes], watch: Watch) -> bytes:
        """Plan for the smallest budget: one percentage gives different bytes in each process."""
        request = replace(self.request, budget=min(msgspec.msgpack.decode(b, type=int) for b in own))
        kept = _Kept(plan_cache())
        self.made = pipeline.fit(request, watch=watch, baseline=self.baseline, plans=kept)
        entry = None if self.made.evaluate is None else kept.entry
        return msgspec.msgpack.encode(Answer(entry, request.device, request.budget))

    def follow(self, answer: bytes, watch: Watch) -> tuple[Fitted, str]:
        """The answer's program, compiled here, and the digest of its text and options."""
        fitted, request = self.made, self.request
        if fitted is None:
            given = msgspec.msgpack.decode(answer, type=Answer)
            request = replace(request, budget=given.budget, device=given.device)
            fitted = pipeline.follow(request, given.entry, watch, baseline=self.baseline)
        text = lower(fitted.jitted, request.args, request.kwargs).as_text()
        options = sorted((name, repr(value)) for name, value in fitted.options.items())
        digest = hashlib.sha256(text.encode() + repr(options).encode()).hexdigest()
        note = f"one plan for {len(self.members)} processes, made by process {self.members[0]}"
        return replace(fitted, report=replace(fitted.report, notes=(*fitted.report.notes, note))), digest


__all__ = ["fit", "members_of"]
