"""The cut between an engine's memory and a shard's files: what puts and gets ask of storage, in this process
(kvstore.storing, kvstore.fetching) or in another (kvstore.remote)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array
from kvstore.counters import Counters, Refused
from kvstore.results import Bools, Rejection
from kvstore.shape import GroupShape
from kvstore.span import Span
from kvstore.staging import Buffer, Buffers
from kvstore.steps import Finer

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Outcomes = dict[int, str]
"""By a block's index: "stored", "present", or why it failed."""

NO_SEQUENCE: Final = bytes(8)
"""In the place of a sequence number, of a block that was put together from several records."""


class Unavailable(Exception):
    """Storage cannot be asked, or did not answer in time: gets miss, puts fail. Never leaves the store."""


@dataclass(frozen=True, eq=False)
class Question:
    """Consecutive blocks of one request. start: the first one's position; valid: valid tokens of each, (blocks,) int64;
    parent: the hash before the first; finer: hashes within blocks, where the engine has them."""

    shape: GroupShape
    hashes: list[bytes]
    start: int
    valid: Ints
    parent: bytes | None = None
    finer: Finer | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    @cached_property
    def keys(self) -> list[bytes]:
        """The blocks' index keys."""
        return self.shape.keys(self.hashes)

    @cached_property
    def steps(self) -> Finer:
        """The hashes at most places that the engine has."""
        return self.finer or Finer(self.shape.block_size, self.hashes)

    def span(self, indices: Sequence[int]) -> Span:
        """The chosen blocks, as rows of staging memory."""
        at = np.asarray(indices, np.int64)
        return Span(self.start, at, (self.start + at) * self.shape.block_size, self.valid[at])


class Memory(Protocol):
    """A staging buffer as storage knows it."""

    memory: Bytes
    """(nbytes,) uint8."""


class Batch(Protocol):
    """One transaction's blocks."""

    def stage(self, first: int, end: int, sums: UInt64Array) -> None:
        """The staged rows first to end - 1 are complete. sums: s of each slice, from the engine's blocks before they were
        copied, (rows, slices) uint64."""

    def write(self, last: bool) -> Callable[[], Outcomes]:
        """Begin to write what was staged; last: nothing follows. What this returns waits for the end, and tells what became
        of the blocks. Raises Unavailable, both."""


class Putting(Protocol):
    """Storage's side of one put. Belongs to the calling thread."""

    overlaps: bool
    """Whether a batch is best staged while the one before is written."""
    whole: bool
    """Whether a batch is best staged in one piece."""

    @property
    def owed(self) -> int:
        """Not 0 where storage may still read a buffer that a batch named."""

    buffers: Buffers
    """Memory that storage can read. Of no use before `begin`."""
    held: dict[Any, Any]
    token: object
    """What the call holds is given back by taking its token out of `held`, which is one step: see Environment.enter."""

    def begin(self) -> Outcomes:
        """Which blocks need not or will not be written. Raises Unavailable."""

    def batch(self, indices: Sequence[int], buffer: Memory) -> Batch:
        """A transaction of these blocks, whose rows lie in a buffer in this order."""

    def settle(self) -> None:
        """Wait until no transaction reads a buffer, whatever signals raise meanwhile, as long as storage answers."""

    def end(self, stored: Bools) -> None:
        """All is written. stored: which blocks were. Not called where the put is cut short."""


class Sink(Protocol):
    """Where blocks go that were read."""

    direct: bool
    """Whether `scatter_from` serves."""
    room: int
    """Block bytes that one `fill` may bring."""

    def scatter_from(self, indices: Sequence[int], addresses: Ints) -> None:
        """Copy blocks to the engine's, each slice from the address addresses[block, slice]; int64."""

    def fill(self, blocks: int, decode: Callable[[Bytes], Sequence[int]]) -> None:
        """Have `decode` fill the first of so many rows, (blocks, block bytes), with the blocks whose indices it returns, and
        copy those to the engine's. Raises Unavailable."""


