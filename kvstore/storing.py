"""A put's storage side: which blocks to write, their records, and the transactions that write them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.blockdb import IDENTITY_PREFIX, NewRecord, Victim
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.codec import CODECS
from kvstore.eviction_types import Chain, Touches
from kvstore.record import Directory, Header, parse_header
from kvstore.results import Bools
from kvstore.shard import Shard
from kvstore.space import estimated_bytes, record_bytes
from kvstore.staging import Buffers
from kvstore.storage import Memory, Outcomes, Question

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

EVICTION_ATTEMPTS: Final = 3
REPORTS_AT_ONCE: Final = 16
"""Records that a put looks at because readers refused them."""
MICROSECONDS: Final = 1_000_000
READER_PATIENCE_S: Final = 0.5
POLL_SECONDS: Final = 0.005


class RecordBatch:
    """One transaction's records. The content checksum comes from the engine's blocks; what was staged is summed here and
    must agree slice by slice, else that block fails: a wrong gather, or a source that changed meanwhile."""

    def __init__(self, put: Storing, indices: Sequence[int], buffer: Memory) -> None:
        self._put, self._indices = put, list(indices)
        raw = put.question.shape.plan.raw_length
        self._rows = buffer.memory[: len(indices) * raw].reshape(len(indices), raw)
        self._records: dict[int, NewRecord] = {}

    def stage(self, first: int, end: int, sums: UInt64Array) -> None:
        question, indices, rows = self._put.question, self._indices[first:end], self._rows[first:end]
        agree = (sums == self._put.shard.staging_sums(question.shape)(question.span(indices), rows)).all(axis=1)
        tags = question.shape.tags([question.hashes[i] for i in indices])
        tagged = (weighted_sums(sums, question.shape.factors) ^ tags).tolist()
        for row in np.flatnonzero(agree).tolist():
            self._records[indices[row]] = self._put.record(indices[row], rows[row], sums[row], tagged[row])

    def write(self, last: bool) -> Callable[[], Outcomes]:
        """In the shard's own thread where that waits for a disk and there is something to do meanwhile."""
        if self._put.overlaps and not last:
            meanwhile = self._put.write_meanwhile(self._records)
            if meanwhile is not None:
                return lambda: self._outcomes(meanwhile.result())
        written = self._put.write(self._records)
        return lambda: self._outcomes(written)

    def _outcomes(self, written: Outcomes) -> Outcomes:
        return dict.fromkeys(self._indices, "source_changed") | written


