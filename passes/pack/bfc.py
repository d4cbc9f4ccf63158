"""Device bytes that XLA's allocator takes for a sequence of allocations.

Simulates the best-fit-with-coalescing allocator of JAX's GPU client (``xla/tsl/framework/bfc_allocator.cc``):

* Sizes are multiples of 256 bytes.
* A request takes the smallest free chunk that is large enough, lowest address first: from its power-of-two class, then
  from larger ones.
* A chunk twice as large as asked, or with 128 MiB to spare, is split.
* Freed chunks join their neighbours, never across regions.

Invariant: chunks of a region have no gaps, and no two free ones touch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from jaxtensile.units import MIB, Bytes

GRAIN = 256
"""Bytes; every chunk is a multiple: ``kMinAllocationSize`` of XLA's BFC allocator."""
LAST_BIN = 20
"""Number of the bin for all larger chunks: XLA's BFC allocator has 21 (``kNumBins``)."""
SPARE = 128 * MIB
"""Bytes: a remainder this large is always split off: ``kMaxInternalFragmentation`` of XLA's BFC allocator."""
FIRST_REGION = 2 * MIB
"""Bytes of the first region of a growing pool; each next is at least twice as large, as in XLA's BFC allocator."""


def rounded(nbytes: Bytes) -> Bytes:
    """Bytes that the allocator takes for a request of ``nbytes``."""
    return -(-nbytes // GRAIN) * GRAIN


class OutOfMemory(Exception):
    """A request that neither a free chunk nor a new region can serve."""


@dataclass(slots=True, eq=False)
class Chunk:
    """``size`` bytes from ``start`` of the pool, with its neighbours in the region."""

    start: Bytes
    size: Bytes
    before: Chunk | None = None
    after: Chunk | None = None
    free: bool = True


@dataclass(slots=True)
class BFC:
    """The pool of one process on one device: mutable scratch of one simulation.

    ``limit``: most bytes. ``grows``: take regions as needed (``XLA_PYTHON_CLIENT_PREALLOCATE=false``), not all of
    ``limit`` at once. ``pool``: bytes taken from the device. ``in_use``, ``peak``: bytes handed out.
    """

    limit: Bytes
    grows: bool = True
    pool: Bytes = 0
    in_use: Bytes = 0
    peak: Bytes = 0
    _region: Bytes = 0
    _classes: dict[int, list[tuple[Bytes, Bytes]]] = field(default_factory=lambda: {})
    _free: dict[Bytes, Chunk] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        self._region = min(FIRST_REGION, rounded(self.limit)) if self.grows else rounded(self.limit)

    def allocate(self, nbytes: Bytes) -> Chunk | None:
        """A chunk for ``nbytes``; None for no bytes. Raises ``OutOfMemory``."""
        if nbytes <= 0:
            return None
        size = rounded(nbytes)
        chunk = self._find(size)
        if chunk is None:
            self._extend(size)
            chunk = self._find(size)
            assert chunk is not None
        chunk.free = False
        if chunk.size >= 2 * size or chunk.size - size >= SPARE:
            rest = Chunk(chunk.start + size, chunk.size - size, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.size = rest, size
            self._put(rest)
        self.in_use += chunk.size
        self.peak = max(self.peak, self.in_use)
        return chunk

    def free(self, chunk: Chunk | None) -> None:
        """Give a chunk back."""
        if chunk is None:
            return
        assert not chunk.free, "freed twice"
        self.in_use -= chunk.size
        chunk.free = True
        after, before = chunk.after, chunk.before
        if after is not None and after.free:
            self._take(after)
            chunk.size += after.size
            chunk.after = after.after
            if after.after is not None:
                after.after.before = chunk
        if before is not None and before.free:
            self._take(before)
            before.size += chunk.size
            before.after = chunk.after
            if chunk.after is not None:
                chunk.after.before = before
            chunk = before
        self._put(chunk)

    def _find(self, size: Bytes) -> Chunk | None:
        """The chunk that XLA would take, removed from its class."""
        for klass in sorted(k for k in self._classes if k >= _class(size)):
            chunks = self._classes[klass]
            at = bisect_left(chunks, (size, 0))
            if at < len(chunks):
                chunk = self._free[chunks[at][1]]
                self._take(chunk)
                return chunk
        return None

    def _extend(self, size: Bytes) -> None:
        """Add a region of at least ``size`` bytes."""
        room = (self.limit - self.pool) // GRAIN * GRAIN
        if size > room:
            raise OutOfMemory(f"{size} bytes asked, {room} of {self.limit} not yet taken")
        enough = self._region >= size
        while self._region < size:
            self._region *= 2
        taken = min(self._region, room)
        if enough:
            self._region *= 2
        # Where the driver puts a region is not known; chunks of two regions are never neighbours.
        self._put(Chunk(self.pool, taken))
        self.pool += taken

    def _put(self, chunk: Chunk) -> None:
        insort(self._classes.setdefault(_class(chunk.size), []), (chunk.size, chunk.start))
        self._free[chunk.start] = chunk

    def _take(self, chunk: Chunk) -> None:
        klass = _class(chunk.size)
        chunks = self._classes[klass]
        del chunks[bisect_left(chunks, (chunk.size, chunk.start))]
        if not chunks:
            del self._classes[klass]
        del self._free[chunk.start]


def _class(size: Bytes) -> int:
    """The bin of a size: 256 bytes times a power of two, 21 of them."""
    return min((size // GRAIN).bit_length() - 1, LAST_BIN)
