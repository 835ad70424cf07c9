"""Records taken from one store to another by a file (kvstore.container), checked on both sides.

A record is checked wholly from the very bytes that go into the file, and again from those that came out of it before they
are written. It arrives as it was stored: only its sequence number and its time of writing are new. No checksum is
computed anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import lmdb

from kvstore.audit import audit
from kvstore.blockdb import IDENTITY_PREFIX, BlockDB, NewRecord
from kvstore.container import IDENTITY, NO_RANK, RECORD, Frame, Head, Ranks, Reader, Writer, parse_record
from kvstore.errors import ConfigError, IdentityError, KVStoreError, StorePathError
from kvstore.identity import IDENTITY_ID_BYTES, Rank, identity_digest
from kvstore.inspect import Filter, Item, items, now, reading
from kvstore.record import Header, parse_header
from kvstore.results import Rejection
from kvstore.snapshot import ReadView
from kvstore.storefile import STORE_NAME
from kvstore.verify import Checker, fingerprints

RANK_FOLDER: Final = re.compile(r"tp(\d{1,5})of(\d{1,5})-pp(\d{1,5})of(\d{1,5})")
BATCH_BYTES: Final = 2**24
"""Stored bytes that an import writes in one transaction."""
BATCH_SHARE: Final = 32
"""At most this share of the capacity."""
MAX_TOLD: Final = 20
"""Records whose damage a report tells one by one."""
Tick = Callable[[int], Any]
"""Told how many bytes were dealt with since the last time."""


@dataclass
class Report:
    """What an export or an import came to. records and nbytes: that were taken over, and their stored bytes; kept: that
    the store had already; left: that were not taken, by the kind of the rejection; told: the first of them, key and reason;
    gone: that were evicted meanwhile; transient: whose damage a second read did not find; problem: what ended it early."""

    records: int = 0
    nbytes: int = 0
    kept: int = 0
    left: Counter[str] = field(default_factory=Counter)
    told: list[tuple[bytes, str]] = field(default_factory=list)
    gone: int = 0
    transient: int = 0
    damaged: int = 0
    problem: KVStoreError | None = None

    def refuse(self, key: bytes, wrong: Rejection) -> None:
        """Note a record that was not taken."""
        self.left[wrong.kind] += 1
        self.damaged += wrong.condemned or wrong.kind == "fingerprint"
        if len(self.told) < MAX_TOLD:
            self.told.append((key, f"{wrong.kind}: {wrong.detail}"))


class Copying(ReadView):
    """A snapshot that keeps a copy of every chunk it was asked for: what was checked is what is taken along."""

    def __init__(self, snapshot: ReadView) -> None:
        self._snapshot, self.chunks = snapshot, dict[int, bytes]()

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        if number not in self.chunks:
            found = self._snapshot.chunk(sequence, number)
            if found is None:
                return None
            self.chunks[number] = bytes(found)
        return memoryview(self.chunks[number])


class Carried(ReadView):
    """One record that came out of a file, seen as a snapshot of a store."""

    def __init__(self, chunks: Sequence[memoryview]) -> None:
        self._chunks, self.asked = chunks, set[int]()

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        self.asked.add(number)
        return self._chunks[number] if number < len(self._chunks) else None


# --- out ---------------------------------------------------------------------------------------------------------


def export(
    shards: Sequence[BlockDB], file: BinaryIO, chosen: Filter, limit: int | None = None, tick: Tick = int
) -> Report:
    """Write the records that are meant to a file, from each shard in turn; at most `limit`. Damaged ones are left out, and
    told. Raises StoreDamaged where LMDB cannot read, OSError where the file cannot be written."""
    report, writer = Report(), Writer(file, [ranks_of(db.folder) for db in shards], now())
    meant = ((number, db, item) for number, db in enumerate(shards) for item in items(db, chosen))
    taker: _Taker | None = None
    for number, db, item in islice(meant, limit):
        if taker is None or taker.db is not db:
            taker = _Taker(db, number, writer, report)
        tick(taker.take(item))
    writer.end()
    return report


class _Taker:
    """Takes records out of one shard."""

    def __init__(self, db: BlockDB, number: int, writer: Writer, report: Report) -> None:
        self.db, self._number, self._writer, self._report = db, number, writer, report
        self._checker, self._said = Checker(db), set[bytes]()

    def take(self, item: Item) -> int:
        """Write a record to the file; its stored bytes."""
        first = second = self._copy(item.key)
        if first is not None and isinstance(first, Rejection):
            second = self._copy(item.key)
            self._report.transient += isinstance(second, tuple)
        if second is None:
            self._report.gone += 1
        elif isinstance(second, Rejection):
            self._report.refuse(item.key, second)
        else:
            return self._write(item.identity_id, *second)
        return 0

    def _copy(self, key: bytes) -> tuple[bytes, list[bytes]] | Rejection | None:
        """The record's header and chunks, or what is wrong with it, None where it is gone."""
        with reading(self.db) as snapshot:
            value, copying = snapshot.header(key), Copying(snapshot)
            if value is None:
                return None
            wrong = self._checker.wrong(copying, key, value)
        return wrong or (value, [copying.chunks[number] for number in range(len(copying.chunks))])

    def _write(self, identity_id: bytes, header: bytes, chunks: list[bytes]) -> int:
        if identity_id not in self._said:
            self._said.add(identity_id)
            with reading(self.db):
                text = self.db.identity(identity_id)
            if text is not None and identity_digest(text) == identity_id:
                self._writer.identity(self._number, identity_id, text)
        self._writer.record(self._number, header, chunks)
        stored = sum(map(len, chunks))
        self._report.records += 1
        self._report.nbytes += stored
        return stored


