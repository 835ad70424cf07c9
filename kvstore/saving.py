"""put: blocks from the engine's cache to the shard."""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.blockdb import NewRecord
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.codec import CODECS
from kvstore.record import Directory, Header, parse_header
from kvstore.results import PutResult
from kvstore.route import Gathered, Staged, Transfer
from kvstore.shard import GroupView, Shard
from kvstore.span import Span
from kvstore.staging import STAGING_BUFFERS, Buffer, StagingPool

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Started:
    """One transaction's blocks, by their indices in the call, on their way to a buffer."""

    indices: npt.NDArray[np.int64]
    span: Span
    buffer: Buffer
    staged: Staged
    gathered: Gathered


@dataclass(frozen=True, eq=False)
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

    def run(self) -> PutResult:
        """Store what is not present, in transactions of bounded size."""
        count, present = len(self.span), self._present()
        outcomes = dict.fromkeys(np.flatnonzero(present).tolist(), "present")
        pool, borrower = self.shard.staging(self.view, "put"), object()
        try:
            self._save(np.flatnonzero(~present), pool, borrower, outcomes)
        finally:
            if self.transfer.pending:
                self.transfer.finish()
            pool.borrowed.pop(borrower, None)
        stored = np.array([outcomes[i] == "stored" for i in range(count)], bool)
        present = np.array([outcomes[i] == "present" for i in range(count)], bool)
        failed = {i: outcomes[i] for i in range(count) if not (stored[i] or present[i])}
        self._count(stored, present, failed)
        return PutResult(stored, present, failed)

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
        """Store blocks, a transaction at a time, the next one's being gathered meanwhile where the transfer can do that
        and a buffer is free. Nothing is tried any more once a whole transaction found the store full."""
        step, waiting = pool.nbytes // self.view.plan.raw_length, deque[Started]()
        batches = deque(todo[first : first + step] for first in range(0, todo.size, step))
        outcomes |= dict.fromkeys(todo.tolist(), "store_full")
        while batches or waiting:
            buffer = None
            if batches and not waiting:
                buffer = pool.borrow(borrower)
            elif batches and self.transfer.ahead and len(waiting) < STAGING_BUFFERS:
                buffer = pool.try_borrow(borrower)
            if buffer is not None:
                waiting.append(self._start(batches.popleft(), buffer))
                continue
            started = waiting.popleft()
            found = self._finish(started)
            pool.give_back(borrower, started.buffer)
            outcomes |= found
            if set(found.values()) == {"store_full"}:
                return

    def _start(self, indices: npt.NDArray[np.int64], buffer: Buffer) -> Started:
        span, staged = self.span.take(indices), self.view.route.stage(buffer, indices.size)
        return Started(indices, span, buffer, staged, self.transfer.gather(span, staged))

    def _finish(self, started: Started) -> dict[int, str]:
        """Store one transaction's blocks: {index: "stored", "present" or the reason of a failure}."""
        count, records = started.indices.size, dict[int, NewRecord]()
        part_bytes = self.view.route.part_bytes
        step = count if part_bytes is None else max(1, part_bytes // self.view.plan.raw_length)
        for first in range(0, count, step):
            records |= self._stage(started, first, min(first + step, count))
        return dict.fromkeys(started.indices.tolist(), "source_changed") | self._write(records)

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
        )
        return NewRecord(header, directory, chunks)

    def _write(self, records: dict[int, NewRecord]) -> dict[int, str]:
        """Write in one transaction, or one by one where that is too much for the room that is left."""
        try:
            return self._commit(records)
        except lmdb.MapFullError:
            pass
        except (lmdb.Error, OSError, OverflowError) as error:
            reason = self._why(records)
            log.error("%s: %d blocks not stored: %s: %s", self.shard.db.folder, len(records), reason, error)
            return dict.fromkeys(records, reason)
        outcomes = dict.fromkeys(records, "store_full")
        for index, record in records.items() if len(records) > 1 else ():
            outcomes |= self._write({index: record})
            if outcomes[index] == "store_full":
                break
        return outcomes

    def _commit(self, records: dict[int, NewRecord]) -> dict[int, str]:
        if not records:
            return {}
        index_of = {self.keys[i]: i for i in records}
        identity = (self.shard.identity_id, self.shard.identity_json)
        written = self.shard.db.write(
            list(records.values()), identity, lambda key, old: self._keeps(index_of[key], old)
        )
        for index, new in zip(records, written, strict=True):
            if new:
                self.shard.refused.discard(self.keys[index])
        return {i: "stored" if new else "present" for i, new in zip(records, written, strict=True)}

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
