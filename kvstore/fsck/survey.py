"""The index against payload, quarantine and accounting, by one snapshot; and where the index can be cut in ranges.

Keys and index entries alone are read. Memory: 30 bytes a record and 10 a chunk.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.audit import shape_of
from kvstore.blockdb import USAGE_KEY
from kvstore.fsck.chunks import U64, Chunks, Ints
from kvstore.fsck.findings import Finding
from kvstore.fsck.glance import sketch
from kvstore.fsck.options import Range
from kvstore.fsck.reading import Reading
from kvstore.fsck.stages import HEADER_KINDS, NAMED, impossible
from kvstore.quarantine import parse_entry
from kvstore.record import MAX_HEADER_BYTES, Header, chunk_key, directory_bytes, parse_header
from kvstore.reports import sequence_of
from kvstore.results import Rejection
from kvstore.usage import FORM, MAX_SEQUENCE, Usage

AT_ONCE: Final = 4096
"""Keys taken from LMDB at a time."""
PATIENCE_S: Final = 10.0
"""How long one snapshot may last where the store is written meanwhile."""
MAX_RANGES: Final = 256
RANGE_BYTES: Final = 2**28
"""Stored bytes of a range, about, where it has a SMALLER_BY-th of the records: the last ranges keep all processes busy."""
SMALLER_BY: Final = 4
PAYLOAD_KEY_BYTES: Final = 10
CLOCK_ASTRAY_US: Final = 86_400 * 10**6
MOST_RAW: Final = 2**40
"""Bytes that a record whose entry is damaged may have been counted with."""
NEWER: Final = "stored bytes that no record names: records of a newer version may name any"
UNSURE: Final = (
    "raw and stored bytes in the accounting, but within bounds: those of damaged index entries are not known"
)


@dataclass
class Surveyed:
    """What a survey found. ranges: of the records that were asked for; unchecked: sentences."""

    findings: list[Finding] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


class Cuts:
    """Cuts the index in ranges: at boundaries, and after so many records, or fewer where these are large."""

    def __init__(self, boundaries: Sequence[bytes], step: int) -> None:
        self.ranges: list[Range] = []
        self._boundaries, self._step, self._next = boundaries, step, 0

    def add(self, key: bytes, nbytes: int) -> None:
        """The next key, of a record with so many stored bytes."""
        before = self._next
        while self._next < len(self._boundaries) and self._boundaries[self._next] <= key:
            self._next += 1
        if self._next > before:
            self._cut(self._boundaries[before], self._boundaries[self._next - 1])
        elif not self.ranges or self._full(self.ranges[-1]):
            self._cut(key if self.ranges else b"", key if self.ranges else b"")
        last = self.ranges[-1]
        self.ranges[-1] = last._replace(records=last.records + 1, nbytes=last.nbytes + nbytes)

    def _full(self, last: Range) -> bool:
        large = last.nbytes >= RANGE_BYTES and last.records * SMALLER_BY >= self._step
        return large or last.records >= self._step

    def _cut(self, end: bytes, start: bytes) -> None:
        if self.ranges:
            self.ranges[-1] = self.ranges[-1]._replace(end=end)
        self.ranges.append(Range(start, b"", 0, 0))


class TooLong(Exception):
    """The store is written, and one snapshot would last too long."""


@dataclass
class Counted:
    """What the index holds. sequences: of all entries; last: the number of each one's last chunk, -1 where it is not
    known; own: whether the entry is an intact header under its own key; usage: the sums over intact headers; newest: their
    newest sequence number; damaged: entries that are none; newer: whether one is of a newer version."""

    sequences: array[int] = field(default_factory=lambda: array("Q"))
    last: array[int] = field(default_factory=lambda: array("q"))
    own: array[int] = field(default_factory=lambda: array("b"))
    usage: Usage = field(default_factory=Usage)
    newest: int = 0
    damaged: int = 0
    newer: bool = False
    directories: set[int] = field(default_factory=set)
    """Where damaged entries have their directory's hash: chunks whose sequence number they lost are theirs all the same."""


