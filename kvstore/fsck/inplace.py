"""Repairs within a data.mdb whose trees hold together: damaged records leave it for a quarantine folder, bytes that no record
names are reclaimed, the accounting is made anew."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from kvstore.audit import audit
from kvstore.blockdb import USAGE_KEY, BlockDB
from kvstore.errors import StoreDamaged
from kvstore.fsck.alone import hold_data, lost_writes, tree_problem
from kvstore.fsck.carving import slices_of
from kvstore.fsck.findings import Finding
from kvstore.fsck.keeping import Shelf
from kvstore.quarantine import parse_entry
from kvstore.record import CHUNK_ENTRY, MAX_HEADER_BYTES, Header, chunk_key, parse_header
from kvstore.reports import sequence_of
from kvstore.results import Rejection
from kvstore.usage import MAX_SEQUENCE, Usage

RECORDS_AT_ONCE: Final = 32
"""Damaged records that one transaction deletes."""
CHUNKS_AT_ONCE: Final = 1024
ALL_CHUNKS: Final = 2**16
MAX_KEY: Final = 2**64 - 1
DIRECTORY_HASH: Final = slice(88, 96)
"""Where a header has its directory's hash."""
NO_BOUND: Final = 2**63
CLOCK_ASTRAY_US: Final = 86_400 * 10**6
"""A last sequence number is no such if no record has it and it lies further in the future."""


class BrokenTree(StoreDamaged):
    """The database's trees do not hold together, so nothing is written to it."""


@dataclass(frozen=True)
class Reclaimed:
    """keys: payload entries that no record named; nbytes: theirs; kept_for: why nothing was reclaimed, empty where it was."""

    keys: int = 0
    nbytes: int = 0
    kept_for: str = ""


