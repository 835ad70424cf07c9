"""How a group's blocks travel between the engine's cache and staging: what a put and a get need of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.cache import AnyGroup
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.hostpath import CACHED_BYTES, HostPath
from kvstore.span import Span
from kvstore.staging import Buffer, HostBuffer, StagingPool

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Staged(Protocol):
    """Room for some blocks in a borrowed buffer."""

    bytes: Bytes
    """(blocks, block bytes) uint8, each row a block in canonical order."""


class Gathered(Protocol):
    """Blocks on their way to staging."""

    def take(self, first: int, end: int) -> UInt64Array:
        """Wait until the staged rows first to end - 1 are complete: s of each slice, summed from the engine's blocks
        before they were copied, (rows, slices) uint64. Rows are taken once, in order."""


@dataclass(frozen=True, eq=False)
class Feed:
    """Where a loop takes parts of a get from (kvstore.loops_numba.land). descriptor: of the connection; head: what a part
    begins with, (2,) uint64; slots: addresses of the memory where blocks lie, (slots,) int64; taken: what says that a slot is
    free again, (slots, bytes) uint8; received: room for parts, (bytes,) uint8."""

    descriptor: int
    head: UInt64Array
    slots: Ints
    taken: Bytes
    received: Bytes


class Transfer(Protocol):
    """One put's or get's moves between a group's blocks and staging. Made in the calling thread, whose current stream
    has written the blocks or may still read them; belongs to the thread that then does the work."""

    ahead: bool
    """Whether the next blocks can be on their way while the last ones are written or hashed."""
    pending: int
    """Not 0 where something that was started may still touch the engine's blocks."""

    def gather(self, span: Span, staged: Staged) -> Gathered:
        """Start to sum the engine's blocks and to copy them to staged rows; slots past the valid tokens become zero."""

    def scatter(self, span: Span, staged: Staged) -> None:
        """Copy the first rows' valid tokens to the engine's blocks, and nothing past them. It may still go on when this
        returns: the buffer may be given back at once, the blocks be trusted after `block_checksums`."""

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        """Scatter, each slice taken from the address addresses[block, slice]; int64. Where the route is `direct`."""

    def land(self, span: Span, feed: Feed, filled: int) -> int:
        """Scatter what comes over a connection until that is no part, in one call without the interpreter's lock. Where the
        route is `direct`. filled: how many bytes of feed.received are; returns how many are then."""

    def checksum(self, span: Span) -> UInt64Array:
        """s of each slice of the engine's blocks, behind all that was started: (blocks, slices) uint64."""

    def block_checksums(self, span: Span, pool: StagingPool | None = None) -> UInt64Array:
        """c of each of the engine's blocks, behind all that was started: (blocks,) uint64. Nothing is pending then.

        pool: whose memory may be used; without one, some is allocated. Raises StagingMemoryError.
        """

    def finish(self) -> None:
        """Wait for all that was started."""


class Route(Protocol):
    """A group's way. Any thread may use it."""

    direct: bool
    """Whether scatter_from can take slices from wherever they lie in host memory."""
    part_bytes: int | None
    """Block bytes that are best staged, summed and hashed before the next ones; None: all of a batch."""
    buffer_key: Hashable
    """Routes of one key share their buffers."""
    get_bytes: int
    """Block bytes of a get that are best staged at a time."""

    def new_buffer(self, nbytes: int, memory: Bytes | None = None) -> Buffer:
        """A buffer for nbytes of blocks; memory: where on the host it shall lie, (nbytes,) uint8. Raises
        StagingMemoryError."""

    def stage(self, buffer: Buffer, blocks: int) -> Staged:
        """Room for this many blocks."""

    def begin_put(self) -> Transfer:
        """The moves of one put. Raises GraphCapture."""

    def begin_get(self) -> Transfer:
        """The moves of one get. Raises GraphCapture."""


class HostStaged:
    """Rows of a buffer."""

    def __init__(self, buffer: Buffer, blocks: int, block_bytes: int) -> None:
        self.bytes: Bytes = buffer.memory[: blocks * block_bytes].reshape(blocks, block_bytes)


class HostGathered:
    """Blocks that are summed and copied when they are taken: the parts then stay in a core's cache."""

    def __init__(self, path: HostPath, span: Span, staged: Staged) -> None:
        self._path, self._span, self._staged = path, span, staged

    def take(self, first: int, end: int) -> UInt64Array:
        span = self._span.take(np.arange(first, end))
        sums = self._path.checksum(span)
        self._path.gather(span, self._staged.bytes[first:end])
        return sums


class HostTransfer:
    """Moves that a HostPath makes in the calling thread, at once."""

    ahead = False
    pending = 0

    def __init__(self, path: HostPath, factors: UInt64Array) -> None:
        self._path, self._factors = path, factors

    def gather(self, span: Span, staged: Staged) -> HostGathered:
        return HostGathered(self._path, span, staged)

    def scatter(self, span: Span, staged: Staged) -> None:
        self._path.scatter(span, staged.bytes[: len(span)])

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        self._path.scatter_from(span, addresses)

    def land(self, span: Span, feed: Feed, filled: int) -> int:
        return self._path.land(span, feed.descriptor, feed.head, feed.slots, feed.taken, feed.received, filled)

    def checksum(self, span: Span) -> UInt64Array:
        return self._path.checksum(span)

    def block_checksums(self, span: Span, pool: StagingPool | None = None) -> UInt64Array:
        return weighted_sums(self.checksum(span), self._factors)

    def finish(self) -> None:
        """Nothing goes on by itself."""


class HostRoute:
    """The way of a group that a HostPath serves. ready: called in the calling thread before a transfer, waits until the
    group's memory can be read and written by any thread."""

    buffer_key: Hashable = "host"
    get_bytes = 0

    def __init__(self, path: HostPath, group: AnyGroup, ready: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.direct = path.direct
        self.part_bytes: int | None = CACHED_BYTES if path.direct else None
        self._block_bytes, self._factors, self._ready = group.block_bytes, group.factors, ready

    def new_buffer(self, nbytes: int, memory: Bytes | None = None) -> Buffer:
        return HostBuffer(nbytes, memory)

    def stage(self, buffer: Buffer, blocks: int) -> HostStaged:
        return HostStaged(buffer, blocks, self._block_bytes)

    def begin_put(self) -> Transfer:
        self._ready()
        return HostTransfer(self.path, self._factors)

    def begin_get(self) -> Transfer:
        return self.begin_put()
