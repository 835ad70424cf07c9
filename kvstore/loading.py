"""get: blocks from the shard to the engine's cache, verified where they lie."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.blockdb import ReadView
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.codec import CODECS
from kvstore.record import Directory, Header, check_chunk, parse_directory, parse_header
from kvstore.results import GetResult, Rejection
from kvstore.route import Transfer
from kvstore.shard import GroupView, Shard
from kvstore.span import Span
from kvstore.staging import StagingPool

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

CONDEMNING: Final = frozenset({"header", "key", "storage_hash", "decode"})
"""Kinds that blame the record, if a second read agrees."""
DIRECT_BYTES: Final = 2**20
"""Block bytes that are hashed, then scattered, before the next ones: what stays in a core's cache between the two."""


@dataclass(frozen=True, eq=False)
class Found:
    """An intact record in a snapshot; its chunks dangle when the snapshot ends."""

    index: int
    value: bytes
    header: Header
    directory: Directory
    chunks: list[memoryview]

    @property
    def raw(self) -> bool:
        """Whether every chunk is stored raw."""
        return self.header.stored_length - self.header.directory_length == self.header.raw_length


@dataclass(frozen=True)
class Refusal:
    """A record that cannot be loaded; value: its index entry, empty where it could not be read."""

    index: int
    value: bytes
    rejection: Rejection