def ranks_of(folder: Path) -> Ranks:
    """Which rank's shard a folder is by its name, NO_RANK where the name is another."""
    found = RANK_FOLDER.fullmatch(folder.resolve().name)
    if found is None:
        return NO_RANK
    tp_rank, tp_size, pp_rank, pp_size = map(int, found.groups())
    return (tp_rank, tp_size, pp_rank, pp_size) if _is_rank((tp_rank, tp_size, pp_rank, pp_size)) else NO_RANK


def _is_rank(ranks: Ranks) -> bool:
    try:
        Rank(*ranks)
    except ConfigError:
        return False
    return True


# --- in ----------------------------------------------------------------------------------------------------------


def destinations(head: Head, store: Path) -> list[Path]:
    """The shard's folder for each shard of a file: of the same rank in a store, or the one that the path is. Raises
    ConfigError where that is not clear."""
    if (store / STORE_NAME).is_file():
        if len(head.shards) > 1:
            raise ConfigError(
                f"{store} is one shard, the file has records of {len(head.shards)}: give the store's folder"
            )
        stored, asked = head.shards[0], ranks_of(store)
        if NO_RANK not in (stored, asked) and stored != asked:
            raise ConfigError(f"{store} is another rank's shard than the file's, {Rank(*stored).folder}")
        return [store]
    if not all(map(_is_rank, head.shards)):
        raise ConfigError(f"{store}: the file does not say of which rank its records are: give a shard's folder")
    if len(set(head.shards)) != len(head.shards):
        raise ConfigError(
            "the file has records of two shards of one rank: import it into each shard's folder by itself"
        )
    return [store / Rank(*shard).folder for shard in head.shards]


def bring(reader: Reader, shards: Sequence[BlockDB], replace: bool = False, tick: Tick = int) -> Report:
    """Write a file's records to these shards, open for writing, one for each of the file's. Each transaction is whole and
    synced; being killed leaves those before it.

    An intact entry that lies under a record's key stays, unless `replace`. What ended it early, the file's damage or want of
    room, is the report's `problem`: what was written before stays. Raises nothing else but OSError of the file.
    """
    report = Report()
    bringers = [_Bringer(db, replace, report) for db in shards]
    current = bringers[0]
    try:
        for frame in reader.frames():
            if bringers[frame.shard] is not current:
                current.flush()
            current = bringers[frame.shard]
            current.take(frame)
            tick(frame.nbytes)
    except KVStoreError as error:
        report.problem = error
    try:
        current.flush()
    except KVStoreError as error:
        report.problem = report.problem or error
    return report


