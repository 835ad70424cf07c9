"""The LMDB environment of one shard: transactions, chunks, index, accounting, quarantine. The only door to storage."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np

from kvstore.errors import (
    ConfigError,
    KVStoreError,
    StoreAlreadyOpen,
    StoreClosed,
    StoreDamaged,
    StoreForked,
    StorePathError,
    StorePermissionError,
)
from kvstore.quarantine import Quarantine
from kvstore.record import MAX_HEADER_BYTES, Header, chunk_key, parse_header
from kvstore.storefile import (
    DATA_NAME,
    StoreFile,
    StoreState,
    boot_id,
    check_data_file,
    check_strangers,
    claim,
    make_folder,
    path_errors,
    release,
    reserve,
    sync_folder,
)
from kvstore.usage import MAX_SEQUENCE, Usage

log = logging.getLogger(__name__)

LMDB_ENGINE: Final = 0
"""The 0.9 engine, pinned: an environment variable could change py-lmdb's default, and the files differ."""
PAGE_BYTES: Final = 4096
MAX_READERS: Final = 512
LOCK_NAME: Final = "lock.mdb"
LOCK_BYTES: Final = 10 * PAGE_BYTES
"""64 bytes a reader, and a header."""
DATABASES: Final = (b"meta", b"index", b"payload", b"quarantine")
IDENTITY_PREFIX: Final = b"identity:"
USAGE_KEY: Final = b"usage"
CLOSE_TIMEOUT: Final = 60.0


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