@dataclass(eq=False)
class Load:
    """One get_blocks call. Belongs to the calling thread.

    Records are read, hashed and scattered in snapshots of bounded size. Only when the last byte of the call has
    landed are the engine's blocks summed, by the caller's ids, so that a copy that went into another block's place
    cannot follow that block's check.
    """

    shard: Shard
    view: GroupView
    transfer: Transfer
    keys: list[bytes]
    hashes: list[bytes]
    span: Span
    landed: dict[int, tuple[bytes, Header]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    rejected: dict[int, Rejection] = field(default_factory=dict)
    condemned: list[tuple[bytes, bytes, str]] = field(default_factory=list)

    def run(self) -> GetResult:
        """Load, then verify; everything that is not verified is missing or rejected."""
        verified, keeper, pin = np.zeros(len(self.span), bool), self.shard.keeper, object()
        try:
            try:
                if keeper is not None:
                    keeper.pins[pin] = chain = keeper.chain(self.view.prefix, self.hashes, self.span.start, None)
                    keeper.asked(chain)
                self._read_all()
                verified[self._verify()] = True
            finally:
                if keeper is not None:
                    keeper.pins.pop(pin, None)
        finally:
            if self.transfer.pending:
                self.transfer.finish()
        self._quarantine()
        missing = np.zeros(len(self.span), bool)
        missing[sorted(self.missing)] = True
        self._count(verified)
        return GetResult(verified, missing, dict(sorted(self.rejected.items())))

    def _read_all(self) -> None:
        step = max(1, self.shard.config.read_batch_bytes // self.view.plan.raw_length)
        for start in range(0, len(self.span), step):
            for refusal in self._read(range(start, min(start + step, len(self.span)))):
                self._read_again(refusal)

    def _read(self, indices: Sequence[int]) -> list[Refusal]:
        """Scatter the intact records of one snapshot; returns those that deserve a second read."""
        try:
            with self.shard.db.read() as snapshot:
                return self._read_snapshot(snapshot, indices)
        except lmdb.Error as error:
            left = [i for i in indices if not (i in self.landed or i in self.missing or i in self.rejected)]
            for index in left:
                self._refuse(Refusal(index, b"", Rejection("io", f"LMDB: {error}")))
            return []

    def _read_snapshot(self, snapshot: ReadView, indices: Sequence[int]) -> list[Refusal]:
        suspects: list[Refusal] = []
        pending: list[Found] = []
        limit = self._pending_limit()
        for index in indices:
            found = self._find(snapshot, index)
            if isinstance(found, Found):
                pending.append(found)
            elif found is not None and found.rejection.kind in CONDEMNING:
                suspects.append(found)
            elif found is not None:
                self._refuse(found)
            if len(pending) == limit:
                suspects += self._land(pending)
                pending = []
        return suspects + self._land(pending)

    def _pending_limit(self) -> int:
        room = self._pool().nbytes
        return max(1, (min(room, DIRECT_BYTES) if self.view.direct else room) // self.view.plan.raw_length)

    def _pool(self) -> StagingPool:
        return self.shard.staging(self.view, "get")

    def _find(self, snapshot: ReadView, index: int) -> Found | Refusal | None:
        """The record for block `index`, checked up to its storage hashes; None, and noted as missing, where none
        answers to the question."""
        key = self.keys[index]
        value = snapshot.header(key)
        if value is None or self.shard.refused.holds(key, value):
            self.missing.add(index)
            return None
        header = parse_header(value, key)
        if isinstance(header, Rejection):
            return Refusal(index, value, header)
        if misfit := self.view.misfit(header, self.span.start + index):
            return Refusal(index, value, misfit)
        if header.valid_tokens != self.span.valid[index]:
            self.missing.add(index)
            return None
        payload = self._payload(snapshot, header)
        if isinstance(payload, Rejection):
            return Refusal(index, value, payload)
        return Found(index, value, header, *payload)

    def _payload(self, snapshot: ReadView, header: Header) -> tuple[Directory, list[memoryview]] | Rejection:
        plan = self.view.plan
        if header.codec not in CODECS:
            return Rejection("version", f"codec {header.codec}, this kvstore knows {sorted(CODECS)}")
        directory = parse_directory(snapshot.chunk(header.sequence, 0), header, plan)
        if isinstance(directory, Rejection):
            return directory
        if (directory.lengths > plan.lengths).any() or directory.lengths.sum() != (
            header.stored_length - header.directory_length
        ):
            return Rejection(
                "decode", "the directory's stored lengths exceed the raw ones, or are not the header's sum"
            )
        chunks = []
        entries = zip(directory.lengths.tolist(), directory.hashes.tolist(), strict=True)
        for number, (length, stored_hash) in enumerate(entries, 1):
            chunk = snapshot.chunk(header.sequence, number)
            if wrong := check_chunk(chunk, number, length, stored_hash):
                return wrong
            assert chunk is not None
            chunks.append(chunk)
        return directory, chunks

    def _land(self, pending: list[Found]) -> list[Refusal]:
        """Scatter records to the engine's blocks; returns those that do not decode."""
        straight = [found for found in pending if self.view.direct and found.raw]
        if straight:
            addresses = np.stack([self._addresses(found) for found in straight])
            self.transfer.scatter_from(self.span.take([f.index for f in straight]), addresses)
            self.landed.update((f.index, (f.value, f.header)) for f in straight)
        staged = [found for found in pending if not (self.view.direct and found.raw)]
        return self._land_staged(staged) if staged else []

    def _addresses(self, found: Found) -> npt.NDArray[np.int64]:
        chunk_of, offset = self.view.plan.slice_places
        starts = [np.frombuffer(c, np.uint8).__array_interface__["data"][0] for c in found.chunks]
        return np.asarray(np.array(starts, np.int64)[chunk_of] + offset, np.int64)

    def _land_staged(self, pending: list[Found]) -> list[Refusal]:
        """Decode records into one buffer, and scatter those that decode."""
        suspects, good = list[Refusal](), list[Found]()
        pool, borrower = self._pool(), object()
        try:
            staged = self.view.route.stage(pool.borrow(borrower), len(pending))
            for found in pending:
                if wrong := self._decode(found, staged.bytes[len(good)]):
                    suspects.append(Refusal(found.index, found.value, wrong))
                else:
                    good.append(found)
            if good:
                self.transfer.scatter(self.span.take([found.index for found in good]), staged)
        finally:
            pool.borrowed.pop(borrower, None)
        self.landed.update((found.index, (found.value, found.header)) for found in good)
        return suspects

    def _decode(self, found: Found, block: Bytes) -> Rejection | None:
        """Fill a block's raw bytes from its chunks."""
        codec, bounds = CODECS[found.header.codec], self.view.plan.bounds
        for number, chunk in enumerate(found.chunks):
            out = block[bounds[number] : bounds[number + 1]]
            stored_raw = CODECS[0] if len(chunk) == out.size else codec
            if wrong := stored_raw.decode(chunk, out):
                return Rejection("decode", f"chunk {number + 1}: {wrong}")
        return None

    def _read_again(self, refusal: Refusal) -> None:
        """One second read tells a passing error from a damaged record."""
        index = refusal.index
        try:
            with self.shard.db.read() as snapshot:
                found = self._find(snapshot, index)
                if isinstance(found, Found):
                    again = self._land_staged([found])
                    found = again[0] if again else None
                    self.shard.counters.add("get_transient", not again)
        except lmdb.Error as error:
            found = Refusal(index, b"", Rejection("io", f"LMDB: {error}"))
        if isinstance(found, Refusal):
            self._refuse(found)

    def _refuse(self, refusal: Refusal) -> None:
        """Reject the block, make its key a miss, and condemn the record where it is to blame."""
        index, value, rejection = refusal.index, refusal.value, refusal.rejection
        key = self.keys[index]
        condemned = rejection.condemned or rejection.kind in CONDEMNING
        self.rejected[index] = replace(rejection, condemned=condemned)
        self.shard.counters.add(f"get_rejected_{rejection.kind}")
        log.warning(
            "%s: block %s refused: %s: %s", self.shard.db.folder, key[18:].hex(), rejection.kind, rejection.detail
        )
        if value:
            self.shard.refused.add(key, value)
        if value and condemned:
            self.condemned.append((key, value, rejection.kind))

    def _quarantine(self) -> None:
        """Take the condemned records out of the store; they are refused already."""
        if not self.condemned or not self.shard.db.writable:
            return
        try:
            self.shard.counters.add("quarantine_failed", self.shard.db.condemn(self.condemned))
        except (lmdb.Error, OSError):
            self.shard.counters.add("quarantine_failed", len(self.condemned))
            log.exception("%s: damaged records could not be moved to quarantine", self.shard.db.folder)
        if self.shard.keeper is not None:
            self.shard.keeper.removed([key for key, _, _ in self.condemned])

    def _verify(self) -> list[int]:
        """Sum what lies in the engine's blocks, by the caller's ids; the indices that match."""
        indices = sorted(self.landed)
        if not indices:
            return []
        sums = self.transfer.block_checksums(self.span.take(indices), self._pool())
        expected = self._expected(indices)
        good = sums == expected
        for row in np.flatnonzero(~good):
            self._judge(indices[row], int(expected[row]))
        return [index for index, match in zip(indices, good, strict=True) if match]

    def _expected(self, indices: list[int]) -> UInt64Array:
        """The content checksums under the tags of the hashes that were asked for."""
        stored = np.array([self.landed[i][1].tagged_checksum for i in indices], np.uint64)
        return stored ^ self.view.tags([self.hashes[i] for i in indices])

    def _judge(self, index: int, expected: int) -> None:
        """Tell a bad record from a bad way: read again into staging and sum that."""
        value = self.landed[index][0]
        detail, condemned = "replaced by another record meanwhile", False
        try:
            with self.shard.db.read() as snapshot:
                found = self._find(snapshot, index)
                if isinstance(found, Found) and found.value == value:
                    detail, condemned = self._compare(found, expected)
        except lmdb.Error as error:
            detail = f"LMDB: {error}"
        self.missing.discard(index)
        self._refuse(Refusal(index, value, Rejection("content", detail, condemned)))

    def _compare(self, found: Found, expected: int) -> tuple[str, bool]:
        """What is wrong with a block whose bytes in the engine's cache do not sum to `expected`."""
        pool, borrower, span = self._pool(), object(), self.span.take([found.index])
        try:
            rows = self.view.route.stage(pool.borrow(borrower), 1).bytes
            if wrong := self._decode(found, rows[0]):
                return wrong.detail, True
            staged = self.view.route.staging_checksum(span, rows)
        finally:
            pool.borrowed.pop(borrower, None)
        total = int(weighted_sums(staged, self.view.group.factors)[0])
        if total != expected:
            return f"the record's bytes sum to {total:016x}, its header says {expected:016x}", True
        astray = np.flatnonzero(staged[0] != self.transfer.checksum(span)[0])
        if not astray.size:
            return (
                "the record is intact, and so are the engine's blocks by now: they changed while they were checked",
                False,
            )
        first = self.view.group.slices[int(astray[0])]
        return (
            f"the record is intact; {astray.size} slices went astray on the way to the engine's blocks, the first layer "
            f"{first.layer} head {first.head}"
        ), False

    def _count(self, verified: npt.NDArray[np.bool_]) -> None:
        self.shard.counters.add("get_verified", int(verified.sum()))
        self.shard.counters.add("get_missing", len(self.missing))
        self.shard.counters.add("get_bytes", int(verified.sum()) * self.view.plan.raw_length)
