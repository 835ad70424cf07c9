"""The LMDB environment of one shard as a process opens, enters and closes it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstore.errors import (
    ConfigError,
    KVStoreError,
    StoreAlreadyOpen,
    StoreBusy,
    StoreDamaged,
    StorePathError,
    StorePermissionError,
)
from kvstore.lifetime import POLL_SECONDS, Lifetime
from kvstore.memory import check_mappable, keep_freed_memory
from kvstore.plain import check_plain
from kvstore.storefile import (
    DATA_NAME,
    REPAIR_IT,
    StoreFile,
    StoreState,
    boot_id,
    check_data_file,
    check_strangers,
    check_tree,
    claim,
    make_folder,
    path_errors,
    release,
    reserve,
    sync_folder,
)

log = logging.getLogger(__name__)

LMDB_ENGINE: Final = 0
"""The 0.9 engine, pinned: an environment variable could change py-lmdb's default, and the files differ."""
PAGE_BYTES: Final = 4096
MAX_READERS: Final = 512
SHRINK_SHARE: Final = 64
MIN_SHRINK_BYTES: Final = 2**20
LOCK_NAME: Final = "lock.mdb"
COMPACT_NAME: Final = "data.mdb.compact"
LOCK_BYTES: Final = 10 * PAGE_BYTES
"""64 bytes a reader, and a header."""
DATABASES: Final = (b"meta", b"index", b"payload", b"quarantine")
CLOSE_TIMEOUT: Final = 60.0
HOLD_PATIENCE_S: Final = 30.0
REVIVE_PATIENCE_S: Final = 5.0


