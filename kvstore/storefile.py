"""The STORE file of a shard: format version, store id, boot id and clean flag, and the writer's lock.

It is read before LMDB opens anything, since opening already writes. docs/format.md is the specification.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from lmdb.verify import VerifyError, verify
from xxhash import xxh3_64_intdigest

from kvstore.errors import (
    KVStoreError,
    StoreAlreadyOpen,
    StoreDamaged,
    StoreLocked,
    StorePathError,
    StorePermissionError,
    UnsupportedFormat,
)

STORE_NAME: Final = "STORE"
DATA_NAME: Final = "data.mdb"
MAGIC: Final = b"\x89kvstore"
FORMAT_VERSION: Final = 1
SLOT: Final = struct.Struct("<8sII Q Q 16s 16s I I Q")
"""Magic, version, slot length, hash, generation, store id, boot id, flags, reserved, creation time."""
REPAIR_IT: Final = "repair it by `kvstore-fsck --repair`, or remove the shard's folder to start empty"
SLOT_STRIDE: Final = 512
"""Two slots, each in a sector of its own: a torn write leaves the other one."""
CLEAN: Final = 1
MAX_GENERATION: Final = 2**62
"""No file is written this often."""
LMDB_META: Final = struct.Struct("<II")
LMDB_MAGIC: Final = 0xBEEFC0DE
MAX_MAP: Final = 2**47
"""More than a process can map."""
TREE_CHECK_BYTES: Final = 2**28
CHECKS: Final = 3
"""Looks at a data.mdb that a writer changes meanwhile."""
LMDB_NODE: Final = struct.Struct("<HHHH")
"""Low and high half of the value's length (in a branch, of the child's page number), flags, length of the key."""
LMDB_LEAF, LMDB_BIG_VALUE, NO_PAGE = 0x02, 0x01, 2**64 - 1
"""Flag of a page, flag of a node whose value lies on pages of its own, root of an empty tree."""


class LastMeta(NamedTuple):
    """What the meta page of the last transaction says. free: the root of the free list; last: the highest page number."""

    map_size: int
    page_size: int
    free: int
    last: int
    txn: int


@dataclass(frozen=True)
class StoreState:
    """What a slot says. clean: nothing unsynced may be missing; boot_id: the boot that last wrote."""

    store_id: bytes
    boot_id: bytes
    clean: bool
    created: int
    generation: int = 0

    def encode(self) -> bytes:
        """The slot's bytes."""
        tail = (self.generation, self.store_id, self.boot_id, CLEAN * self.clean, 0, self.created)
        data = bytearray(SLOT.pack(MAGIC, FORMAT_VERSION, SLOT.size, 0, *tail))
        struct.pack_into("<Q", data, 16, slot_hash(data))
        return bytes(data)


def slot_hash(data: bytes | bytearray) -> int:
    """XXH3-64 of a slot without the 8 bytes that hold the hash."""
    return xxh3_64_intdigest(bytes(data[:16] + data[24:]))


