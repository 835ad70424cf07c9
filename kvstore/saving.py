"""put: blocks from the engine's cache to the shard."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.blockdb import IDENTITY_PREFIX, NewRecord, Victim
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.codec import CODECS
from kvstore.eviction_types import Chain, Touches
from kvstore.record import Directory, Header, parse_header
from kvstore.results import PutResult
from kvstore.route import Gathered, Staged, Transfer
from kvstore.shard import GroupView, Shard
from kvstore.space import estimated_bytes, record_bytes
from kvstore.span import Span
from kvstore.staging import Buffer, StagingPool

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

EVICTION_ATTEMPTS: Final = 3
MICROSECONDS: Final = 1_000_000
READER_PATIENCE_S: Final = 0.5
POLL_SECONDS: Final = 0.005
FULL: Final = {"store_full", "reader_holds_space"}


@dataclass(frozen=True, eq=False)
class Started:
    """One transaction's blocks, by their indices in the call, on their way to a buffer."""

    indices: npt.NDArray[np.int64]
    span: Span
    buffer: Buffer
    staged: Staged
    gathered: Gathered


@dataclass(frozen=True, eq=False)
class Ready:
    """One transaction's records, by their blocks' indices."""

    started: Started
    records: dict[int, NewRecord]


@dataclass(frozen=True, eq=False)
class Writing:
    """One transaction that is being written. result: of its records, by index: "stored", "present" or why it failed."""

    started: Started
    result: Future[dict[int, str]]

    def outcomes(self) -> dict[int, str]:
        """What became of its blocks, once it has ended."""
        return dict.fromkeys(self.started.indices.tolist(), "source_changed") | self.result.result()

    @property
    def found_no_room(self) -> bool:
        """Whether the store is full for all of its records."""
        return bool(self.result.result()) and set(self.result.result().values()) <= FULL

    @property
    def reason(self) -> str:
        """The reason of the first record."""
        return next(iter(self.result.result().values()))


