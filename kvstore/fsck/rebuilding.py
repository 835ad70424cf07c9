"""The STORE file of a shard made anew, where neither of its slots is intact or it is gone."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from kvstore.errors import StoreDamaged, StoreLocked
from kvstore.fsck.alone import tree_problem
from kvstore.fsck.carving import any_header
from kvstore.fsck.keeping import stamp
from kvstore.fsck.pagemap import DATABASES
from kvstore.fsck.pages import PageFile
from kvstore.storefile import (
    DATA_NAME,
    SLOT_STRIDE,
    STORE_NAME,
    StoreState,
    boot_id,
    parse_store,
    sync_folder,
)

MAX_STORE_BYTES: Final = 2**16
"""Of a damaged STORE file that is kept."""


def rebuild_store(shard: Path) -> bool:
    """Write a new STORE file where none is intact; whether that was so. What the old one held is kept as
    STORE.damaged-<time>.

    Raises StoreLocked, UnsupportedFormat, OSError; StoreDamaged where data.mdb is not there, or is no kvstore's.
    """
    path = shard / STORE_NAME
    if not path.exists():
        _check_store(shard)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(f"{shard} is being written by another process") from None
        old = os.pread(fd, MAX_STORE_BYTES, 0)
        if _intact(old, path):
            return False
        _check_store(shard)
        if old.strip(b"\0"):
            _keep(shard / f"{STORE_NAME}.damaged-{stamp()}", old)
        _write(fd, StoreState(os.urandom(16), boot_id(), _clean(shard), time.time_ns() // 1000, 1))
        sync_folder(shard)
        return True
    finally:
        os.close(fd)


def _intact(data: bytes, path: Path) -> bool:
    try:
        parse_store(data, path)
        return True
    except StoreDamaged:
        return False


def _check_store(shard: Path) -> None:
    if not _is_store(shard / DATA_NAME):
        raise StoreDamaged(f"{shard}: {DATA_NAME} is missing or is no kvstore's: nothing to make a STORE file for")


def _is_store(data: Path) -> bool:
    """Whether a file has a kvstore's databases, or where they cannot be reached a record's header."""
    if not data.is_file():
        return False
    with PageFile(data) as file:
        named = file.databases(file.metas[0]) if file.metas else {}
        return named.keys() >= DATABASES.keys() or any_header(file)


def _clean(shard: Path) -> bool:
    """Whether all of data.mdb is on disk and holds together: then no opening may take it for one that lost writes."""
    with (shard / DATA_NAME).open("rb") as file:
        os.fsync(file.fileno())
    return tree_problem(shard) is None


def _keep(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write(fd: int, state: StoreState) -> None:
    """The first generation lies in the second slot. Torn, neither slot is intact, and it is made anew again."""
    slots = bytes(SLOT_STRIDE) + state.encode().ljust(SLOT_STRIDE, b"\0")
    os.ftruncate(fd, len(slots))
    if os.pwrite(fd, slots, 0) != len(slots):
        raise OSError(5, "a slot was written in part")
    os.fsync(fd)