@cache
def boot_id() -> bytes:
    """16 bytes that name this boot of the machine (Linux: /proc/sys/kernel/random/boot_id)."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def parse_store(data: bytes, path: Path) -> StoreState:
    """The newest intact slot of a STORE file.

    Raises UnsupportedFormat where an intact slot is of a newer version, or none is intact and one says so;
    StoreDamaged where none is intact.
    """
    found: list[StoreState] = []
    claimed: list[int] = []
    for start in (0, SLOT_STRIDE):
        slot = data[start : start + SLOT.size]
        if len(slot) < SLOT.size or slot[:8] != MAGIC:
            continue
        _, version, length, stored_hash, generation, store_id, boot, flags, _, created = SLOT.unpack(slot)
        if not SLOT.size <= length <= SLOT_STRIDE or slot_hash(data[start : start + length]) != stored_hash:
            claimed.append(version)
        elif version > FORMAT_VERSION:
            raise UnsupportedFormat(_newer(path, version))
        elif length == SLOT.size and generation < MAX_GENERATION:
            found.append(StoreState(store_id, boot, bool(flags & CLEAN), created, generation))
    if not found and max(claimed, default=0) > FORMAT_VERSION:
        raise UnsupportedFormat(_newer(path, max(claimed)))
    if not found:
        raise StoreDamaged(
            f"{path}: neither of its two slots is intact ({len(data)} bytes): it is no kvstore, or damaged; {REPAIR_IT}"
        )
    return max(found, key=lambda state: state.generation)


def _newer(path: Path, version: int) -> str:
    return (
        f"{path} is of format version {version}, this kvstore reads up to {FORMAT_VERSION}: upgrade kvstore, or give "
        "another path; the store was left untouched"
    )


@contextmanager
def path_errors(path: Path, expected: str) -> Iterator[None]:
    """Turn what the file system says into StorePathError, or StorePermissionError where this user may not."""
    try:
        yield
    except KVStoreError:
        raise
    except PermissionError as error:
        raise StorePermissionError(f"{path}: {error.strerror}: make it this user's, or give another path") from None
    except OSError as error:
        raise StorePathError(f"{path}: {error.strerror}: {expected}") from None


class StoreFile:
    """The open STORE file of one shard. The writer's holds an exclusive lock until close; a forked child's copy
    is closed at the fork, so that it cannot keep the lock. Not thread-safe: its BlockDB owns it."""

    def __init__(self, folder: Path, writable: bool) -> None:
        self.path, self._writable = folder / STORE_NAME, writable
        self._data_fd = -1
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        with path_errors(self.path, "expected a shard that a writer has made"):
            self._fd = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        _open_files.add(self)
        try:
            if writable:
                self._lock()
            self.state = self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(
                f"{self.path.parent} is being written by another process: a shard has one writer; stop that process, "
                'give this rank a path of its own, or open with mode="r"'
            ) from None

    def _read(self) -> StoreState | None:
        """None in a shard that is still to be made, also where its making was interrupted: the first slot may be torn."""
        data = os.pread(self._fd, 2 * SLOT_STRIDE, 0)
        try:
            return parse_store(data, self.path) if data else None
        except StoreDamaged:
            if self._writable and not (self.path.parent / DATA_NAME).exists():
                return None
            raise

    def write(self, state: StoreState) -> None:
        """Write the state durably, into the slot that the current one does not use. Raises OSError."""
        generation = 1 if self.state is None else self.state.generation + 1
        written = replace(state, generation=generation)
        slot = written.encode().ljust(SLOT_STRIDE, b"\0")
        if os.pwrite(self._fd, slot, SLOT_STRIDE * (generation % 2)) != len(slot):
            raise OSError(errno.EIO, "a slot was written in part")
        os.fsync(self._fd)
        self.state = written

    def hold_data(self) -> bool:
        """As a reader, keep data.mdb from being replaced: it is, where somebody rewrites it without its free pages, and
        LMDB's table of readers does not show who is idle. False where that goes on just now. Raises OSError."""
        data = self.path.parent / DATA_NAME
        fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held = os.fstat(fd).st_ino == data.stat().st_ino
        except BlockingIOError:
            held = False
        if not held:
            os.close(fd)
            return False
        self._data_fd = fd
        return True

    def replaced(self) -> bool:
        """As a reader, whether STORE or data.mdb is another file by now than the one that is open, or gone."""
        open_files = ((self._fd, self.path), (self._data_fd, self.path.parent / DATA_NAME))
        try:
            return not all(os.path.samestat(os.fstat(fd), os.stat(path)) for fd, path in open_files)
        except OSError:
            return True

    def close(self) -> None:
        """Close the file and give up the lock; twice is allowed."""
        if self._data_fd >= 0:
            os.close(self._data_fd)
            self._data_fd = -1
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_open_files: weakref.WeakSet[StoreFile] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


_opened: dict[str, object] = {}
"""Shards that are open in this process. No lock guards it, which a fork could leave held."""
os.register_at_fork(after_in_child=_opened.clear)


def claim(folder: Path) -> str:
    """Note that this process opens the shard; raises StoreAlreadyOpen."""
    name, mine = os.path.realpath(folder), object()
    if _opened.setdefault(name, mine) is not mine:
        raise StoreAlreadyOpen(
            f"{folder} is open in this process already: share that KVStore (any thread may call it, "
            "`attach` binds another cache), or close it first"
        )
    return name


def release(name: str) -> None:
    """The shard that `claim` named is open no more."""
    _opened.pop(name, None)


def check_strangers(folder: Path) -> None:
    """Raise StoreDamaged for a data.mdb whose STORE file is missing or empty: it is not touched."""
    data, store = folder / DATA_NAME, folder / STORE_NAME
    if data.exists() and not (store.exists() and store.stat().st_size):
        raise StoreDamaged(
            f"{folder}: {DATA_NAME} without a STORE file: it is no kvstore, or it is damaged; give another path"
        )


def check_data_file(path: Path) -> int:
    """The map size that data.mdb names, 0 where there is no file yet.

    A file shorter than its pages would kill the reader with SIGBUS, so its length is compared with both meta
    pages before anything is mapped. A writer may be at work meanwhile. Raises StoreDamaged.
    """
    for _ in range(CHECKS):
        newest, size = newest_meta(path)
        if newest is None:
            return 0
        if newest.map_size >= MAX_MAP:
            raise StoreDamaged(_damaged(path, f"its meta page names a map of {newest.map_size} bytes"))
        pages = f"{size} bytes of {newest.last + 1} pages of {newest.page_size}"
        short = (newest.last + 1) * newest.page_size > size
        problem = (_tree_problem(path) or value_cut_short(path)) if short else None
        if problem is None:
            return newest.map_size
        if newest_meta(path)[0] == newest:
            break
    raise StoreDamaged(_damaged(path, f"{pages}: {problem}"))