class Repairing(BlockDB):
    """A shard that is being repaired: it opens where nobody else has it and its trees hold together. Writes are synced one by
    one. Raises BrokenTree, and what BlockDB raises."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._held = -1
        try:
            super().__init__(folder, capacity_bytes, True, True, NO_BOUND)
        except BaseException:
            self._let_in()
            raise

    def _prepare(self) -> None:
        """With the writer's lock, before LMDB opens anything: opening already writes."""
        self._held = hold_data(self.folder)
        if lost_writes(self.store_file.state):
            raise BrokenTree(f"{self.folder}: writes may be lost that were not synced")
        if problem := tree_problem(self.folder):
            raise BrokenTree(f"{self.folder}: {problem}")
        super()._prepare()

    def _shut(self) -> None:
        try:
            super()._shut()
        finally:
            self._let_in()

    def _let_in(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def compact(self) -> None:
        """As Compactable, which holds data.mdb itself."""
        self._let_in()
        super().compact()
        self._held = hold_data(self.folder)

    # --- damaged records ---------------------------------------------------------------------------------------------

    def take_out(self, findings: Sequence[Finding], shelf: Shelf) -> None:
        """Move the records that findings name, one each, to the shelf, those that still are damaged. Raises StorePathError,
        lmdb.Error or OSError; what went before is on the shelf."""
        owners = self._owners()
        for start in range(0, len(findings), RECORDS_AT_ONCE):
            taken = []
            for finding in findings[start : start + RECORDS_AT_ONCE]:
                entry = self._damaged(finding)
                if entry is not None:
                    with self._begin() as txn:
                        shelf.keep(finding, entry, self._pieces(txn, finding.key, entry, owners))
                    taken.append((finding.key, entry))
            shelf.seal()
            if taken:
                self._with_room(partial(self._remove, taken))

    def _damaged(self, finding: Finding) -> bytes | None:
        """The index entry that a finding blames, where two more looks blame it too."""
        with self._begin() as txn:
            found = txn.get(finding.key, db=self._index)
            entry = None if found is None else bytes(found)
        if entry is None:
            return None
        wrong = [self._verdict(finding.key, entry) for _ in range(2)]
        if finding.kind == "GEOMETRY":
            blamed = "version" not in wrong and "io" not in wrong
        else:
            blamed = all(kind not in ("", "version", "io") for kind in wrong)
        return entry if blamed else None

    def _verdict(self, key: bytes, entry: bytes) -> str:
        with self.read() as snapshot:
            wrong = audit(snapshot, key, entry)
        return "" if wrong is None else wrong.kind

    def _owners(self) -> dict[int, bytes]:
        """By sequence number the key of each intact index entry under its own key, none where there are two."""
        found = {}
        for key, value in self.entries():
            header = parse_header(bytes(value[: MAX_HEADER_BYTES + 1]), bytes(key))
            if isinstance(header, Header):
                found[header.sequence] = b"" if header.sequence in found else header.key
        return found

    def _pieces(self, txn: Any, key: bytes, entry: bytes, owners: dict[int, bytes]) -> dict[int, memoryview]:
        """The chunks that an entry names, unless they are another record's. Views, for as long as the transaction lasts."""
        sequence = sequence_of(entry)
        found = self._under(txn, sequence) if owners.get(sequence, key) == key else {}
        if not found and isinstance(parse_header(entry), Rejection):
            # Its sequence number may be what is damaged.
            known = self._unnamed(txn, owners.keys()).get(directory_hash(entry))
            found = {} if known is None else self._under(txn, known)
        return found

    def _under(self, txn: Any, sequence: int) -> dict[int, memoryview]:
        """The chunks under a sequence number."""
        prefix, found = chunk_key(sequence, 0)[:8], dict[int, memoryview]()
        with txn.cursor(db=self._payload) as cursor:
            for at, value in cursor.iternext() if cursor.set_range(prefix) else ():
                if at[:8] != prefix:
                    break
                if len(at) == 10:
                    found[int.from_bytes(at[8:], "big")] = value
        return found

    def _unnamed(self, txn: Any, named: Container[int]) -> dict[int, int]:
        """By the hash of its directory each sequence number in payload that is not among the named."""
        found = {}
        with txn.cursor(db=self._payload) as cursor:
            there = cursor.first()
            while there:
                sequence = int.from_bytes(cursor.key()[:8], "big")
                if sequence not in named and len(cursor.key()) == 10 and cursor.key()[8:] == b"\0\0":
                    found[xxh3_64_intdigest(cursor.value())] = sequence
                there = sequence < MAX_KEY and cursor.set_range((sequence + 1).to_bytes(8, "big"))
        return found

    def _remove(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Their chunks stay: `reclaim` knows better what other records name."""
        with self._accounted() as (txn, usage):
            for key, entry in entries:
                if txn.get(key, db=self._index) == entry and txn.delete(key, db=self._index):
                    usage.remove(parse_header(entry))

    # --- what no record names ----------------------------------------------------------------------------------------

    def reclaim(self) -> Reclaimed:
        """Delete payload that neither an index entry nor a condemned record names. Where a record is of a newer version, and
        may name what it likes, nothing. Raises lmdb.Error or OSError; what went before is gone."""
        named = self._named()
        if named is None:
            return Reclaimed(kept_for="records of a newer version are here, and may name any stored bytes")
        count, nbytes, start = 0, 0, b"\0"
        while keys := self._orphans(named, start):
            self._with_room(partial(self._delete_payload, [key for key, _ in keys]))
            count, nbytes, start = count + len(keys), nbytes + sum(size for _, size in keys), keys[-1][0]
        return Reclaimed(count, nbytes)

    def _named(self) -> dict[int, int] | None:
        """By sequence number the highest chunk number that a record may have; all of them where its entry is damaged."""
        named: dict[int, int] = {}
        damaged = set[int]()
        for key, value in self.entries():
            entry = bytes(value[: MAX_HEADER_BYTES + 1])
            header = parse_header(entry, bytes(key))
            if isinstance(header, Rejection):
                if header.kind == "version" and entry[4:6] != b"\1\0":
                    return None
                damaged.add(directory_hash(entry))
            most = last_chunk(header) if isinstance(header, Header) else ALL_CHUNKS
            named[sequence_of(entry)] = max(named.get(sequence_of(entry), 0), most)
        with self._begin() as txn:
            for entry in self._condemned_entries(txn):
                header = parse_header(entry)
                most = last_chunk(header) if isinstance(header, Header) else ALL_CHUNKS
                named[sequence_of(entry)] = max(named.get(sequence_of(entry), 0), most)
            if damaged:
                lost = self._unnamed(txn, named)
                named |= {sequence: ALL_CHUNKS for known, sequence in lost.items() if known in damaged}
        return named

    def _condemned_entries(self, txn: Any) -> Iterator[bytes]:
        with txn.cursor(db=self._quarantined) as cursor:
            for _, value in cursor:
                condemned = parse_entry(value)
                if condemned is not None:
                    yield condemned.value

    def _orphans(self, named: dict[int, int], start: bytes) -> list[tuple[bytes, int]]:
        """The next payload keys from `start` on that nothing names, and the bytes under each."""

        def lost(key: bytes) -> bool:
            known = named.get(int.from_bytes(key[:8], "big"), -1)
            return len(key) != 10 or int.from_bytes(key[8:], "big") > known

        with self._begin() as txn, txn.cursor(db=self._payload) as cursor:
            there: Iterator[Any] = cursor.iternext() if cursor.set_range(start) else iter(())
            found = ((bytes(key), len(value)) for key, value in there if lost(bytes(key)))
            return list(islice(found, CHUNKS_AT_ONCE))

    def _delete_payload(self, keys: Sequence[bytes]) -> None:
        self._freed = True
        with self._accounted() as (txn, _):
            for key in keys:
                txn.delete(key, db=self._payload)

    # --- the accounting ----------------------------------------------------------------------------------------------

    def recount(self) -> bool:
        """Make the accounting anew from what is stored; whether it was another. Raises lmdb.Error or OSError."""
        return self._with_room(self._recount)

    def _recount(self) -> bool:
        with self._write() as txn:
            stored, usage = txn.get(USAGE_KEY, db=self._meta), Usage()
            last = [self._last_chunk(txn), *self._count_index(txn, usage), *self._count_quarantine(txn, usage)]
            usage.last_sequence = max(last)
            known = Usage.parse(stored).last_sequence
            if known <= max(usage.last_sequence, time.time_ns() // 1000 + CLOCK_ASTRAY_US):
                usage.last_sequence = max(usage.last_sequence, known)
            if stored == usage.encode():
                return False
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)
        return True

    def _last_chunk(self, txn: Any) -> int:
        with txn.cursor(db=self._payload) as cursor:
            beyond = cursor.set_range(chunk_key(MAX_SEQUENCE, 0))
            return int.from_bytes(cursor.key()[:8], "big") if (cursor.prev() if beyond else cursor.last()) else 0

    def _count_index(self, txn: Any, usage: Usage) -> Iterator[int]:
        with txn.cursor(db=self._index) as cursor:
            for _, value in cursor:
                header = parse_header(bytes(value[: MAX_HEADER_BYTES + 1]))
                if isinstance(header, Header):
                    usage.add(header)
                    yield header.sequence if header.sequence < MAX_SEQUENCE else 0

    def _count_quarantine(self, txn: Any, usage: Usage) -> Iterator[int]:
        with txn.cursor(db=self._quarantined) as cursor:
            for key, value in cursor:
                condemned = parse_entry(value)
                usage.quarantine_records += 1
                if condemned is not None:
                    usage.quarantine_bytes += self.quarantine._cost(condemned.value)
                sequence = int.from_bytes(key, "big")
                yield sequence if sequence < MAX_SEQUENCE else 0


def last_chunk(header: Header) -> int:
    """The number of a record's last chunk; ALL_CHUNKS where its header contradicts itself."""
    chunks, rest = divmod(header.directory_length - 8 * slices_of(header), CHUNK_ENTRY.itemsize)
    return ALL_CHUNKS if rest or chunks < 1 else chunks


def directory_hash(entry: bytes) -> int:
    """What an index entry, intact or not, has where the hash of its directory belongs."""
    return int.from_bytes(entry[DIRECTORY_HASH], "little")
