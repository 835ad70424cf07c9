"""A shard's database mapped for reading alone, whatever is in it: in a process that may be ended by it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np

from kvstore.blockdb import IDENTITY_PREFIX
from kvstore.environment import DATABASES, HOLD_PATIENCE_S, LMDB_ENGINE, MAX_READERS
from kvstore.errors import StoreBusy, StorePathError, StorePermissionError
from kvstore.fsck.pages import PageFile
from kvstore.record import chunk_key
from kvstore.snapshot import ReadView
from kvstore.storefile import DATA_NAME, MAX_MAP, STORE_NAME, newest_meta

POLL_SECONDS: Final = 0.01
PAGE_HEADER: Final = 16


class DatabaseMissing(lmdb.Error):
    """One of the four databases is not there, and others are."""


class Reading:
    """One shard's environment, read-only. Belongs to one thread. It is registered as LMDB's readers are; where this user
    cannot, it goes without that if nobody writes the shard.

    Raises StoreBusy where the file is being rewritten, StorePermissionError where it cannot be read beside its writer,
    StorePathError where the system refuses it, StoreDamaged without an intact meta page, lmdb.Error and OSError.
    """

    def __init__(self, shard: Path) -> None:
        self._data = shard / DATA_NAME
        self._fd = self._hold()
        try:
            meta, size = newest_meta(self._data)
            named = meta.map_size if meta and meta.map_size < MAX_MAP else 0
            self.page_size = meta.page_size if meta else 4096
            lock = os.access(shard, os.W_OK)
            if not lock:
                _check_unwritten(shard)
            self._env = self._environment(shard, max(size, named), lock)
        except BaseException:
            os.close(self._fd)
            raise
        if lock:
            self._env.reader_check()
        self._databases: list[Any] = []
        self._base: int | None = None

    def _environment(self, shard: Path, map_size: int, lock: bool) -> Any:
        try:
            return lmdb.open(
                str(shard),
                map_size=map_size,
                readonly=True,
                create=False,
                mode=0o600,
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                lock=lock,
                lib_version=LMDB_ENGINE,
            )
        except lmdb.Error as error:
            if type(error) is lmdb.Error:
                # An error of the system's, not of the file's content.
                raise StorePathError(f"{shard}: LMDB cannot open it: {error}: check it as its owner") from None
            raise

    def _hold(self) -> int:
        """Keep data.mdb from being replaced, as readers do."""
        deadline = time.monotonic() + HOLD_PATIENCE_S
        while True:
            fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._data)):
                    return fd
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(fd)
                    raise StoreBusy(f"{self._data}: it is being rewritten: check it again in a while") from None
            os.close(fd)
            time.sleep(POLL_SECONDS)

    def open_databases(self) -> bool:
        """Whether there are databases: none are in a shard whose making was interrupted. Raises DatabaseMissing."""
        found, missing = [], []
        for name in DATABASES:
            try:
                found.append(self._env.open_db(name, create=False))
            except lmdb.NotFoundError:
                missing.append(name.decode())
        if missing and (found or self._env.stat()["entries"]):
            raise DatabaseMissing(f"databases are missing: {', '.join(missing)}")
        self._databases = found
        return not missing

    @contextmanager
    def begin(self) -> Iterator[Any]:
        """A read transaction. Another process may have grown the file past the map."""
        try:
            txn = self._env.begin(buffers=True)
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)
            self._base = None
            txn = self._env.begin(buffers=True)
        with txn:
            yield txn

    @contextmanager
    def snapshot(self) -> Iterator[ReadView]:
        """A snapshot of the databases."""
        with self.begin() as txn:
            _, index, payload, condemned = self._databases
            yield ReadView(txn, index, payload, condemned)

    @property
    def databases(self) -> dict[str, Any]:
        """meta, index, payload and quarantine."""
        return dict(zip(map(bytes.decode, DATABASES), self._databases, strict=False))

    def last_transaction(self) -> int:
        """The number of the last transaction that wrote."""
        return int(self._env.info()["last_txnid"])

    def place(self, value: memoryview) -> tuple[int | None, int]:
        """The first page that a value of a snapshot lies on, None where that cannot be told, and how many."""
        if self._base is None:
            self._base = _map_address(self._fd)
        if not self._base or not len(value):
            return None, 0
        offset = np.frombuffer(value, np.uint8).ctypes.data - self._base
        first, last = offset // self.page_size, (offset + len(value) - 1) // self.page_size
        return (first, last - first + 1) if offset > 0 else (None, 0)

    def close(self) -> None:
        """Close the environment and let the file go."""
        self._env.close()
        os.close(self._fd)


class Plain:
    """A shard's newest transaction by plain reads, which nothing in the file ends: where trees do not hold together it tells
    what LMDB can be asked for. Belongs to one thread. Raises OSError."""

    def __init__(self, shard: Path) -> None:
        self._file = PageFile(shard / DATA_NAME)
        self._index, self._payload, self._meta = map(self._file.root, (b"index", b"payload", b"meta"))
        self.lost = set[int]()
        """Pages of the index that were met and are none."""

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def entries(self, start: bytes, most: int) -> list[tuple[bytes, bytes]]:
        """Index keys from `start` on and their entries, `most` at most."""
        return list(islice(self._file.entries(self._index, start, self.lost), most))

    def identities(self) -> dict[bytes, bytes]:
        """Canonical JSON by identity id."""
        found = {}
        for key, text in self._file.entries(self._meta, IDENTITY_PREFIX):
            if not key.startswith(IDENTITY_PREFIX):
                break
            found[key.removeprefix(IDENTITY_PREFIX)] = text
        return found

    def obstacle(self, sequence: int, chunks: int) -> tuple[int, bool] | None:
        """A page without which some of a record's first chunks cannot be read, and whether it lies past the end of the file;
        None where there is no such page."""
        for number in range(chunks):
            page = self._file.obstacle(self._payload, chunk_key(sequence, number))
            if page is not None:
                return page, page >= self._file.pages
        return None


def _map_address(fd: int) -> int:
    """Where the file is mapped in this process, 0 where that cannot be told."""
    inode = os.fstat(fd).st_ino
    try:
        with open("/proc/self/maps") as maps:
            rows = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return 0
    places = [row[0] for row in rows if len(row) == 6 and row[4] == str(inode) and int(row[2], 16) == 0]
    return int(places[0].split("-")[0], 16) if places else 0


def _check_unwritten(shard: Path) -> None:
    """Raise StorePermissionError where a writer has the shard: it does not know of a reader that cannot register. Its lock
    is asked for, for a moment."""
    try:
        fd = os.open(shard / STORE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorePermissionError(
            errno.EACCES,
            f"{shard}: it is being written, and this user cannot register as a reader: check it as its owner",
        ) from None
    finally:
        os.close(fd)