class _Bringer:
    """Writes records to one shard, a batch in a transaction."""

    def __init__(self, db: BlockDB, replace: bool, report: Report) -> None:
        self._db, self._replace, self._report = db, replace, report
        self._most = min(BATCH_BYTES, db.capacity_bytes // BATCH_SHARE)
        self._batch: dict[bytes, NewRecord] = {}
        self._bytes = 0
        self._notes: dict[bytes, bytes] = {}
        self._fingerprints: dict[bytes, dict[int, int]] = {}

    def take(self, frame: Frame) -> None:
        """Take what a frame has. Raises KVStoreError where it cannot be written."""
        if frame.body is None:
            self._refuse(frame, "storage_hash", "its bytes changed in the file since it was exported")
        elif frame.kind == IDENTITY:
            self._take_identity(frame, frame.body)
        elif frame.kind == RECORD:
            self._take_record(frame, frame.body)
        else:
            self._refuse(frame, "version", f"a frame of kind {frame.kind}: written by a newer kvstore")

    def _refuse(self, frame: Frame, kind: str, detail: str, key: bytes = b"") -> None:
        condemned = kind not in ("version", "geometry")
        self._report.refuse(key, Rejection(kind, f"at byte {frame.offset:,} of the file: {detail}", condemned))

    def _take_identity(self, frame: Frame, body: bytes) -> None:
        identity_id, text = body[:IDENTITY_ID_BYTES], body[IDENTITY_ID_BYTES:]
        if identity_digest(text) != identity_id:
            return self._refuse(frame, "header", "an identity that is not its id's")
        try:
            known = self._db.identity(identity_id)
        except lmdb.Error as error:
            raise self._failed(error) from None
        if known not in (None, text):
            raise IdentityError(
                f"{self._db.folder} has another identity under the id {identity_id.hex()}: it is damaged, or not the same"
            )
        self._notes[IDENTITY_PREFIX + identity_id] = text
        self._fingerprints[identity_id] = fingerprints(identity_id, text)

    def _take_record(self, frame: Frame, body: bytes) -> None:
        parsed = parse_record(body)
        header = parse_header(parsed[0]) if parsed else Rejection("decode", "its lengths do not fit")
        if parsed is None or isinstance(header, Rejection):
            kind, detail = (header.kind, header.detail) if isinstance(header, Rejection) else ("header", "")
            return self._refuse(frame, kind, detail)
        carried = Carried(parsed[1])
        wrong = audit(carried, header.key, parsed[0]) or self._stranger(header)
        if wrong is None and len(carried.asked) != len(parsed[1]):
            wrong = Rejection("decode", "it has more chunks than its geometry")
        if wrong is not None:
            return self._refuse(frame, wrong.kind, wrong.detail, header.key)
        if header.key in self._batch or self._bytes + header.stored_length > self._most:
            self.flush()
        directory, *chunks = parsed[1]
        self._batch[header.key] = NewRecord(header, bytes(directory), chunks)
        self._bytes += header.stored_length

    def _stranger(self, header: Header) -> Rejection | None:
        group = int.from_bytes(header.key[IDENTITY_ID_BYTES:][:2], "big")
        expected = self._fingerprints.get(header.key[:IDENTITY_ID_BYTES], {}).get(group, header.fingerprint)
        return None if expected == header.fingerprint else Rejection("fingerprint", "stored for other layers")

    def flush(self) -> None:
        """Write what was taken. Raises StorePathError where that is not possible."""
        batch, self._batch, self._bytes = list(self._batch.values()), {}, 0
        if not batch:
            return
        try:
            self._write(batch)
        except lmdb.MapFullError:
            for record in batch if len(batch) > 1 else ():
                self._write_alone(record)
            if len(batch) == 1:
                raise self._full() from None
        except (lmdb.Error, OSError) as error:
            raise self._failed(error) from None

    def _write_alone(self, record: NewRecord) -> None:
        try:
            self._write([record])
        except lmdb.MapFullError:
            raise self._full() from None
        except (lmdb.Error, OSError) as error:
            raise self._failed(error) from None

    def _write(self, records: list[NewRecord]) -> None:
        written = self._db.write(records, self._notes, self._keeps)
        self._notes = {}
        taken = [record for record, new in zip(records, written.stored, strict=True) if new]
        self._report.records += len(taken)
        self._report.nbytes += sum(record.header.stored_length for record in taken)
        self._report.kept += len(records) - len(taken)

    def _keeps(self, key: bytes, old: bytes) -> bool:
        """Whether what lies under a key stays: a damaged entry answers for no block."""
        found = parse_header(bytes(old), key)
        return not self._replace and (isinstance(found, Header) or found.kind == "version")

    def _full(self) -> StorePathError:
        return StorePathError(
            f"{self._db.folder} is full: capacity_bytes {self._db.capacity_bytes:,} has no room for the rest: import it with "
            "a larger --capacity, or drop what is not needed"
        )

    def _failed(self, error: Exception) -> StorePathError:
        return StorePathError(f"{self._db.folder}: writing failed: {error}: look at the disk, and import again")