class Environment(Lifetime):
    """One shard's LMDB environment and STORE file. Every transaction lies inside a call that has entered.

    Any thread may call it; writes take turns. A shard has one writer, which holds the lock of its STORE file, and is
    opened once in a process. After a fork the child gets StoreForked; after close, everyone gets StoreClosed. close
    waits for calls in flight, so that no memory is unmapped under them.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, sync: bool, writable: bool, patience_s: float = HOLD_PATIENCE_S
    ) -> None:
        """patience_s: how long a reader waits for a file that is being rewritten."""
        super().__init__(folder)
        self.sync, self.writable = sync, writable
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.emptied = False
        self.oversized = False
        """Whether the file is larger than the capacity: until `compact`, LMDB maps all of it."""
        if writable:
            check_mappable(self.capacity_bytes)
        self._gate = threading.Lock()
        self._closed = False
        self._maps = 0
        self._waiting: set[object] = set()
        self._broken = False
        """Whether LMDB refuses every transaction: it does so once it could not write a meta page."""
        self._write_lock = threading.Lock()
        self._opened_as = claim(folder)
        try:
            with path_errors(folder, "expected a shard's folder, on a file system with room"):
                self._open_first(patience_s)
        except BaseException:
            self._closing = self._closed = True
            release(self._opened_as)
            raise

    def _open_first(self, patience_s: float) -> None:
        self._open(patience_s)

    def _open(self, patience_s: float) -> None:
        if self.writable:
            make_folder(self.folder)
        check_plain(self.folder)
        check_strangers(self.folder)
        self.store_file = StoreFile(self.folder, self.writable)
        try:
            self._prepare()
            if not self.writable:
                self._hold_data(patience_s)
            known = check_data_file(self.folder / DATA_NAME)
            if not self.writable and not known:
                raise self._no_data()
            if self.writable:
                if known:
                    check_tree(self.folder / DATA_NAME)
                reserve(self.folder / LOCK_NAME, LOCK_BYTES)
                (self.folder / COMPACT_NAME).unlink(missing_ok=True)
                self.oversized = bool(known) and (self.folder / DATA_NAME).stat().st_size > self.capacity_bytes
            try:
                self._environment(self._map_bytes() if self.writable else known, new=not known)
            except lmdb.Error as error:
                raise self._cannot_open(error, new=not known) from None
        except BaseException:
            self.store_file.close()
            raise

    def _hold_data(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        try:
            while not self.store_file.hold_data():
                if time.monotonic() > deadline:
                    raise StoreBusy(f"{self.folder}: its writer is rewriting {DATA_NAME}: open it again in a while")
                time.sleep(POLL_SECONDS)
        except FileNotFoundError:
            raise self._no_data() from None

    def _no_data(self) -> StorePathError:
        return StorePathError(f"{self.folder}: no {DATA_NAME} there: expected a shard that a writer has made")

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
        elif self.writable and not (data.exists() and data.stat().st_size):
            if state is not None and state.clean:
                log.warning("%s: emptied: %s had records, and is missing or empty", self.folder, DATA_NAME)
                self.emptied = True
            self._mark(clean=False)

    def _map_bytes(self) -> int:
        """The capacity; of a file that is larger, its size and room for the transactions that make it smaller."""
        if not self.oversized:
            return self.capacity_bytes
        size = (self.folder / DATA_NAME).stat().st_size
        return (size + size // SHRINK_SHARE + MIN_SHRINK_BYTES) // PAGE_BYTES * PAGE_BYTES

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
        self._meta, self._index, self._payload, self._quarantined = opened
        if self.writable:
            keep_freed_memory()

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
        return StoreDamaged(f"{self.folder}: LMDB cannot open it: {error}; {REPAIR_IT}")

    def enter(self, token: object) -> None:
        """Hold the environment open for a whole call of the store; read and write transactions lie inside one.

        A signal may raise between any two steps of Python, so the caller writes
        `try: db.enter(token); ... finally: db.calls.discard(token)`: the last is one step, takes no lock and cannot be
        torn from its `finally`, as the exit of a context manager can. Raises StoreClosed or StoreForked.
        """
        self.check_open()
        if self._broken:
            self._revive()
        with self._gate:
            self.check_open()
            self.calls.add(token)

    def _revive(self) -> None:
        """Open LMDB anew once no call is in flight: none enters meanwhile, and those in flight end soon. What one of them
        waits for must not wait here for long (a signal handler's call)."""
        deadline = time.monotonic() + REVIVE_PATIENCE_S
        while self._broken and not self._closing and time.monotonic() < deadline:
            with self._gate:
                if self._broken and not self.calls and not self._closing:
                    self._reopen()
                    return
            time.sleep(POLL_SECONDS)

    def _reopen(self) -> None:
        """Where that fails every transaction does, until a later call succeeds with it."""
        self._env.close()
        try:
            self._environment(self._map_bytes(), new=False)
        except (lmdb.Error, OSError) as error:
            log.error("%s: LMDB failed to write, and cannot be opened anew: %s", self.folder, error)
        else:
            self._broken = False
            log.warning("%s: LMDB failed to write, and was opened anew", self.folder)

    def _begin(self, wait: bool = True) -> Any:
        """A read transaction for a call. Another process may have grown the file past the map, which is adopted once every
        call waits for it: a call that has a transaction of another shard must not, and gets lmdb.MapResizedError."""
        while True:
            seen = self._maps
            try:
                return self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                if not wait:
                    raise
                self._map_anew(seen)

    def _map_anew(self, seen: int) -> None:
        """Adopt the file's map size while every call waits for it here, since the old map goes away under it."""
        token = object()
        try:
            self._waiting.add(token)
            while self._maps == seen:
                with self._gate:
                    if self._maps == seen and len(self.calls) == len(self._waiting):
                        self._env.set_mapsize(0)
                        self._maps += 1
                time.sleep(POLL_SECONDS)
        finally:
            self._waiting.discard(token)
        # Who changes the map now must have finished; from here on nobody begins to, since this call waits no more.
        with self._gate:
            pass

    @contextmanager
    def _write(self) -> Iterator[Any]:
        with self._write_lock:
            if not self.sync:
                self._mark(clean=False)
            try:
                with self._env.begin(write=True) as txn:
                    yield txn
            except lmdb.Error:
                self._note_panic()
                raise
            except SystemError as error:
                # What py-lmdb makes of LMDB's error where a cursor deletes in a damaged tree.
                raise (error.__cause__ if isinstance(error.__cause__, lmdb.Error) else error) from None

    def _note_panic(self) -> None:
        try:
            self._env.begin().abort()
        except lmdb.PanicError:
            self._broken = True
        except lmdb.Error:
            pass

    def _mark(self, clean: bool) -> None:
        state = self.store_file.state or _NEVER
        if (state.clean, state.boot_id) != (clean, boot := boot_id()):
            self.store_file.write(replace(state, clean=clean, boot_id=boot))

    def __del__(self) -> None:
        """A store that was dropped without close gives its shard up."""
        if hasattr(self, "_env"):
            try:
                self.close()
            except KVStoreError:
                log.exception("%s: dropped without close", self.folder)

    def close(self) -> None:
        """Wait for calls in flight, sync, and give the shard up. Twice is allowed; in a fork's child it does nothing."""
        if self.forked:
            return
        self._closing = True
        self._wait_for_calls(time.monotonic() + CLOSE_TIMEOUT)
        with self._gate:
            self._check_ended(CLOSE_TIMEOUT)
            if not self._closed:
                self._shut()

    def _shut(self) -> None:
        try:
            if self.writable and not self.sync:
                self._env.sync(True)
                self._mark(clean=True)
        except (lmdb.Error, OSError) as error:
            raise StorePathError(
                f"{self.folder}: the last sync failed: {error}: what was put may not survive a power loss; look at the disk"
            ) from error
        finally:
            self._env.close()
            self.store_file.close()
            release(self._opened_as)
            self._closed = True


_NEVER: Final = StoreState(b"", b"", True, 0)
