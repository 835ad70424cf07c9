"""A shard's file rewritten without its free pages."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import lmdb

from kvstore.environment import COMPACT_NAME, LOCK_BYTES, LOCK_NAME, Environment
from kvstore.errors import StoreBusy, StorePathError
from kvstore.space import used_bytes
from kvstore.storefile import DATA_NAME, path_errors, reserve, sync_folder


class Compactable(Environment):
    """An Environment whose file can be made smaller. Threads, forks and close as Environment."""

    def compact(self) -> None:
        """Rewrite the file without its free pages and put it in the old one's place. The caller alone uses the environment.

        Raises StorePathError where there is no room for the copy or writing it failed, StoreBusy where other processes
        read the shard; then nothing has changed. Being killed leaves the old file or the new one.
        """
        self.check_compactable()
        data = self.folder / DATA_NAME
        with path_errors(data, "expected room for a compacted copy"):
            held = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._replace_data(data)
        except BlockingIOError:
            raise self._read_by("other processes") from None
        finally:
            # Readers wait for this, and find the new file then.
            os.close(held)

    def _replace_data(self, data: Path) -> None:
        copy = self.folder / COMPACT_NAME
        with path_errors(copy, "expected room for a compacted copy"):
            fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._env.copyfd(fd, compact=True)
                os.fsync(fd)
            except lmdb.Error as error:
                copy.unlink()
                raise StorePathError(f"{copy}: {error}: expected room for a compacted copy") from None
            finally:
                os.close(fd)
            self._env.close()
            os.replace(copy, data)
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            sync_folder(self.folder)
            reserve(self.folder / LOCK_NAME, LOCK_BYTES)
        self._environment(self.capacity_bytes, new=False)
        self.oversized = False

    def check_compactable(self) -> None:
        """Raise what `compact` raises where there is no room for the copy, or others read the shard."""
        used, free = self._used_bytes(), shutil.disk_usage(self.folder).free
        if used > free:
            raise StorePathError(
                f"{self.folder}: capacity_bytes {self.capacity_bytes} is less than the file has, and compacting it needs "
                f"{used} bytes for a copy where {free} are free: make room, or keep the larger capacity"
            )
        self._env.reader_check()
        lines = (line.split() for line in self._env.readers().splitlines()[1:])
        others = sorted({row[0] for row in lines if row and row[0] != str(os.getpid())})
        if others:
            raise self._read_by(f"the processes {', '.join(others)}")
        with (self.folder / DATA_NAME).open("rb") as data:
            try:
                fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._read_by("other processes") from None

    def _read_by(self, who: str) -> StoreBusy:
        return StoreBusy(
            f"{self.folder}: {who} read the shard: compacting replaces its file; close them, or keep the larger capacity"
        )

    def _used_bytes(self) -> int:
        with self._begin() as txn:
            return used_bytes(txn, (self._meta, self._index, self._payload, self._quarantined))
