"""put: blocks from the engine's cache to staging memory, from where storage writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.front import Front
from kvstore.results import PutResult
from kvstore.route import Gathered, Staged, Transfer
from kvstore.span import Span
from kvstore.staging import Buffer, BuffersBusy, StagingPool
from kvstore.storage import Batch, Outcomes, Putting, Question, Unavailable
from kvstore.views import GroupPart

FULL = {"store_full", "reader_holds_space"}


@dataclass(frozen=True, eq=False)
class Started:
    """One transaction's blocks, by their indices in the call, on their way to a buffer."""

    indices: npt.NDArray[np.int64]
    buffer: Buffer
    staged: Staged
    gathered: Gathered


@dataclass(frozen=True, eq=False)
class Ready:
    """One transaction's blocks, staged."""

    started: Started
    batch: Batch


@dataclass(frozen=True, eq=False)
class Writing:
    """One transaction that is being written. ended: waits, and tells what became of its blocks."""

    buffer: Buffer
    ended: Callable[[], Outcomes]


@dataclass(eq=False)
class Save:
    """One put_blocks call. Belongs to the calling thread.

    The content checksum is a pass over the engine's blocks by the caller's ids. Storage sums what was staged before it
    commits, and both must agree slice by slice.
    """

    front: Front
    view: GroupPart
    transfer: Transfer
    question: Question
    span: Span

    def run(self) -> PutResult:
        """Store what is not present, in transactions of bounded size."""
        putting, outcomes = self.front.storage.put(self.question), Outcomes()
        pool: StagingPool | None = None
        # Each way out gives one thing back in one step: a signal that comes with one does not keep the next from running.
        try:
            try:
                try:
                    outcomes |= putting.begin()
                    pool = self.front.staging(self.view, "put", putting.buffers)
                    self._save(putting, pool, outcomes)
                except (Unavailable, BuffersBusy) as error:
                    self._give_up(error, outcomes)
                result = self._result(outcomes)
                putting.end(result.stored)
            finally:
                if self.transfer.pending:
                    self.transfer.finish()
        finally:
            try:
                if pool is not None and not putting.owed:
                    pool.borrowed.pop(putting, None)
            finally:
                putting.held.pop(putting.token, None)
        return result

    def refuse(self) -> PutResult:
        """Store nothing: too many puts wait already."""
        return self._result(dict.fromkeys(range(len(self.question)), "backpressure"))

    def _give_up(self, error: Exception, outcomes: Outcomes) -> None:
        """Whatever is not known to be stored has failed."""
        reason = "backpressure" if isinstance(error, BuffersBusy) else "io_process"
        left = [i for i in range(len(self.question)) if i not in outcomes]
        outcomes |= dict.fromkeys(left, reason)
        self.front.complain(f"{len(left)} blocks not stored: {reason}: {error}")

    def _result(self, outcomes: Outcomes) -> PutResult:
        known = [outcomes[i] for i in range(len(self.question))]
        stored, present = (
            np.array([o == "stored" for o in known], bool),
            np.array([o == "present" for o in known], bool),
        )
        result = PutResult(stored, present, {i: o for i, o in enumerate(known) if not (stored[i] or present[i])})
        count_put(self.front, result, self.view.block_bytes)
        return result

    def _save(self, putting: Putting, pool: StagingPool, outcomes: Outcomes) -> None:
        """Store blocks, a transaction at a time. While one is being written the next is staged, as far as buffers are
        free. Nothing is tried any more once a whole transaction found the store full."""
        todo = np.array([i for i in range(len(self.question)) if i not in outcomes], np.int64)
        step = pool.nbytes // self.view.block_bytes
        batches = deque(todo[first : first + step] for first in range(0, todo.size, step))
        waiting, ready, writing = deque[Started](), deque[Ready](), deque[Writing]()
        try:
            while batches or waiting or ready or writing:
                idle = not (waiting or ready or writing)
                buffer = self._free_buffer(putting, pool, idle, bool(waiting)) if batches else None
                if buffer is not None:
                    waiting.append(self._start(batches.popleft(), buffer))
                elif waiting and not ready:
                    ready.append(self._make_ready(putting, waiting.popleft()))
                elif ready and not writing:
                    next_one = ready.popleft()
                    last = not (batches or waiting)
                    writing.append(Writing(next_one.started.buffer, next_one.batch.write(last)))
                else:
                    ended = writing.popleft()
                    written = ended.ended()
                    outcomes |= written
                    pool.give_back(putting, ended.buffer)
                    tried = {o for o in written.values() if o != "source_changed"}
                    if tried and tried <= FULL:
                        outcomes |= dict.fromkeys((i for i in todo.tolist() if i not in outcomes), tried.pop())
                        return
        finally:
            # Whatever happens, no transaction may still read a buffer that is given back.
            putting.settle()

    def _free_buffer(self, putting: Putting, pool: StagingPool, idle: bool, gathering: bool) -> Buffer | None:
        """A buffer for the next transaction's blocks, where they can be on their way already; the first is waited for."""
        if idle:
            return pool.borrow(putting, self.front.config.io_timeout_s)
        if self.transfer.ahead or (putting.overlaps and not gathering):
            return pool.try_borrow(putting)
        return None

    def _start(self, indices: npt.NDArray[np.int64], buffer: Buffer) -> Started:
        span, staged = self.span.take(indices), self.view.route.stage(buffer, indices.size)
        return Started(indices, buffer, staged, self.transfer.gather(span, staged))

    def _make_ready(self, putting: Putting, started: Started) -> Ready:
        """Stage one transaction's blocks, a part at a time where that keeps them in a core's cache."""
        count, part_bytes = started.indices.size, self.view.route.part_bytes
        whole = putting.whole or part_bytes is None
        step = count if whole or part_bytes is None else max(1, part_bytes // self.view.block_bytes)
        batch = putting.batch(started.indices.tolist(), started.buffer)
        for first in range(0, count, step):
            end = min(first + step, count)
            batch.stage(first, end, started.gathered.take(first, end))
        return Ready(started, batch)


def count_put(front: Front, result: PutResult, block_bytes: int) -> None:
    """Count what became of a put's blocks."""
    stored = int(result.stored.sum())
    front.counters.add("put_stored", stored)
    front.counters.add("put_present", int(result.present.sum()))
    front.counters.add("put_bytes", stored * block_bytes)
    for reason in result.failed.values():
        front.counters.add(f"put_failed_{reason}")