@dataclass(eq=False)
class Save:
    """One put_blocks call. Belongs to the calling thread.

    The content checksum is a pass over the engine's blocks by the caller's ids. Staging is summed before the
    commit and must agree slice by slice: a wrong gather, or a source that changed meanwhile, fails that block.
    """

    shard: Shard
    view: GroupView
    transfer: Transfer
    keys: list[bytes]
    hashes: list[bytes]
    span: Span
    parent: bytes | None
    victims: list[Victim] = field(default_factory=list)
    """What is still to be evicted for this put, in order."""
    meanwhile: bool = False
    """Whether the writer's thread was given a transaction of this put."""

    def run(self) -> PutResult:
        """Store what is not present, in transactions of bounded size."""
        keeper, pool, borrower, done = self.shard.keeper, self.shard.staging(self.view, "put"), object(), False
        count, outcomes = len(self.span), dict[int, str]()
        # Each way out gives one thing back in one step: a signal that comes with one does not keep the next from running.
        try:
            try:
                if keeper is not None:
                    keeper.pins[borrower] = self.chain
                self._put(pool, borrower, outcomes)
                done = True
            finally:
                if keeper is not None:
                    # What was written before an exception is not told below.
                    keeper.doubtful |= not done
                    keeper.pins.pop(borrower, None)
        finally:
            try:
                if self.transfer.pending:
                    self.transfer.finish()
            finally:
                pool.borrowed.pop(borrower, None)
        stored = np.array([outcomes[i] == "stored" for i in range(count)], bool)
        present = np.array([outcomes[i] == "present" for i in range(count)], bool)
        failed = {i: outcomes[i] for i in range(count) if not (stored[i] or present[i])}
        if keeper is not None:
            keeper.written(self.chain, stored, self.cost)
        self._count(stored, present, failed)
        return PutResult(stored, present, failed)

    def _put(self, pool: StagingPool, borrower: object, outcomes: dict[int, str]) -> None:
        present = self._present()
        outcomes |= dict.fromkeys(np.flatnonzero(present).tolist(), "present")
        admitted = self._admit(~present)
        outcomes |= dict.fromkeys(np.flatnonzero(~present & ~admitted).tolist(), "not_admitted")
        self._save(np.flatnonzero(admitted), pool, borrower, outcomes)

    @cached_property
    def chain(self) -> Chain:
        """The blocks as the eviction policy knows them."""
        keeper = self.shard.keeper
        assert keeper is not None
        return keeper.chain(self.view.prefix, self.hashes, self.span.start, self.parent)

    @property
    def cost(self) -> int:
        """Bytes of the file that a record takes, before compression."""
        return estimated_bytes(self.view.plan.raw_length)

    def _admit(self, absent: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which absent blocks to write; decided for all of a call before the first is written."""
        keeper = self.shard.keeper
        if keeper is None:
            return absent
        try:
            admitted, victims = keeper.admit(self.chain, absent, self.cost, self.spare)
        except lmdb.Error:
            log.exception("%s: put could not ask for the room that is left, and tries", self.shard.db.folder)
            return absent
        self.victims.extend(keeper.named(victims))
        return admitted

    @property
    def spare(self) -> int:
        """Bytes that eviction keeps free."""
        return self.shard.config.spare_bytes

    def _present(self) -> npt.NDArray[np.bool_]:
        try:
            with self.shard.db.read() as snapshot:
                values = [snapshot.header(key) for key in self.keys]
        except lmdb.Error:
            log.exception("%s: put could not look its keys up, and writes them", self.shard.db.folder)
            return np.zeros(len(self.span), bool)
        return np.array([v is not None and self._keeps(i, v) for i, v in enumerate(values)], bool)

    def _keeps(self, index: int, value: bytes) -> bool:
        """Whether the index entry already answers for this block, so that nothing need be written."""
        key = self.keys[index]
        header = parse_header(value, key)
        return (
            isinstance(header, Header)
            and header.codec in CODECS
            and not self.shard.refused.holds(key, value)
            and header.valid_tokens == self.span.valid[index]
            and self.view.misfit(header, self.span.start + index) is None
        )

    def _save(self, todo: npt.NDArray[np.int64], pool: StagingPool, borrower: object, outcomes: dict[int, str]) -> None:
        """Store blocks, a transaction at a time. While one is being written the next is gathered, summed and hashed, as
        far as buffers are free. Nothing is tried any more once a whole transaction found the store full."""
        step = pool.nbytes // self.view.plan.raw_length
        batches = deque(todo[first : first + step] for first in range(0, todo.size, step))
        waiting, ready, writing = deque[Started](), deque[Ready](), deque[Writing]()
        try:
            while batches or waiting or ready or writing:
                idle = not (waiting or ready or writing)
                buffer = self._free_buffer(pool, borrower, idle, bool(waiting)) if batches else None
                if buffer is not None:
                    waiting.append(self._start(batches.popleft(), buffer))
                elif waiting and not ready:
                    ready.append(self._make_ready(waiting.popleft()))
                elif ready and not writing:
                    writing.append(self._begin_write(ready.popleft(), last=not (batches or waiting)))
                else:
                    ended = writing.popleft()
                    outcomes |= ended.outcomes()
                    pool.give_back(borrower, ended.started.buffer)
                    if ended.found_no_room:
                        outcomes |= dict.fromkeys((i for i in todo.tolist() if i not in outcomes), ended.reason)
                        return
        finally:
            # Whatever happens, no transaction may still read a buffer that is given back.
            if self.meanwhile:
                self.shard.wait_for_writer()

    def _free_buffer(self, pool: StagingPool, borrower: object, idle: bool, gathering: bool) -> Buffer | None:
        """A buffer for the next transaction's blocks, where they can be on their way already; the first is waited for."""
        if idle:
            return pool.borrow(borrower)
        if self.transfer.ahead or (self.shard.config.sync and not gathering):
            return pool.try_borrow(borrower)
        return None

    def _start(self, indices: npt.NDArray[np.int64], buffer: Buffer) -> Started:
        span, staged = self.span.take(indices), self.view.route.stage(buffer, indices.size)
        return Started(indices, span, buffer, staged, self.transfer.gather(span, staged))

    def _begin_write(self, ready: Ready, last: bool) -> Writing:
        """Write records, in the shard's own thread where that waits for a disk and there is something to do meanwhile."""
        if self.shard.config.sync and not last:
            self.meanwhile = True
            meanwhile = self.shard.write_meanwhile(self._write, ready.records)
            if meanwhile is not None:
                return Writing(ready.started, meanwhile)
        done: Future[dict[int, str]] = Future()
        done.set_result(self._write(ready.records))
        return Writing(ready.started, done)

    def _make_ready(self, started: Started) -> Ready:
        """The records of one transaction's blocks, without those whose bytes do not sum to their source's."""
        count, records = started.indices.size, dict[int, NewRecord]()
        part_bytes = self.view.route.part_bytes
        step = count if part_bytes is None else max(1, part_bytes // self.view.plan.raw_length)
        for first in range(0, count, step):
            records |= self._stage(started, first, min(first + step, count))
        return Ready(started, records)

    def _stage(self, started: Started, first: int, end: int) -> dict[int, NewRecord]:
        """Records of the staged blocks first to end - 1; left out are those whose bytes do not sum to their source's."""
        sums = started.gathered.take(first, end)
        span, staging = started.span.take(np.arange(first, end)), started.staged.bytes[first:end]
        agree = (sums == self.view.route.staging_checksum(span, staging)).all(axis=1)
        indices = started.indices[first:end].tolist()
        tags = self.view.tags([self.hashes[i] for i in indices])
        tagged = (weighted_sums(sums, self.view.group.factors) ^ tags).tolist()
        rows = np.flatnonzero(agree).tolist()
        return {indices[r]: self._record(indices[r], staging[r], sums[r], tagged[r]) for r in rows}

    def _record(self, index: int, raw: Bytes, sums: UInt64Array, tagged: int) -> NewRecord:
        plan, codec = self.view.plan, self.shard.codec
        chunks = [codec.encode(raw[a:b]) for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]
        lengths = np.array([len(chunk) for chunk in chunks], np.int64)
        hashes = np.array([xxh3_64_intdigest(chunk) for chunk in chunks], np.uint64)
        directory = Directory(sums, lengths, hashes).encode()
        parent = self.hashes[index - 1] if index else self.parent
        header = Header(
            codec=codec.number,
            block_size=self.view.group.block_size,
            raw_length=plan.raw_length,
            stored_length=int(lengths.sum()) + len(directory),
            position=self.span.start + index,
            valid_tokens=int(self.span.valid[index]),
            fingerprint=self.view.fingerprint,
            tagged_checksum=tagged,
            directory_length=len(directory),
            directory_hash=xxh3_64_intdigest(directory),
            key=self.keys[index],
            parent=parent or b"",
            geometry=self.view.geometry,
            **self._remembered(index),
        )
        return NewRecord(header, directory, chunks)

    def _remembered(self, index: int) -> dict[str, int]:
        """What eviction keeps in a record: last touch, accesses, class."""
        touches = self._touches
        if touches is None:
            return {}
        return {
            "last_touch": max(1, min(int(touches.times[index] * MICROSECONDS), 2**63)),
            "accesses": max(1, min(int(touches.counts[index]), 2**32 - 1)),
            "eviction_class": max(0, min(int(touches.classes[index]), 255)),
        }

    @cached_property
    def _touches(self) -> Touches | None:
        keeper = self.shard.keeper
        return None if keeper is None else keeper.touches(self.chain)

    def _write(self, records: dict[int, NewRecord]) -> dict[int, str]:
        """Write in one transaction, or one by one where that is too much for the room that is left."""
        try:
            return self._write_with_room(records)
        except lmdb.MapFullError:
            pass
        except (lmdb.Error, OSError, OverflowError) as error:
            reason = self._why(records)
            log.error("%s: %d blocks not stored: %s: %s", self.shard.db.folder, len(records), reason, error)
            return dict.fromkeys(records, reason)
        full = self._no_room()
        outcomes = dict.fromkeys(records, full)
        for index, record in records.items() if len(records) > 1 else ():
            outcomes |= self._write({index: record})
            if outcomes[index] == full:
                break
        return outcomes

    def _no_room(self) -> str:
        try:
            return "reader_holds_space" if self.shard.db.reader_holds_space() else "store_full"
        except lmdb.Error:
            return "store_full"

    def _write_with_room(self, records: dict[int, NewRecord]) -> dict[int, str]:
        """Write in one transaction; where there is no room, or none in one piece, evict and try again."""
        for attempt in range(EVICTION_ATTEMPTS):
            try:
                return self._commit(records)
            except lmdb.MapFullError:
                if not self._make_room(records, 2**attempt):
                    raise
        return self._commit(records)

    def _make_room(self, records: dict[int, NewRecord], times: int) -> bool:
        """Evict so many times what the records take; False where that would bring nothing."""
        keeper, db = self.shard.keeper, self.shard.db
        if keeper is None or self._held():
            return False
        needed = times * sum(map(record_cost, records.values()))
        victims = [*self.victims, *keeper.named(keeper.victims(needed))]
        evicted, tried = db.evict(victims, db.free_bytes() + needed)
        self.victims.clear()
        self.shard.gone(evicted, victims[:tried])
        return bool(evicted)

    def _held(self) -> bool:
        """Whether a reader keeps freed pages, also after a while: loads of this process end soon."""
        deadline = time.monotonic() + READER_PATIENCE_S
        while self.shard.db.reader_holds_space():
            if time.monotonic() > deadline:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _commit(self, records: dict[int, NewRecord]) -> dict[int, str]:
        if not records:
            return {}
        index_of, keeper = {self.keys[i]: i for i in records}, self.shard.keeper
        learned = keeper.note() if keeper is not None else {}
        written = self.shard.db.write(
            list(records.values()),
            {IDENTITY_PREFIX + self.shard.identity_id: self.shard.identity_json} | learned,
            lambda key, old: self._keeps(index_of[key], old),
            self.victims,
            self.spare,
        )
        if keeper is not None and learned:
            keeper.noted()
        self.shard.gone(written.evicted, self.victims[: written.tried])
        del self.victims[: written.tried]
        for index, new in zip(records, written.stored, strict=True):
            if new:
                self.shard.refused.discard(self.keys[index])
        return {i: "stored" if new else "present" for i, new in zip(records, written.stored, strict=True)}

    def _why(self, records: dict[int, NewRecord]) -> str:
        """LMDB does not say that a disk is full; the file system does."""
        try:
            disk = os.statvfs(self.shard.db.folder)
        except OSError:
            return "io_error"
        needed = sum(record.header.stored_length for record in records.values())
        return "disk_full" if disk.f_bavail * disk.f_frsize < 2 * needed else "io_error"

    def _count(self, stored: npt.NDArray[np.bool_], present: npt.NDArray[np.bool_], failed: dict[int, str]) -> None:
        counters = self.shard.counters
        counters.add("put_stored", int(stored.sum()))
        counters.add("put_present", int(present.sum()))
        counters.add("put_bytes", int(stored.sum()) * self.view.plan.raw_length)
        for reason in failed.values():
            counters.add(f"put_failed_{reason}")


def record_cost(record: NewRecord) -> int:
    """Bytes of the file that a record takes."""
    return record_bytes(len(record.header.key) + 2000, [len(record.directory), *map(len, record.chunks)])
