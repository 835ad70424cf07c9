"""One shard's records in LMDB: transactions, chunks, index, accounting, quarantine. The only door to storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from kvstore.following import HOLD_PATIENCE_S, Following
from kvstore.lifetime import POLL_SECONDS
from kvstore.quarantine import Quarantine
from kvstore.record import MAX_HEADER_BYTES, Header, chunk_key, parse_header
from kvstore.results import Rejection
from kvstore.snapshot import NOTHING
from kvstore.snapshot import ReadView as ReadView
from kvstore.space import OVERDRAFT_BYTES, READERS_BEHIND, oldest_snapshot, usable_bytes, used_bytes
from kvstore.storefile import DATA_NAME
from kvstore.usage import MAX_SEQUENCE, Usage

IDENTITY_PREFIX: Final = b"identity:"
USAGE_KEY: Final = b"usage"
EVICT_AT_ONCE: Final = 256
"""Records that one transaction deletes at most: each frees up to some thousand pages, which the free list then names."""
READER_PATIENCE_S: Final = 0.5
"""How long a deletion waits for loads to end whose snapshots keep freed pages."""
NEVER_ENOUGH: Final = 2**63
QUARANTINE_SHARE: Final = 8
"""Condemned records take at most this share of the capacity: they cannot be evicted."""
T = TypeVar("T")
Victim = tuple[bytes, ...]
"""What goes together: every record whose index key begins with one of these."""


@dataclass(frozen=True)
class NewRecord:
    """A record to write: its header (sequence number and times are filled in), the directory and the stored chunks,
    which must not change until the write returns."""

    header: Header
    directory: bytes
    chunks: Sequence[memoryview]


@dataclass(frozen=True)
class Written:
    """stored: for each record whether it was written; evicted: the index keys of the records that went; tried: how many
    victims that took."""

    stored: list[bool]
    evicted: list[bytes]
    tried: int


class BlockDB(Following):
    """One shard. Owned by one KVStore; threads, forks and close as Environment."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        sync: bool,
        writable: bool,
        quarantine_bytes: int,
        patience_s: float = HOLD_PATIENCE_S,
        patient: bool = False,
    ) -> None:
        self._quarantine_bytes = quarantine_bytes
        super().__init__(folder, capacity_bytes, sync, writable, patience_s, patient)
        self._freed = writable

    def _environment(self, map_size: int, new: bool) -> None:
        super()._environment(map_size, new)
        most = min(self._quarantine_bytes, self.capacity_bytes // QUARANTINE_SHARE)
        self.quarantine = Quarantine(self._quarantined, most)

    @contextmanager
    def read(self, wait: bool = True) -> Iterator[ReadView]:
        """A snapshot inside a call; keep it short, since pages freed meanwhile are not reused. wait: False where the call has
        a snapshot of another shard (`_begin`)."""
        if self.gone:
            yield NOTHING
            return
        with self._begin(wait) as txn:
            yield ReadView(txn, self._index, self._payload, self._quarantined)

    def identity(self, identity_id: bytes) -> bytes | None:
        """The canonical JSON that was stored for this identity id."""
        with self._begin() as txn:
            found = txn.get(IDENTITY_PREFIX + identity_id, db=self._meta)
            return None if found is None else bytes(found)

    def identities(self) -> dict[bytes, bytes]:
        """What was stored as canonical JSON for each identity id; nothing of it is trusted."""
        with self._begin() as txn, txn.cursor(db=self._meta) as cursor:
            there: Iterator[Any] = cursor.iternext() if cursor.set_range(IDENTITY_PREFIX) else iter(())
            named = takewhile(
                lambda item: item[0].startswith(IDENTITY_PREFIX), ((bytes(k), bytes(v)) for k, v in there)
            )
            return {name.removeprefix(IDENTITY_PREFIX): text for name, text in named}

    def forget(self, identity_id: bytes) -> None:
        """Delete an identity's JSON; its records stay. Raises lmdb.Error or OSError."""
        self._with_room(partial(self._forget, identity_id))

    def _forget(self, identity_id: bytes) -> None:
        with self._write() as txn:
            txn.delete(IDENTITY_PREFIX + identity_id, db=self._meta)

    def write(
        self,
        records: Sequence[NewRecord],
        notes: Mapping[bytes, bytes],
        keep: Callable[[bytes, bytes], bool],
        victims: Sequence[Victim] = (),
        spare: int = 0,
    ) -> Written:
        """Write records in one transaction, each replacing what lies under its key.

        notes: what `meta` must say besides, by key. keep(key, header): whether what lies under a key makes the new record
        unnecessary. victims: what to evict, first to last, until `spare` bytes are free. Raises lmdb.MapFullError where
        the capacity is used up, lmdb.Error or OSError where writing failed; then nothing of this call is stored, and nothing
        evicted.
        """
        return self._with_room(lambda: self._write_all(records, notes, keep, victims, spare))

    def _write_all(
        self,
        records: Sequence[NewRecord],
        notes: Mapping[bytes, bytes],
        keep: Callable[[bytes, bytes], bool],
        victims: Sequence[Victim],
        spare: int,
    ) -> Written:
        with self._accounted() as (txn, usage):
            for name, note in notes.items():
                if txn.get(name, db=self._meta) != note:
                    txn.put(name, note, db=self._meta)
            stored = [self._put(txn, record, usage, keep) for record in records]
            evicted, tried = self._evict_until(txn, usage, victims, spare)
            if any(stored) and self._free(txn) < -OVERDRAFT_BYTES:
                raise lmdb.MapFullError("what deleting needs would be used up")
        return Written(stored, evicted, tried)

    def write_notes(self, notes: Mapping[bytes, bytes]) -> None:
        """Write down what `meta` must say, by key. Raises lmdb.Error or OSError."""
        self.write((), notes, lambda key, old: True)

    def evict(self, victims: Sequence[Victim], spare: int) -> tuple[list[bytes], int]:
        """Evict until `spare` bytes are free, in transactions of bounded size: the index keys of the records that went, and
        how many victims that took.

        Raises lmdb.Error or OSError where writing failed; what went before is gone.
        """
        evicted, tried = list[bytes](), 0
        while tried < len(victims) and self.free_bytes() < spare:
            gone, count = self._evict_some(victims[tried : tried + EVICT_AT_ONCE], spare)
            evicted, tried = evicted + gone, tried + count
        return evicted, tried

    def _evict_some(self, victims: Sequence[Victim], spare: int) -> tuple[list[bytes], int]:
        """Evict the first of the victims in one transaction: all, or fewer where there is no room for copies of the pages
        that it changes. Small records share pages with others, and free none until the last one on a page goes; and loads
        of this process keep what was freed for as long as they read."""
        deadline = time.monotonic() + READER_PATIENCE_S
        while True:
            try:
                return self._with_room(partial(self._evict_all, victims, spare))
            except lmdb.MapFullError:
                if len(victims) == 1 and time.monotonic() > deadline:
                    raise
            if len(victims) == 1:
                time.sleep(POLL_SECONDS)
            self._freed, victims = True, victims[: max(1, len(victims) // 2)]

    def _evict_all(self, victims: Sequence[Victim], spare: int) -> tuple[list[bytes], int]:
        with self._accounted() as (txn, usage):
            return self._evict_until(txn, usage, victims, spare)

    def _evict_until(self, txn: Any, usage: Usage, victims: Sequence[Victim], spare: int) -> tuple[list[bytes], int]:
        evicted: list[bytes] = []
        for tried, victim in enumerate(victims):
            if self._free(txn) >= spare:
                return evicted, tried
            for start in victim:
                evicted += self._delete(txn, usage, start)
        return evicted, len(victims)

    def _delete(self, txn: Any, usage: Usage, start: bytes) -> list[bytes]:
        """Delete the records whose index keys begin with `start`; returns the keys."""
        gone: list[bytes] = []
        with txn.cursor(db=self._index) as cursor:
            while cursor.set_range(start) and bytes(cursor.key()).startswith(start):
                key, header = bytes(cursor.key()), parse_header(bytes(cursor.value()[: MAX_HEADER_BYTES + 1]))
                cursor.delete()
                usage.remove(header)
                self._release(txn, header)
                gone.append(key)
        return gone

    def drop(self, start: bytes = b"") -> list[bytes]:
        """Delete all records whose index keys begin with `start`, in transactions of bounded size; returns the keys.

        Raises lmdb.Error or OSError where writing failed; what went before is gone.
        """
        gone, fruitless = list[bytes](), list[bytes]()
        while keys := self.keys(start, EVICT_AT_ONCE):
            found = self._evict_some([(key,) for key in keys], NEVER_ENOUGH)[0]
            if not found and keys == fruitless:
                raise lmdb.CorruptedError("what the index lists cannot be found in it")
            gone, fruitless = gone + found, [] if found else keys
        return gone

    def keys(self, start: bytes, most: int) -> list[bytes]:
        """The first index keys that begin with `start`, `most` at most."""
        with self._begin() as txn, txn.cursor(db=self._index) as cursor:
            there: Iterator[Any] = cursor.iternext(values=False) if cursor.set_range(start) else iter(())
            return list(takewhile(lambda key: key.startswith(start), map(bytes, islice(there, most))))

    def entries(self) -> Iterator[tuple[memoryview, memoryview]]:
        """All index keys and entries in order; views of each dangle once the next is taken."""
        with self._begin() as txn, txn.cursor(db=self._index) as cursor:
            yield from cursor

    def trim_quarantine(self) -> None:
        """Let the oldest condemned records go that are past the bound. Raises lmdb.Error or OSError."""
        self._with_room(partial(self._let_go, self.quarantine.trim))

    def drop_condemned(self, names: Sequence[bytes]) -> int:
        """Let condemned records go whose quarantine keys these are; how many there were. Raises lmdb.Error or OSError."""
        return self._with_room(partial(self._let_go, partial(self.quarantine.remove, names)))

    def _let_go(self, choose: Callable[[Any, Usage], list[bytes]]) -> int:
        with self._accounted() as (txn, usage):
            dropped = choose(txn, usage)
            for value in dropped:
                self._release(txn, parse_header(value))
        return len(dropped)

    def any_present(self, keys: Sequence[bytes]) -> bool:
        """Whether any of these is an index key; True where that cannot be read."""
        try:
            with self.read() as snapshot:
                return any(entry is not None for entry in snapshot.headers(keys))
        except lmdb.Error:
            return True

    def num_entries(self) -> int:
        """How many index entries LMDB says there are."""
        with self._begin() as txn:
            entries: int = txn.stat(self._index)["entries"]
            return entries

    def note(self, name: bytes) -> bytes:
        """What `meta` says under a name; empty where it says nothing."""
        with self._begin() as txn:
            return bytes(txn.get(name, b"", db=self._meta))

    def free_bytes(self) -> int:
        """Bytes that records could take: what the capacity has and no database uses. Below 0 where too much is used.
        Pages that were freed lately count, but serve only two transactions later."""
        with self._begin() as txn:
            return self._free(txn)

    def _free(self, txn: Any) -> int:
        databases = (self._meta, self._index, self._payload, self._quarantined)
        return usable_bytes(self.capacity_bytes) - used_bytes(txn, databases)

    def reader_holds_space(self) -> bool:
        """Whether a snapshot keeps pages that were freed from being used again."""
        self._env.reader_check()
        oldest = oldest_snapshot(self._env.readers())
        return oldest is not None and oldest <= self._env.info()["last_txnid"] - READERS_BEHIND

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
                with self._accounted():
                    pass
        except lmdb.MapFullError:
            return False
        return True

    @contextmanager
    def _accounted(self) -> Iterator[tuple[Any, Usage]]:
        """A write transaction and the accounting, which is written with it."""
        with self._write() as txn:
            usage = self._usage(txn)
            yield txn, usage
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)

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
        with self._accounted() as (txn, usage):
            for entry in entries:
                self._condemn(txn, usage, *entry)

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
            records, free = txn.stat(self._index)["entries"], self._free(txn)
        data = self.folder / DATA_NAME
        file_bytes = data.stat().st_size if data.exists() else 0
        figures = {"file_bytes": file_bytes, "free_bytes": free, "capacity_bytes": self.capacity_bytes}
        return {"records": records, **usage.figures(), **figures}
