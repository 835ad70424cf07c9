"""get: blocks from storage to the engine's cache, verified where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array
from kvstore.front import Front
from kvstore.results import GetResult, Rejection
from kvstore.route import Feed, Transfer
from kvstore.span import Span
from kvstore.staging import Buffer, BuffersBusy, StagingPool
from kvstore.storage import Doubt, Getting, Question, Unavailable
from kvstore.views import GroupView

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Landing:
    """An EngineSink: the engine's blocks, and the buffers that lead there. Belongs to one get."""

    def __init__(self, load: Load, getting: Getting) -> None:
        self._load, self._getting = load, getting
        self.pool = load.front.staging(load.view, "get", getting.buffers)
        self.direct, self.room = load.view.route.direct, self.pool.nbytes
        self.block_bytes = load.view.block_bytes

    def scatter_from(self, indices: Sequence[int], addresses: Ints) -> None:
        self._load.transfer.scatter_from(self._load.span.take(indices), addresses)

    def fill(self, blocks: int, decode: Callable[[Bytes], Sequence[int]]) -> None:
        borrower = object()
        try:
            buffer = self.pool.borrow(borrower, self._load.front.config.io_timeout_s)
            staged = self._load.view.route.stage(buffer, blocks)
            if indices := decode(staged.bytes):
                self._load.transfer.scatter(self._load.span.take(indices), staged)
        finally:
            self.pool.borrowed.pop(borrower, None)

    def borrow(self) -> Sequence[Buffer]:
        first = self.pool.borrow(self._getting, self._load.front.config.io_timeout_s)
        second = self.pool.try_borrow(self._getting)
        return [first] if second is None else [first, second]

    def scatter(self, indices: Sequence[int], buffer: Buffer) -> None:
        staged = self._load.view.route.stage(buffer, len(indices))
        self._load.transfer.scatter(self._load.span.take(indices), staged)
        buffer.ready()

    def land(self, feed: Feed, filled: int) -> int:
        return self._load.transfer.land(self._load.span, feed, filled)


@dataclass(eq=False)
class Load:
    """One get_blocks call. Belongs to the calling thread.

    Only when the last byte of the call has landed are the engine's blocks summed, by the caller's ids, so that a copy
    that went into another block's place cannot follow that block's check.
    """

    front: Front
    view: GroupView
    transfer: Transfer
    question: Question
    span: Span
    rejected: dict[int, Rejection] = field(default_factory=dict)

    def run(self) -> GetResult:
        """Load, then verify; everything that is not verified is missing or rejected."""
        verified, getting = np.zeros(len(self.question), bool), self.front.storage.get(self.question)
        if self.front.breaker.off():
            return self._result(verified, {})
        pool: StagingPool | None = None
        try:
            try:
                getting.begin()
                landing = Landing(self, getting)
                pool = landing.pool
                getting.read(landing)
                # Verification borrows one of its own.
                pool.borrowed.pop(getting, None)
                verified[self._verify(getting, pool)] = True
            except (Unavailable, BuffersBusy) as error:
                self.front.counters.add("get_unavailable")
                self.front.complain(f"a get misses: {error}")
            finally:
                if self.transfer.pending:
                    self.transfer.finish()
        finally:
            try:
                if pool is not None and not getting.owed:
                    pool.borrowed.pop(getting, None)
            finally:
                getting.held.pop(getting.token, None)
        return self._result(verified, {**getting.rejected, **self.rejected})

    def _result(self, verified: npt.NDArray[np.bool_], rejected: dict[int, Rejection]) -> GetResult:
        missing = ~verified
        missing[list(rejected)] = False
        counters = self.front.counters
        counters.add("get_verified", int(verified.sum()))
        counters.add("get_missing", int(missing.sum()))
        counters.add("get_bytes", int(verified.sum()) * self.view.block_bytes)
        self.front.breaker.rejected(len(rejected))
        return GetResult(verified, missing, dict(sorted(rejected.items())))

    def _verify(self, getting: Getting, pool: StagingPool) -> list[int]:
        """Sum what lies in the engine's blocks, by the caller's ids; the indices that match."""
        indices = sorted(getting.tagged)
        if not indices:
            return []
        sums = self.transfer.block_checksums(self.span.take(indices), pool)
        expected = self._expected(getting, indices)
        _join(indices, getting.joint, sums, expected)
        good = sums == expected
        if not good.all():
            self._judge(getting, {indices[row]: int(expected[row]) for row in np.flatnonzero(~good).tolist()})
        return [index for index, match in zip(indices, good.tolist(), strict=True) if match]

    def _expected(self, getting: Getting, indices: list[int]) -> UInt64Array:
        """The content checksums under the tags of the hashes that were asked for."""
        stored = np.array([getting.tagged[i] for i in indices], np.uint64)
        return stored ^ self.view.shape.tags([self.question.hashes[i] for i in indices])

    def _judge(self, getting: Getting, expected: Mapping[int, int]) -> None:
        """Tell bad records from a bad way, and refuse what did not arrive."""
        try:
            doubts = getting.doubt(expected)
        except Unavailable as error:
            doubts = {index: Doubt(f"the record could not be read again: {error}", False, None) for index in expected}
        self.rejected |= {index: self._rejection(index, doubt) for index, doubt in doubts.items()}
        getting.refuse({index: self.rejected[index] for index in doubts})

    def _rejection(self, index: int, doubt: Doubt) -> Rejection:
        if doubt.sums is None:
            return Rejection("content", doubt.detail, doubt.condemned)
        astray = np.flatnonzero(doubt.sums != self.transfer.checksum(self.span.take([index]))[0])
        if not astray.size:
            detail = "the record is intact, and so are the engine's blocks by now: they changed while they were checked"
            return Rejection("content", detail)
        return Rejection(
            "content",
            f"the record is intact; {astray.size} slices went astray on the way to the engine's blocks, the first "
            f"{self.view.shape.slices[int(astray[0])]}",
        )


def _join(indices: list[int], joint: Mapping[int, int], sums: UInt64Array, expected: UInt64Array) -> None:
    """Let blocks that were stored as one stand and fall together: their checksum is that of all their tokens."""
    rows = {index: row for row, index in enumerate(indices)}
    for last, count in joint.items():
        run = [rows[index] for index in range(last + 1 - count, last + 1)]
        sums[run] = sums[run].sum(dtype=np.uint64)
        expected[run] = expected[run[-1]]