class BlockDB:
    """One shard's environment.

    Owned by one KVStore. Any thread may call it; writes take turns. A shard has one writer, which holds the lock of
    its STORE file, and is opened once in a process. After a fork the child gets StoreForked; after close, everyone
    gets StoreClosed. close waits for calls in flight, so that no memory is unmapped under them.
    """

    def __init__(self, folder: Path, capacity_bytes: int, sync: bool, writable: bool, quarantine_bytes: int) -> None:
        self.folder, self.sync, self.writable = folder, sync, writable
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.emptied = False
        self._pid = os.getpid()
        self._gate = threading.Condition()
        self._active, self._closing = 0, False
        self._maps, self._waiting = 0, 0
        self._write_lock = threading.Lock()
        self._quarantine_bytes = quarantine_bytes
        self._opened_as = claim(folder)
        try:
            with path_errors(folder, "expected a shard's folder, on a file system with room"):
                self._open()
        except BaseException:
            self._closing = True
            release(self._opened_as)
            raise

    def _open(self) -> None:
        if self.writable:
            make_folder(self.folder)
        check_strangers(self.folder)
        self.store_file = StoreFile(self.folder, self.writable)
        try:
            self._prepare()
            known = check_data_file(self.folder / DATA_NAME)
            if not self.writable and not known:
                raise StorePathError(f"{self.folder}: no {DATA_NAME} there: expected a shard that a writer has made")
            if self.writable:
                reserve(self.folder / LOCK_NAME, LOCK_BYTES)
            try:
                self._environment(self.capacity_bytes if self.writable else known, new=not known)
            except lmdb.Error as error:
                raise self._cannot_open(error, new=not known) from None
        except BaseException:
            self.store_file.close()
            raise

    def _prepare(self) -> None:
        """Empty a shard whose unsynced writes another boot may have lost; say `unclean` before LMDB makes a file."""
        state, data = self.store_file.state, self.folder / DATA_NAME
        lost = state is not None and not state.clean and state.boot_id != boot_id()
        if lost and not self.writable:
            raise StoreDamaged(
                f"{self.folder}: it was not closed before the machine went down, in a mode that does not survive that: "
                'open it once with mode="rw", which empties it'
            )
        if lost:
            log.warning("%s: emptied: it was not closed, in a mode that does not survive a power loss", self.folder)
            for name in (DATA_NAME, LOCK_NAME):
                (self.folder / name).unlink(missing_ok=True)
            self.emptied = True
        if state is None and self.writable:
            self.store_file.write(StoreState(os.urandom(16), boot_id(), False, time.time_ns() // 1000))
            sync_folder(self.folder)
        elif self.writable and not data.exists():
            self._mark(clean=False)

    def _environment(self, map_size: int, new: bool) -> None:
        self._env = lmdb.open(
            str(self.folder),
            map_size=map_size,
            readonly=not self.writable,
            sync=self.sync,
            mode=0o600,
            create=self.writable,
            meminit=False,
            max_readers=MAX_READERS,
            max_dbs=len(DATABASES),
            lib_version=LMDB_ENGINE,
        )
        try:
            self._env.reader_check()
            opened = [self._env.open_db(name, create=self.writable) for name in DATABASES]
            if new:
                sync_folder(self.folder)
            if self.writable and self.sync and not (self.store_file.state or _NEVER).clean:
                self._env.sync(True)
                self._mark(clean=True)
        except BaseException:
            self._env.close()
            raise
        self._meta, self._index, self._payload, quarantine = opened
        if self.writable:
            _keep_freed_memory()
        self.quarantine = Quarantine(quarantine, self._quarantine_bytes)

    def _cannot_open(self, error: lmdb.Error, new: bool) -> KVStoreError:
        """What LMDB's refusal to open the shard means."""
        if isinstance(error, lmdb.MemoryError):
            return ConfigError(f"capacity_bytes {self.capacity_bytes} cannot be mapped ({error}): choose a smaller one")
        if "ermission" in str(error):
            return StorePermissionError(f"{self.folder}: {error}: make it this user's, or give another path")
        if "already open" in str(error):
            return StoreAlreadyOpen(f"{self.folder}: {error} Or by its parent, before a fork: spawn a process for it")
        if new:
            (self.folder / DATA_NAME).unlink(missing_ok=True)
            return StorePathError(f"{self.folder}: LMDB cannot make its file: {error}: is the file system full?")
        return StoreDamaged(f"{self.folder}: LMDB cannot open it: {error}; restore it, or remove the folder")

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the shard."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise StoreForked in the child of a fork, StoreClosed after close. Takes no lock, which a fork may hold."""
        if self.forked:
            raise StoreForked(
                f"{self.folder} was opened by process {self._pid}, this is its fork {os.getpid()}: let the child open a "
                "shard of its own, or spawn it instead of forking"
            )
        if self._closing:
            raise StoreClosed(f"{self.folder} was closed: open the store again")

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Hold the environment open for one call."""
        self.check_open()
        with self._gate:
            self.check_open()
            self._active += 1
        try:
            yield
        finally:
            with self._gate:
                self._active -= 1
                self._gate.notify_all()

    @contextmanager
    def read(self) -> Iterator[ReadView]:
        """A snapshot; keep it short, since pages freed meanwhile are not reused."""
        with self._entered(), self._begin() as txn:
            yield ReadView(txn, self._index, self._payload)

    def _begin(self) -> Any:
        """A read transaction for a call that has entered. Another process may have grown the file past the map."""
        while True:
            seen = self._maps
            try:
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._map_anew(seen)

    def _map_anew(self, seen: int) -> None:
        """Adopt the file's map size while no call has a transaction, since the old map goes away under it."""
        with self._gate:
            self._waiting += 1
            self._gate.notify_all()
            self._gate.wait_for(lambda: self._maps != seen or self._active == self._waiting)
            self._waiting -= 1
            if self._maps == seen:
                self._env.set_mapsize(0)
                self._maps += 1
                self._gate.notify_all()

    @contextmanager
    def _write(self) -> Iterator[Any]:
        with self._entered(), self._write_lock:
            if not self.sync:
                self._mark(clean=False)
            with self._env.begin(write=True) as txn:
                yield txn

    def _mark(self, clean: bool) -> None:
        state = self.store_file.state or _NEVER
        if (state.clean, state.boot_id) != (clean, boot := boot_id()):
            self.store_file.write(replace(state, clean=clean, boot_id=boot))

    def identity(self, identity_id: bytes) -> bytes | None:
        """The canonical JSON that was stored for this identity id."""
        with self._entered(), self._begin() as txn:
            found = txn.get(IDENTITY_PREFIX + identity_id, db=self._meta)
            return None if found is None else bytes(found)

    def write(
        self, records: Sequence[NewRecord], identity: tuple[bytes, bytes], keep: Callable[[bytes, bytes], bool]
    ) -> list[bytes | None]:
        """Write records in one transaction, each replacing what lies under its key.

        identity: (id, canonical JSON), stored beside the first record. keep(key, header): whether what lies there
        makes the new record unnecessary. Returns the new header's bytes for each record, None where it was kept.
        Raises lmdb.MapFullError where the capacity is used up, lmdb.Error or OSError where writing failed; then
        nothing of this call is stored.
        """
        with self._write() as txn:
            usage = self._usage(txn)
            if txn.get(IDENTITY_PREFIX + identity[0], db=self._meta) != identity[1]:
                txn.put(IDENTITY_PREFIX + identity[0], identity[1], db=self._meta)
            written = [self._put(txn, record, usage, keep) for record in records]
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)
        return written

    def _usage(self, txn: Any) -> Usage:
        """The accounting, with a last sequence number that no chunk exceeds, whatever became of the stored one."""
        usage = Usage.parse(txn.get(USAGE_KEY, db=self._meta))
        with txn.cursor(db=self._payload) as cursor:
            beyond = cursor.set_range(chunk_key(MAX_SEQUENCE, 0))
            if cursor.prev() if beyond else cursor.last():
                usage.last_sequence = max(usage.last_sequence, int.from_bytes(cursor.key()[:8], "big"))
        return usage

    def _put(self, txn: Any, record: NewRecord, usage: Usage, keep: Callable[[bytes, bytes], bool]) -> bytes | None:
        key = record.header.key
        old = txn.get(key, db=self._index)
        if old is not None and keep(key, old):
            return None
        now = time.time_ns() // 1000
        sequence = usage.next_sequence(now)
        header = record.header.encode(sequence, now)
        txn.put(key, header, db=self._index)
        for number, chunk in enumerate((record.directory, *record.chunks)):
            chunk_at = chunk_key(sequence, number)
            if not txn.put(chunk_at, chunk, db=self._payload, append=True):
                txn.put(chunk_at, chunk, db=self._payload)
        usage.add(record.header)
        if old is not None:
            self._forget(txn, old, usage)
        return header

    def _forget(self, txn: Any, old: bytes, usage: Usage) -> None:
        """Account for an index entry that is gone, and free its chunks."""
        header = parse_header(old)
        usage.remove(header if isinstance(header, Header) else None)
        self._release(txn, header)

    def _release(self, txn: Any, header: object) -> None:
        """Free the chunks that a header names, unless a valid index entry does too. One that fails its hash frees
        nothing."""
        if not isinstance(header, Header):
            return
        current = txn.get(header.key, db=self._index)
        named = parse_header(current, header.key) if current is not None else None
        if isinstance(named, Header) and named.sequence == header.sequence:
            return
        with txn.cursor(db=self._payload) as cursor:
            prefix = chunk_key(header.sequence, 0)[:8]
            while cursor.set_range(prefix) and cursor.key()[:8] == prefix:
                cursor.delete()

    def condemn(self, key: bytes, value: bytes, kind: str) -> bool:
        """Move an index entry to quarantine, if it still is `value`; False where it was replaced meanwhile.

        Raises as `write` does.
        """
        with self._write() as txn:
            if (txn.get(key, db=self._index) or b"")[: MAX_HEADER_BYTES + 1] != value:
                return False
            usage = self._usage(txn)
            txn.delete(key, db=self._index)
            header = parse_header(value)
            usage.remove(header if isinstance(header, Header) else None)
            for dropped in self.quarantine.add(txn, usage, key, value, kind):
                self._release(txn, parse_header(dropped))
            txn.put(USAGE_KEY, usage.encode(), db=self._meta)
        return True

    def usage(self) -> dict[str, int]:
        """Records, bytes and quarantine, as the last transaction left them, and the file's size in bytes."""
        with self._entered(), self._begin() as txn:
            usage = Usage.parse(txn.get(USAGE_KEY, db=self._meta))
            records = txn.stat(self._index)["entries"]
        data = self.folder / DATA_NAME
        file_bytes = data.stat().st_size if data.exists() else 0
        return {"records": records, **usage.figures(), "file_bytes": file_bytes, "capacity_bytes": self.capacity_bytes}

    def __del__(self) -> None:
        """A store that was dropped without close gives its shard up."""
        if hasattr(self, "_env"):
            self.close()

    def close(self) -> None:
        """Wait for calls in flight, sync, and give the shard up. Twice is allowed; in a fork's child it does nothing."""
        if self.forked:
            return
        with self._gate:
            if self._closing:
                return
            self._closing = True
            if not self._gate.wait_for(lambda: self._active == 0, CLOSE_TIMEOUT):
                log.error("%s: closed with %d calls still in flight; left mapped", self.folder, self._active)
                return
        try:
            if self.writable and not self.sync:
                self._env.sync(True)
                self._mark(clean=True)
        finally:
            self._env.close()
            self.store_file.close()
            release(self._opened_as)


def _keep_freed_memory() -> None:
    """Have glibc's malloc keep what LMDB frees after each transaction.

    LMDB allocates its dirty pages anew in each transaction; by default glibc maps and unmaps them, and the kernel
    clears every page again, which takes longer than the copy. Freeing one allocation of just under 32 MiB raises
    both of glibc's thresholds (mallopt(3), M_MMAP_THRESHOLD: the dynamic threshold). Untouched, it costs no memory.
    """
    np.empty(32 * 2**20 - 2**16, np.uint8)


_NEVER: Final = StoreState(b"", b"", True, 0)
