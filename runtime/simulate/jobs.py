"""The jobs of a simulation: what they run, when they come, and what becomes of them.

A job is its ladder. A rung's ``seconds`` are those of a step alone on its device; in them it computes for ``seconds`` −
``wait``, and copies for ``into`` and ``out`` seconds of the link.
"""

from __future__ import annotations

from msgspec import Struct, field

from jaxtensile.runtime.protocol.messages import MOST_BYTES, Rung
from jaxtensile.units import Bytes, Seconds


class Job(Struct, frozen=True, kw_only=True):
    """One job: so many ``steps`` on any rung of its ladder."""

    name: str
    ladder: tuple[Rung, ...]
    steps: int
    arrives: Seconds = 0.0
    devices: tuple[str, ...] = ()
    """Empty: the fleet chooses ``count``."""
    count: int = 1
    told: tuple[Rung, ...] = ()
    """The ladder that the coordinator is told; empty: ``ladder``. As many rungs of the same bytes."""
    floor: Bytes = 0
    want: Bytes = MOST_BYTES
    priority: int = 0
    weight: float = 1.0
    groups: int = 1
    """Parts of a step between which other jobs of its process have their turns; all its bytes are charged for good."""
    starts: Seconds = 0.0
    """From its arrival until its process asks for a lease."""
    compiles: Seconds = 0.0
    """Seconds until a plan that it has not run yet is compiled."""
    gives: Seconds = 0.0
    """Seconds until the allocator has given bytes back: at the end of a turn, and before it has shrunk."""
    takes: Seconds = 0.0
    """Seconds that the first step of a turn takes more."""
    says: Seconds | None = None
    """Seconds that it says to the coordinator that handing a turn over costs; None: what that takes."""
    keeps: bool = False
    """Its allocator never gives bytes back."""
    killed: Seconds | None = None
    """Seconds after its arrival; None: never."""
    stops: tuple[tuple[Seconds, Seconds], ...] = ()
    """When, after its arrival, its process does nothing, and for how long."""

    @property
    def admitted(self) -> tuple[Rung, ...]:
        """The ladder that the coordinator is told. Between the parts of a step its bytes stay."""
        ladder = self.told or self.ladder
        if self.groups < 2:
            return ladder
        return tuple([_for_good(r) for r in ladder])


def _for_good(rung: Rung) -> Rung:
    return Rung(
        persistent=rung.level,
        host=rung.host,
        seconds=rung.seconds,
        wait=rung.wait,
        into=rung.into,
        out=rung.out,
    )


class Outcome(Struct, kw_only=True):
    """What became of a job. Times are of the virtual clock; None: it did not happen."""

    job: Job
    admitted: Seconds | None = None
    first_step: Seconds | None = None
    ended: Seconds | None = None
    why: str = ""
    """Empty: it ran all its steps. Else why it did not."""
    steps: int = 0
    stepping: Seconds = 0.0
    """In steps, without the waits for turns."""
    waits: list[Seconds] = field(default_factory=list[Seconds])
    """For each turn that it asked for."""
    rungs: dict[int, int] = field(default_factory=dict[int, int])
    """Steps on each rung."""
    moves: int = 0
    turns: int = 0

    @property
    def waited(self) -> Seconds:
        """From its request until it was admitted."""
        if self.admitted is None:
            return 0.0
        return max(self.admitted - self.job.arrives - self.job.starts, 0.0)
