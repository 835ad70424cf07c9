"""One shard's records in LMDB: transactions, chunks, index, accounting, quarantine. The only door to storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from kvstore.environment import Environment
from kvstore.quarantine import Quarantine
from kvstore.record import MAX_HEADER_BYTES, Header, chunk_key, parse_header
from kvstore.results import Rejection
from kvstore.storefile import DATA_NAME
from kvstore.usage import MAX_SEQUENCE, Usage

IDENTITY_PREFIX: Final = b"identity:"
USAGE_KEY: Final = b"usage"
T = TypeVar("T")


@dataclass(frozen=True)
class NewRecord:
    """A record to write: its header (sequence number and times are filled in), the directory and the stored chunks,
    which must not change until the write returns."""

    header: Header
    directory: bytes
    chunks: Sequence[memoryview]


class ReadView:
    """A snapshot of the shard. Memoryviews that it gives dangle once the `read()` block ends: copy before."""

    def __init__(self, txn: Any, index: Any, payload: Any) -> None:
        self._txn, self._index, self._payload = txn, index, payload

    def header(self, key: bytes) -> bytes | None:
        """A copy of the index entry under the key, None where there is none; of one that is too long for a header, as
        much as shows that."""
        found = self._txn.get(key, db=self._index)
        return None if found is None else bytes(found[: MAX_HEADER_BYTES + 1])

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        """The stored bytes of a chunk, None where it is missing."""
        found: memoryview | None = self._txn.get(chunk_key(sequence, number), db=self._payload)
        return found


class BlockDB(Environment):
    """One shard. Owned by one KVStore; threads, forks and close as Environment."""

    def __init__(self, folder: Path, capacity_bytes: int, sync: bool, writable: bool, quarantine_bytes: int) -> None:
        super().__init__(folder, capacity_bytes, sync, writable)
        self.quarantine = Quarantine(self._quarantined, quarantine_bytes)
        self._freed = writable

    @contextmanager
    def read(self) -> Iterator[ReadView]:
        """A snapshot inside a call; keep it short, since pages freed meanwhile are not reused."""
        with self._begin() as txn:
            yield ReadView(txn, self._index, self._payload)

    def identity(self, identity_id: bytes) -> bytes | None:
        """The canonical JSON that was stored for this identity id."""
        with self._begin() as txn:
            found = txn.get(IDENTITY_PREFIX + identity_id, db=self._meta)
            return None if found is None else bytes(found)

    def write(
        self, records: Sequence[NewRecord], identity: tuple[bytes, bytes], keep: Callable[[bytes, bytes], bool]
    ) -> list[bool]:
        """Write records in one transaction, each replacing what lies under its key.

        identity: (id, canonical JSON), stored beside the first record. keep(key, header): whether what lies there
        makes the new record unnecessary. Returns for each record whether it was written, False where that was kept.
        Raises lmdb.MapFullError where the capacity is used up, lmdb.Error or OSError where writing failed; then
        nothing of this call is stored.
        """
        return self._with_room(lambda: self._write_all(records, identity, keep))

    def _write_all(
        self, records: Sequence[NewRecord], identity: tuple[bytes, bytes], keep: Callable[[bytes, bytes], bool]
    ) -> list[bool]:
        with self._write() as txn:
            usage = self._usage(txn)
            if txn.get(IDENTITY_PREFIX + identity[0], db=self._meta) != identity[1]:
                txn.put(IDENTITY_PREFIX + identity[0], identity[1], db=self._meta)
            written = [self._put(txn, record, usage, keep) for record in records]
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)
        return written

    def _with_room(self, work: Callable[[], T]) -> T:
        """Do a transaction's work; where it finds no room, once more with the pages that may have become free."""
        try:
            return work()
        except lmdb.MapFullError:
            if not self._reclaim():
                raise
        return work()

    def _reclaim(self) -> bool:
        """Make pages that were freed usable: LMDB does so two transactions later, and one that finds no room does not
        count. Whether anything may have become free since the last time."""
        if not self._freed:
            return False
        self._freed = False
        try:
            for _ in range(2):
                with self._write() as txn:
                    txn.put(USAGE_KEY, self._usage(txn).encode(), db=self._meta)
        except lmdb.MapFullError:
            return False
        return True

    def _usage(self, txn: Any) -> Usage:
        """The accounting, with a last sequence number that no chunk exceeds, whatever became of the stored one."""
        usage = Usage.parse(txn.get(USAGE_KEY, db=self._meta))
        with txn.cursor(db=self._payload) as cursor:
            beyond = cursor.set_range(chunk_key(MAX_SEQUENCE, 0))
            if cursor.prev() if beyond else cursor.last():
                usage.last_sequence = max(usage.last_sequence, int.from_bytes(cursor.key()[:8], "big"))
        return usage

    def _put(self, txn: Any, record: NewRecord, usage: Usage, keep: Callable[[bytes, bytes], bool]) -> bool:
        key = record.header.key
        old = txn.get(key, db=self._index)
        if old is not None and keep(key, old):
            return False
        now = time.time_ns() // 1000
        sequence = usage.next_sequence(now)
        txn.put(key, record.header.encode(sequence, now), db=self._index)
        for number, chunk in enumerate((record.directory, *record.chunks)):
            chunk_at = chunk_key(sequence, number)
            if not txn.put(chunk_at, chunk, db=self._payload, append=True):
                txn.put(chunk_at, chunk, db=self._payload)
        usage.add(record.header)
        if old is not None:
            header = parse_header(old)
            usage.remove(header)
            self._release(txn, header)
        return True

    def _release(self, txn: Any, header: Header | Rejection) -> None:
        """Free the chunks that a header names, unless a valid index entry does too. One that fails its hash frees
        nothing."""
        if not isinstance(header, Header):
            return
        current = txn.get(header.key, db=self._index)
        named = parse_header(current, header.key) if current is not None else None
        if isinstance(named, Header) and named.sequence == header.sequence:
            return
        self._freed = True
        with txn.cursor(db=self._payload) as cursor:
            prefix = chunk_key(header.sequence, 0)[:8]
            while cursor.set_range(prefix) and cursor.key()[:8] == prefix:
                cursor.delete()

    def condemn(self, entries: Sequence[tuple[bytes, bytes, str]]) -> int:
        """Move index entries to quarantine: (key, value, kind of the rejection) each, if what lies under the key still is
        the value. In one transaction, or one by one where that finds no room. Returns how many found none.

        Raises lmdb.Error or OSError where writing failed otherwise.
        """
        try:
            self._with_room(lambda: self._condemn_all(entries))
            return 0
        except lmdb.MapFullError:
            if len(entries) == 1:
                return 1
        return sum(self.condemn([entry]) for entry in entries)

    def _condemn_all(self, entries: Sequence[tuple[bytes, bytes, str]]) -> None:
        with self._write() as txn:
            usage = self._usage(txn)
            for entry in entries:
                self._condemn(txn, usage, *entry)
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)

    def _condemn(self, txn: Any, usage: Usage, key: bytes, value: bytes, kind: str) -> None:
        if (txn.get(key, db=self._index) or b"")[: MAX_HEADER_BYTES + 1] != value:
            return
        txn.delete(key, db=self._index)
        usage.remove(parse_header(value))
        for dropped in self.quarantine.add(txn, usage, key, value, kind):
            self._release(txn, parse_header(dropped))

    def usage(self) -> dict[str, int]:
        """Records, bytes and quarantine, as the last transaction left them, and the file's size in bytes."""
        with self._begin() as txn:
            usage = Usage.parse(txn.get(USAGE_KEY, db=self._meta))
            records = txn.stat(self._index)["entries"]
        data = self.folder / DATA_NAME
        file_bytes = data.stat().st_size if data.exists() else 0
        return {"records": records, **usage.figures(), "file_bytes": file_bytes, "capacity_bytes": self.capacity_bytes}