def check_tree(path: Path) -> None:
    """Raise StoreDamaged where the database's trees do not hold together: LMDB ends the process where it meets that while
    it writes. Not beside a writer. At most about 3 seconds; not of files of more than TREE_CHECK_BYTES."""
    if path.stat().st_size <= TREE_CHECK_BYTES and (problem := _tree_problem(path)):
        raise StoreDamaged(_damaged(path, problem))


def value_cut_short(path: Path) -> str | None:
    """How a file that `lmdb.verify` passes ends within a value, of whose pages verify looks at the first alone; None where
    it does not. Every page is in use or free by then: the free list tells. Raises OSError; StoreDamaged without a meta."""
    meta, size = newest_meta(path)
    if meta is None:
        return None
    end = size // meta.page_size
    try:
        with path.open("rb") as file:
            free = sum(int((pages >= end).sum()) for pages in _free_pages(file.fileno(), meta))
    except (struct.error, ValueError, OverflowError) as error:
        return f"the free list cannot be read: {error}"
    used = meta.last + 1 - end - free
    return f"the value that goes on at page {end} has {used} pages beyond EOF" if used > 0 else None


def _free_pages(fd: int, meta: LastMeta) -> Iterator[Any]:
    """Each entry's page numbers of the free list, uint64. Raises struct.error, ValueError, OverflowError where it is none."""
    import numpy as np  # takes as long as a check of a small store

    todo, left = [meta.free] if meta.free != NO_PAGE else [], meta.last
    while todo and left:
        page, left = os.pread(fd, meta.page_size, todo.pop() * meta.page_size), left - 1
        flags, lower = struct.unpack_from("<HH", page, 10)
        for place in struct.unpack_from(f"<{max(0, lower - 16) // 2}H", page, 16):
            low, high, node_flags, key_size = LMDB_NODE.unpack_from(page, place)
            start, size = place + LMDB_NODE.size + key_size, low | high << 16
            if not flags & LMDB_LEAF:
                todo.append(size | node_flags << 32)
            else:
                large, run = node_flags & LMDB_BIG_VALUE, struct.unpack_from("<Q", page, start)[0]
                value = os.pread(fd, size, run * meta.page_size + 16) if large else page[start : start + size]
                yield np.frombuffer(value, "<u8")[1:]


def newest_meta(path: Path) -> tuple[LastMeta | None, int]:
    """The meta page of the last transaction, None where there is no file yet, and the file's size: taken after the
    page, since a writer makes the file longer before it writes the page. Raises OSError, StoreDamaged."""
    if not path.exists():
        return None, 0
    with path.open("rb") as file:
        head = os.pread(file.fileno(), 4096, 0)
        first = _meta(head)
        second = _meta(os.pread(file.fileno(), 4096, first.page_size)) if first else None
        size = os.fstat(file.fileno()).st_size
    metas = [meta for meta in (first, second) if meta]
    if head and not metas:
        raise StoreDamaged(_damaged(path, "no intact LMDB meta page"))
    return max(metas, key=lambda meta: meta.txn, default=None), size


def _tree_problem(path: Path) -> str | None:
    """What lmdb.verify finds, which walks the trees with plain reads. Pages that were freed before they were ever written
    may lie past the end of an intact file; a page in use may not."""
    try:
        problems = verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        problems = [str(error)]
    return str(problems[0]) if problems else None


def _damaged(path: Path, reason: str) -> str:
    return f"{path}: {reason}: the file is damaged; {REPAIR_IT}"


def _meta(page: bytes) -> LastMeta | None:
    """A meta page of LMDB 0.9: its MDB_meta starts after the page header's 16 bytes, with magic, version, address, map
    size, two MDB_db of 48 bytes, which end with their root, last page, transaction."""
    if len(page) < 152 or LMDB_META.unpack_from(page, 16) != (LMDB_MAGIC, 1):
        return None
    map_size, page_size = struct.unpack_from("<QI", page, 32)
    known = page_size in (4096, 8192, 16384, 32768, 65536)
    return LastMeta(map_size, page_size, *struct.unpack_from("<Q48xQQ", page, 80)) if known else None


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can enter; parents too. Raises StorePathError or StorePermissionError."""
    with path_errors(path, "expected a folder, or a path where one can be made"):
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
            with suppress(PermissionError):
                sync_folder(missing.parent)
        if not path.is_dir():
            raise NotADirectoryError(20, "not a directory")


def reserve(path: Path, nbytes: int) -> None:
    """Have the file system give a file its blocks now: writing to one that is mapped and finds no room is a SIGBUS.
    Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