class Survey:
    """One survey of a shard that is open. Belongs to one thread."""

    def __init__(self, reading: Reading, prefix: bytes, boundaries: Sequence[bytes], every: int) -> None:
        """prefix: as in Options; boundaries: index keys where ranges begin besides, in order; every: at which records, where
        MAX_RANGES ranges are not too many."""
        self._reading, self._prefix, self._boundaries, self._every = reading, prefix, list(boundaries), every
        self._made = Surveyed()
        self._began = time.monotonic()

    def run(self) -> Surveyed:
        """Raises lmdb.Error where LMDB cannot read, TooLong."""
        with self._reading.begin() as txn:
            self._txn, self._databases = txn, self._reading.databases
            self._first = txn.id()
            counted = self._index()
            owners = self._quarantine(counted.usage)
            chunks = self._payload()
            self._compare(counted, owners, chunks)
            self._accounting(counted, chunks)
        return self._made

    def _found(self, kind: str, detail: str, **fields: Any) -> None:
        self._made.findings.append(Finding(kind, detail, **fields))

    def _blamed(self, kind: str, detail: str, key: bytes, **fields: Any) -> None:
        """A finding about a record, where it is one of those that were asked for."""
        if matches(key, self._prefix):
            self._found(kind, detail, key=key, **fields)

    def _note(self, sentence: str) -> None:
        if sentence not in self._made.unchecked:
            self._made.unchecked.append(sentence)

    def _all(self, name: str) -> Iterator[tuple[memoryview, memoryview]]:
        with self._txn.cursor(db=self._databases[name]) as cursor:
            for number, item in enumerate(cursor):
                if not number % AT_ONCE:
                    self._be_short()
                yield item

    def _be_short(self) -> None:
        if time.monotonic() - self._began > PATIENCE_S and self._reading.last_transaction() != self._first:
            raise TooLong

    # --- index -------------------------------------------------------------------------------------------------------

    def _index(self) -> Counted:
        counted = Counted()
        step = max(self._every, -(-self._txn.stat(self._databases["index"])["entries"] // MAX_RANGES))
        cuts = Cuts(self._boundaries, step)
        for view, value in self._all("index"):
            key, entry = bytes(view), bytes(value[: MAX_HEADER_BYTES + 1])
            nbytes = self._intact(counted, key, entry) or self._entry(counted, key, entry)
            if matches(key, self._prefix):
                cuts.add(key, nbytes)
        self._made.ranges = cuts.ranges
        return counted

    @staticmethod
    def _intact(counted: Counted, key: bytes, entry: bytes) -> int:
        """Count an entry that is as it was stored; its stored bytes, 0 where it is not."""
        said = sketch(key, entry)
        if said is None:
            return 0
        counted.usage.raw_bytes += said.raw
        counted.usage.stored_bytes += said.stored
        counted.newest = max(counted.newest, said.sequence if said.sequence < MAX_SEQUENCE else 0)
        counted.sequences.append(said.sequence)
        counted.last.append(len(said.form.lengths))
        counted.own.append(True)
        return said.stored

    def _entry(self, counted: Counted, key: bytes, entry: bytes) -> int:
        """Count any entry, and say what is wrong with it; its stored bytes."""
        header = parse_header(entry)
        wrong = header if isinstance(header, Rejection) else None
        sequence = sequence_of(entry)
        if isinstance(header, Header):
            counted.usage.add(header)
            counted.newest = max(counted.newest, sequence if sequence < MAX_SEQUENCE else 0)
            if header.key != key:
                wrong = Rejection("key", f"the record of {header.key.hex()} lies under {key.hex()}")
        else:
            counted.damaged += 1
            counted.newer |= header.kind == "version" and entry[4:6] != b"\1\0"
            counted.directories.add(int.from_bytes(entry[88:96], "little"))
        counted.sequences.append(sequence)
        counted.last.append(last_chunk(header) if isinstance(header, Header) and not wrong else -1)
        counted.own.append(wrong is None)
        if wrong is not None:
            nbytes = stored_bytes(header, entry)
            self._blamed(HEADER_KINDS[wrong.kind], wrong.detail, key, nbytes=nbytes, sequence=sequence)
        return stored_bytes(header, entry)

    def _keys(self, wanted: set[int]) -> Iterator[tuple[int, bytes, bytes]]:
        """The number, key and entry of those index entries: once more through the index, where something is wrong."""
        if not wanted:
            return
        for number, (key, value) in enumerate(self._all("index")):
            if number in wanted:
                yield number, bytes(key), bytes(value[: MAX_HEADER_BYTES + 1])

    # --- quarantine and payload --------------------------------------------------------------------------------------

    def _quarantine(self, usage: Usage) -> list[tuple[int, int]]:
        """Sequence numbers that condemned records name, with the number of each one's last chunk."""
        owners = []
        for _, value in self._all("quarantine"):
            entry = parse_entry(value)
            usage.quarantine_records += 1
            if entry is not None:
                header = parse_header(entry.value)
                usage.quarantine_bytes += stored_bytes(header, entry.value)
                owners.append((sequence_of(entry.value), last_chunk(header) if isinstance(header, Header) else -1))
        return owners

    def _payload(self) -> Chunks:
        return Chunks(list(self._payload_keys()))

    def _payload_keys(self) -> Iterator[bytes]:
        with self._txn.cursor(db=self._databases["payload"]) as cursor:
            keys = cursor.iternext(values=False)
            while some := list(map(bytes, islice(keys, AT_ONCE))):
                self._be_short()
                for key in (key for key in some if len(key) != PAYLOAD_KEY_BYTES):
                    self._found("ORPHAN_CHUNK", f"under a key of {len(key)} bytes", nbytes=len(self._chunk(key) or b""))
                yield b"".join(key for key in some if len(key) == PAYLOAD_KEY_BYTES)

    def _chunk(self, key: bytes) -> memoryview | None:
        found: memoryview | None = self._txn.get(key, db=self._databases["payload"])
        return found

    def _compare(self, counted: Counted, owners: list[tuple[int, int]], chunks: Chunks) -> None:
        named, last = np.array(counted.sequences, np.uint64), np.array(counted.last, np.int64)
        places = chunks.places(named)
        self._missing(chunks, places, last)
        condemned, ends = np.array([s for s, _ in owners], np.uint64), np.array([n for _, n in owners], np.int64)
        for place in chunks.unnamed(np.concatenate([named, condemned])):
            self._unnamed(counted, int(chunks.sequences[place]), chunks.under(place))
        every = np.concatenate([places, chunks.places(condemned)])
        for place, numbers in chunks.beyond(every, np.concatenate([last, ends])):
            self._orphan(int(chunks.sequences[place]), numbers, "past the last chunk of the record of sequence number")
        self._twice(counted, named)

    def _missing(self, chunks: Chunks, places: Ints, last: Ints) -> None:
        """Entries some of whose chunks are not there."""
        lacking = set(np.flatnonzero(chunks.lacking(places, last)).tolist())
        for number, key, entry in self._keys(lacking):
            there = chunks.under(int(places[number])) if places[number] >= 0 else []
            gone = sorted(set(range(int(last[number]) + 1)) - set(there))
            some = ", ".join(map(str, gone[:NAMED])) + " ..." * (len(gone) > NAMED)
            detail = f"{len(gone)} of {int(last[number]) + 1} chunks are not there: {some}"
            nbytes = stored_bytes(parse_header(entry), entry)
            self._blamed("MISSING_CHUNK", detail, key, nbytes=nbytes, sequence=sequence_of(entry))

    def _unnamed(self, counted: Counted, sequence: int, numbers: list[int]) -> None:
        """Chunks under a sequence number that nothing names."""
        directory = self._chunk(chunk_key(sequence, 0)) if counted.directories else None
        if directory is not None and xxh3_64_intdigest(directory) in counted.directories:
            return
        if counted.newer:
            self._note(NEWER)
        else:
            self._orphan(sequence, numbers, "no record names sequence number")

    def _orphan(self, sequence: int, numbers: list[int], why: str) -> None:
        views = [view for n in numbers if (view := self._chunk(chunk_key(sequence, n))) is not None]
        places = [self._reading.place(view) for view in views]
        page = places[0][0] if places else None
        pages = sum(count for _, count in places)
        detail = f"{why} {sequence}: {len(numbers)} chunks"
        self._found("ORPHAN_CHUNK", detail, nbytes=sum(map(len, views)), page=page, pages=pages, sequence=sequence)

    def _twice(self, counted: Counted, named: U64) -> None:
        """Intact entries that share a sequence number: one whose directory lies there is right."""
        own = np.array(counted.own, bool)
        values, counts = np.unique(named[own], return_counts=True)
        shared = np.isin(named, values[counts > 1]) & own
        right: set[int] = set()
        for _, key, entry in self._keys(set(np.flatnonzero(shared).tolist())):
            header = parse_header(entry, key)
            assert isinstance(header, Header), "the entry is intact in this snapshot"
            directory = self._chunk(chunk_key(header.sequence, 0))
            fits = directory is not None and xxh3_64_intdigest(directory) == header.directory_hash
            if fits and header.sequence not in right:
                right.add(header.sequence)
                continue
            detail = f"it names sequence number {header.sequence}, which is another record's"
            self._blamed("HEADER", detail, key, nbytes=len(entry), sequence=header.sequence)

    # --- accounting --------------------------------------------------------------------------------------------------

    def _accounting(self, counted: Counted, chunks: Chunks) -> None:
        stored = self._txn.get(USAGE_KEY, db=self._databases["meta"])
        if stored is not None and len(stored) != FORM.size:
            self._found("ACCOUNTING", f"the accounting has {len(stored)} bytes, expected {FORM.size}")
            return
        said, sums = Usage.parse(stored), counted.usage
        wrong = [
            f"{name} {said.figures()[name]:,}, counted {number:,}"
            for name, number in sums.figures().items()
            if not self._agrees(name, said.figures()[name] - number, counted.damaged)
        ]
        payload = chunks.sequences[chunks.sequences < MAX_SEQUENCE]
        newest = max(counted.newest, int(payload[-1]) if payload.size else 0)
        if not newest <= said.last_sequence <= max(newest, time.time_ns() // 1000 + CLOCK_ASTRAY_US):
            wrong.append(f"last_sequence {said.last_sequence}, counted {newest}")
        if wrong:
            self._found("ACCOUNTING", "; ".join(wrong))

    def _agrees(self, name: str, more: int, damaged: int) -> bool:
        """Whether a figure that the accounting has so much more of than was counted may be right."""
        if not damaged or name.startswith("quarantine") or not more:
            return not more
        self._note(UNSURE)
        return 0 <= more <= damaged * MOST_RAW


def matches(key: bytes, prefix: bytes) -> bool:
    """Whether an index key is meant: it begins so, or its block hash does."""
    return key.startswith(prefix) or key[18:].startswith(prefix)


def stored_bytes(header: Header | Rejection, entry: bytes) -> int:
    """What a record is counted with: its stored bytes, or its index entry's where that is damaged."""
    return min(header.stored_length, 2**62) if isinstance(header, Header) else len(entry)


def last_chunk(header: Header) -> int:
    """The number of a record's last chunk, -1 where its header contradicts itself."""
    if impossible(header.block_size, header.geometry, header.flags):
        return -1
    plan = shape_of(header.block_size, header.geometry, 0, b"", header.flags).plan
    return plan.num_chunks if directory_bytes(plan) == header.directory_length else -1