class EngineSink(Sink, Protocol):
    """A sink in the engine's process, for storage that is not."""

    block_bytes: int

    def borrow(self) -> Sequence[Buffer]:
        """Buffers of `room` bytes each, one or more, until the get is over. Raises Unavailable."""

    def scatter(self, indices: Sequence[int], buffer: Buffer) -> None:
        """Copy the blocks that lie in a buffer's first rows to the engine's; the buffer may be written again then."""

    def land(self, feed: Any, filled: int) -> int:
        """Copy what comes over a connection to the engine's blocks (kvstore.route.Transfer.land). Where `direct`."""


class Doubt(NamedTuple):
    """What became of a record whose bytes in the engine's cache do not have its checksum. detail: a sentence, empty where
    the record is intact; condemned: whether it is to blame; sums: of an intact one, s of each slice."""

    detail: str
    condemned: bool
    sums: UInt64Array | None


class Getting(Protocol):
    """Storage's side of one get. Belongs to the calling thread."""

    tagged: dict[int, int]
    """Of the blocks that went to the sink, by index: the stored checksum, under its tag."""
    joint: dict[int, int]
    """Blocks that were stored as one, by the last one's index: how many. `tagged` has their common checksum there, and 0 for
    the others."""
    missing: set[int]
    rejected: dict[int, Rejection]

    @property
    def owed(self) -> int:
        """Not 0 where storage may still write to the sink's buffers."""

    buffers: Buffers
    """Memory that storage can write to. Of no use before `begin`."""
    held: dict[Any, Any]
    token: object
    """As Putting's."""

    def begin(self) -> None:
        """Raises Unavailable."""

    def read(self, sink: EngineSink) -> None:
        """Bring every block that is here and intact to the sink; the others are missing or rejected then. Raises
        Unavailable."""

    def doubt(self, expected: Mapping[int, int]) -> dict[int, Doubt]:
        """Read blocks again that went to the sink, by index and the checksum that they should have. Raises Unavailable."""

    def refuse(self, rejections: Mapping[int, Rejection]) -> None:
        """Make blocks that went to the sink misses, and condemn their records where they are to blame."""


class Storage(Protocol):
    """One shard. Any thread may call it, inside a call that has entered."""

    calls: set[object]
    """Tokens of the calls in flight: each leaves by discarding its own, in one step."""
    counters: Counters
    refused: Refused
    emptied: bool
    """Whether opening emptied the shard."""

    @property
    def process_id(self) -> int | None:
        """Of the process that has the shard open for this one; None where this one has, or none does."""

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the shard."""

    def check_open(self) -> None:
        """Raise StoreForked in the child of a fork, StoreClosed after close."""

    def enter(self, token: object) -> None:
        """Hold the shard open for a call. Raises StoreClosed or StoreForked."""

    def put(self, question: Question) -> Putting:
        """A put that has not begun."""

    def get(self, question: Question) -> Getting:
        """A get that has not begun."""

    def match(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> int:
        """How many leading blocks are here, from position 0. finer: as a question's. Raises Unavailable."""

    def present(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> Bools:
        """Which blocks are here, from position 0, (blocks,) bool. Raises Unavailable."""

    def touch(self, shape: GroupShape, hashes: list[bytes]) -> None:
        """A request came that wants these blocks, from position 0. Raises Unavailable."""

    def evict(self, blocks: int) -> int:
        """Evict so many, of a shard with a policy; how many went. Raises StorePathError, Unavailable."""

    def clear(self) -> int:
        """Delete every record; how many there were. Raises StorePathError, Unavailable."""

    def usage(self) -> dict[str, int]:
        """Figures of the shard. Raises Unavailable."""

    def close(self) -> None:
        """Wait for calls in flight, sync, and give the shard up. Raises StoreBusy, StorePathError."""