class Storing:
    """One put, on the side of the files. Belongs to the calling thread, which has entered the database."""

    whole = False
    owed = 0

    def __init__(self, shard: Shard, question: Question, buffers: Buffers) -> None:
        self.shard, self.question, self.buffers = shard, question, buffers
        self.overlaps = shard.config.sync
        self.token = object()
        self.held: dict[Any, Any] = {} if shard.keeper is None else shard.keeper.pins
        self._meanwhile = False
        self._victims: list[Victim] = []
        """What is still to be evicted for this put, in order."""

    def begin(self) -> Outcomes:
        """Blocks that are present, and those that eviction does not admit; decided for all of a call before the first is
        written."""
        self.shard.follow_reports(REPORTS_AT_ONCE)
        if self.shard.keeper is not None:
            self.shard.keeper.unaccounted.add(self.token)
            self.held[self.token] = self.chain
        present = self._present()
        admitted = self._admit(~present)
        refused = np.flatnonzero(~present & ~admitted).tolist()
        return dict.fromkeys(np.flatnonzero(present).tolist(), "present") | dict.fromkeys(refused, "not_admitted")

    def batch(self, indices: Sequence[int], buffer: Memory) -> RecordBatch:
        return RecordBatch(self, indices, buffer)

    def settle(self) -> None:
        if self._meanwhile:
            self.shard.wait_for_writer()

    def end(self, stored: Bools) -> None:
        keeper = self.shard.keeper
        if keeper is not None:
            keeper.written(self.chain, stored, self.cost)
            keeper.unaccounted.discard(self.token)

    @cached_property
    def chain(self) -> Chain:
        """The blocks as the eviction policy knows them."""
        keeper, question = self.shard.keeper, self.question
        assert keeper is not None
        return keeper.chain(question.shape.prefix, question.hashes, question.start, question.parent)

    @property
    def cost(self) -> int:
        """Bytes of the file that a record takes, before compression."""
        return estimated_bytes(self.question.shape.plan.raw_length)

    def _admit(self, absent: Bools) -> Bools:
        """Which absent blocks to write."""
        keeper = self.shard.keeper
        if keeper is None:
            return absent
        try:
            admitted, victims = keeper.admit(self.chain, absent, self.cost, self.spare)
        except lmdb.Error:
            log.exception("%s: put could not ask for the room that is left, and tries", self.shard.db.folder)
            return absent
        self._victims.extend(keeper.named(victims))
        return admitted

    @property
    def spare(self) -> int:
        """Bytes that eviction keeps free."""
        return self.shard.config.spare_bytes

    def _present(self) -> Bools:
        try:
            with self.shard.db.read() as snapshot:
                values = [snapshot.header(key) for key in self.question.keys]
        except lmdb.Error:
            log.exception("%s: put could not look its keys up, and writes them", self.shard.db.folder)
            return np.zeros(len(self.question), bool)
        return np.array([v is not None and self._keeps(i, v) for i, v in enumerate(values)], bool)

    def _keeps(self, index: int, value: bytes) -> bool:
        """Whether the index entry already answers for this block, so that nothing need be written."""
        question, key = self.question, self.question.keys[index]
        header = parse_header(value, key)
        return (
            isinstance(header, Header)
            and header.codec in CODECS
            and not self.shard.refused.holds(key, value)
            and header.valid_tokens == question.valid[index]
            and question.shape.misfit(header, question.start + index) is None
        )

    def record(self, index: int, raw: Bytes, sums: UInt64Array, tagged: int) -> NewRecord:
        """The record of a block. raw: its bytes, (block bytes,) uint8, which the codec may overwrite; sums: s of each slice;
        tagged: its checksum under its tag."""
        question, codec = self.question, self.shard.codec
        plan = question.shape.plan
        chunks = [codec.encode(raw[a:b]) for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]
        lengths = np.array([len(chunk) for chunk in chunks], np.int64)
        hashes = np.array([xxh3_64_intdigest(chunk) for chunk in chunks], np.uint64)
        directory = Directory(sums, lengths, hashes).encode()
        parent = question.hashes[index - 1] if index else question.parent
        header = Header(
            codec=codec.number,
            block_size=question.shape.block_size,
            raw_length=plan.raw_length,
            stored_length=int(lengths.sum()) + len(directory),
            position=question.start + index,
            valid_tokens=int(question.valid[index]),
            fingerprint=question.shape.fingerprint,
            tagged_checksum=tagged,
            directory_length=len(directory),
            directory_hash=xxh3_64_intdigest(directory),
            key=question.keys[index],
            parent=parent or b"",
            geometry=question.shape.geometry,
            flags=question.shape.flags,
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

    def write_meanwhile(self, records: dict[int, NewRecord]) -> Future[Outcomes] | None:
        """`write` in the shard's own thread, None where none can be had."""
        self._meanwhile = True
        return self.shard.write_meanwhile(self.write, records)

    def write(self, records: dict[int, NewRecord]) -> Outcomes:
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
            outcomes |= self.write({index: record})
            if outcomes[index] == full:
                break
        return outcomes

    def _no_room(self) -> str:
        try:
            return "reader_holds_space" if self.shard.db.reader_holds_space() else "store_full"
        except lmdb.Error:
            return "store_full"

    def _write_with_room(self, records: dict[int, NewRecord]) -> Outcomes:
        """Write in one transaction; where there is no room, or none in one piece, evict and try again."""
        for attempt in range(EVICTION_ATTEMPTS):
            try:
                return self._commit(records)
            except lmdb.MapFullError:
                if not self._make_room(records, 2**attempt):
                    raise
        return self._commit(records)

    def _make_room(self, records: Mapping[int, NewRecord], times: int) -> bool:
        """Evict so many times what the records take; False where that would bring nothing."""
        keeper, db = self.shard.keeper, self.shard.db
        if keeper is None or self._held():
            return False
        needed = times * sum(map(record_cost, records.values()))
        victims = [*self._victims, *keeper.named(keeper.victims(needed))]
        evicted, tried = db.evict(victims, db.free_bytes() + needed)
        self._victims.clear()
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

    def _commit(self, records: Mapping[int, NewRecord]) -> Outcomes:
        if not records:
            return {}
        keys, keeper = self.question.keys, self.shard.keeper
        index_of = {keys[i]: i for i in records}
        learned = keeper.note() if keeper is not None else {}
        written = self.shard.db.write(
            list(records.values()),
            {IDENTITY_PREFIX + self.shard.identity_id: self.shard.identity_json} | learned,
            lambda key, old: self._keeps(index_of[key], old),
            self._victims,
            self.spare,
        )
        if keeper is not None and learned:
            keeper.noted()
        self.shard.gone(written.evicted, self._victims[: written.tried])
        del self._victims[: written.tried]
        for index, new in zip(records, written.stored, strict=True):
            if new:
                self.shard.refused.discard(keys[index])
        return {i: "stored" if new else "present" for i, new in zip(records, written.stored, strict=True)}

    def _why(self, records: Mapping[int, NewRecord]) -> str:
        """LMDB does not say that a disk is full; the file system does."""
        try:
            disk = os.statvfs(self.shard.db.folder)
        except OSError:
            return "io_error"
        needed = sum(record.header.stored_length for record in records.values())
        return "disk_full" if disk.f_bavail * disk.f_frsize < 2 * needed else "io_error"


def record_cost(record: NewRecord) -> int:
    """Bytes of the file that a record takes."""
    return record_bytes(len(record.header.key) + 2000, [len(record.directory), *map(len, record.chunks)])
