"""The other shards of a store, which ranks of this or another split wrote: opened for reading, once a process."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.codec import codec_named
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError
from kvstore.shard import Shard

log = logging.getLogger(__name__)

FOLDER: Final = re.compile(r"tp(\d{1,5})of(\d{1,5})-pp(\d{1,5})of(\d{1,5})")
LOOK_INTERVAL_S: Final = 1.0
"""How often the store's folder is looked into for shards."""
RETRY_INTERVAL_S: Final = 5.0
"""How often a shard is tried that could not be opened."""
MOST: Final = 1024
"""Shards that are looked for blocks."""


class _Process:
    """What this process has open, by the real path of a shard's folder. LMDB allows one environment a file, so that stores of
    one process share what they read of each other."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.owned: dict[str, weakref.ref[Shard] | None] = {}
        """Shards of KVStores; None while one is being opened."""
        self.readers: dict[str, Shard] = {}
        self.users: dict[str, set[int]] = {}
        """Which Siblings use a reader."""


_process = _Process()
os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


@contextmanager
def owning(folder: Path) -> Iterator[list[Shard]]:
    """Let a KVStore open a shard: a reader of it that others share gives way. What the caller appends is lent to the others
    for as long as it is open."""
    name, opened = os.path.realpath(folder), list[Shard]()
    with _process.gate:
        before = _process.owned.get(name)
        if before is None or before() is None:
            _process.owned[name] = None
        reader = _process.readers.pop(name, None)
        _process.users.pop(name, None)
    try:
        if reader is not None:
            reader.close()
        yield opened
    finally:
        with _process.gate:
            if opened:
                _process.owned[name] = weakref.ref(opened[0])
            elif _process.owned.get(name, before) is None:
                del _process.owned[name]


def _borrow(folder: Path, config: StoreConfig, user: int) -> Shard | None:
    """The shard as this process has it open already, or a reader of it; None where neither can be had now. Raises
    KVStoreError, lmdb.Error or OSError."""
    name = os.path.realpath(folder)
    with _process.gate:
        if name in _process.owned:
            owner = _process.owned[name]
            shard = owner() if owner is not None else None
            if owner is None or (shard is not None and not shard.db.closing):
                return shard
            del _process.owned[name]
        reader = _process.readers.get(name)
        if reader is None or reader.db.closing:
            reader = _process.readers[name] = _open(folder, config)
            _process.users[name] = set()
        _process.users[name].add(user)
        return reader


def _open(folder: Path, config: StoreConfig) -> Shard:
    db = BlockDB(folder, config.capacity_bytes, config.sync, False, config.quarantine_bytes, patience_s=0)
    return Shard(db, b"", config, codec_named(config.codec))


def _give_back(folder: str, shard: Shard, user: int) -> None:
    with _process.gate:
        users = _process.users.get(folder, set())
        users.discard(user)
        last = _process.readers.get(folder) is shard and not users
        if last:
            del _process.readers[folder], _process.users[folder]
    if last:
        shard.close()


def has_others(own: Path) -> bool:
    """Whether a store has other shards."""
    try:
        return any(FOLDER.fullmatch(entry.name) and entry.name != own.name for entry in os.scandir(own.parent))
    except OSError:
        return False


class Siblings:
    """The other shards of a store that may have what a rank needs: those of other splits, and where `copies`, those of its
    own, since other ranks then write some of its heads. Owned by one InlineStorage; any thread may call it; of no use in the
    child of a fork, nor after close."""

    def __init__(self, own: Path, config: StoreConfig, copies: bool) -> None:
        self._own, self._config, self._copies = own, config, copies
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._look_at = 0.0
        self._retry_at: dict[str, float] = {}
        self._used: dict[str, Shard] = {}
        self._closed = False

    def shards(self) -> list[Shard]:
        """Those that can be read now."""
        with self._lock:
            if self._closed:
                return []
            if time.monotonic() >= self._look_at:
                self._look()
            found = [self._shard(name) for name in self._names]
        return [shard for shard in found if shard is not None]

    def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_INTERVAL_S
        try:
            names = sorted(entry.name for entry in os.scandir(self._own.parent) if self._may_help(entry.name))
        except OSError:
            return
        if len(names) > MOST:
            log.warning("%s: %d shards, of which the first %d are read", self._own.parent, len(names), MOST)
        self._names = names[:MOST]

    def _may_help(self, name: str) -> bool:
        mine, other = FOLDER.fullmatch(self._own.name), FOLDER.fullmatch(name)
        if other is None or name == self._own.name:
            return False
        return mine is None or self._copies or (mine[2], mine[4]) != (other[2], other[4])

    def _shard(self, name: str) -> Shard | None:
        if time.monotonic() < self._retry_at.get(name, 0.0):
            return None
        folder = self._own.parent / name
        try:
            shard = _borrow(folder, self._config, id(self))
        except (KVStoreError, lmdb.Error, OSError) as error:
            if name not in self._retry_at:
                log.warning("%s: not looked for blocks until it opens: %s", folder, error)
            self._retry_at[name] = time.monotonic() + RETRY_INTERVAL_S
            return None
        self._retry_at.pop(name, None)
        if shard is not None:
            self._used[os.path.realpath(folder)] = shard
        return shard

    def close(self) -> None:
        """Let the shards go that nobody else reads."""
        with self._lock:
            self._closed, used = True, self._used
            self._used = {}
        for folder, shard in used.items():
            _give_back(folder, shard, id(self))
