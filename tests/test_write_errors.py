"""The story: a write of the store fails in a way that LMDB or the kernel does not get over by itself. The call says so, and
the next one works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, StoreConfig, errors
from kvstore.environment import Environment
from kvstore.storefile import DATA_NAME, STORE_NAME
from tests.support import MIB, Raw, block_hashes, flip, make_cache, open_store, shard_of

pytestmark = pytest.mark.both
HASHES = block_hashes(8)
COMMIT = StoreConfig(capacity_bytes=64 * MIB)
LARGE = {"layers": 4, "heads": 4, "tokens": 16, "head_size": 32, "blocks": 96}
"""Blocks of 32 KiB."""


def descriptors(store: KVStore, meta: bool) -> list[int]:
    """LMDB's descriptors for its data, or for its meta pages, which in commit mode are written through one that syncs."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if path == str(store.folder / DATA_NAME):
            flags = int(Path("/proc/self/fdinfo", name).read_text().split()[3], 8)
            found += [int(name)] if bool(flags & os.O_DSYNC) == meta else []
    return found


@contextmanager
def unwritable(store: KVStore, meta: bool) -> Iterator[None]:
    """Writes through these descriptors fail."""
    saved = [(fd, os.dup(fd)) for fd in descriptors(store, meta)]
    assert saved
    reader = os.open(store.folder / DATA_NAME, os.O_RDONLY)
    for fd, _ in saved:
        os.dup2(reader, fd)
    try:
        yield
    finally:
        for fd, good in saved:
            os.dup2(good, fd)
            os.close(good)
        os.close(reader)


# --- LMDB gives up after a meta page that it could not write -------------------------------------------------------


@pytest.mark.inline("breaks what reads or writes the shard")
def test_after_a_meta_page_that_was_not_written_the_next_call_works(
    tmp_path: Path, cache: PagedKVCache, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        with unwritable(store, meta=True):
            assert set(store.put_blocks(HASHES[2:4], [2, 3], start=2).failed.values()) == {"io_error"}
        with pytest.raises(lmdb.PanicError):
            shard_of(store).db._env.begin()
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).stored.all()
        assert store.stats()["records"] == 4
    assert any("was opened anew" in record.getMessage() for record in caplog.records)
    with open_store(tmp_path, cache, COMMIT) as again:
        assert again.get_blocks(HASHES[:4], [4, 5, 6, 7]).verified.all()


@pytest.mark.inline("breaks what reads or writes the shard")
def test_lmdb_is_opened_anew_only_while_no_call_is_in_flight(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.environment.REVIVE_PATIENCE_S", 0.05)
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        with unwritable(store, meta=True):
            store.put_blocks(HASHES[2:4], [2, 3], start=2)
        db, token = shard_of(store).db, object()
        db.calls.add(token)
        try:
            assert not store.get_blocks(HASHES[:2], [4, 5]).verified.any()
        finally:
            db.calls.discard(token)
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()


@pytest.mark.inline("breaks what reads or writes the shard")
def test_an_lmdb_that_cannot_be_opened_anew_fails_calls_until_it_can(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = lmdb.open

    def broken(*arguments: Any, **options: Any) -> Any:
        raise lmdb.Error("Input/output error")

    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        with unwritable(store, meta=True):
            store.put_blocks(HASHES[2:4], [2, 3], start=2)
        monkeypatch.setattr(lmdb, "open", broken)
        for _ in range(2):
            got = store.get_blocks(HASHES[:2], [4, 5])
            assert not got.verified.any()
            assert set(store.put_blocks(HASHES[2:4], [2, 3], start=2).failed.values()) == {"io_error"}
        monkeypatch.setattr(lmdb, "open", opened)
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).stored.all()


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_put_that_cannot_read_says_so(tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Environment, wait: bool = True) -> Any:
        raise lmdb.ReadersFullError("MDB_READERS_FULL")

    with open_store(tmp_path, cache, COMMIT) as store:
        monkeypatch.setattr(Environment, "_begin", full)
        put = store.put_blocks(HASHES[:2], [0, 1])
        assert (put.stored | np.isin(range(2), list(put.failed))).all()
        monkeypatch.undo()
        assert not store.put_blocks(HASHES[:2], [0, 1]).failed
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()


# --- deleting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["evict", "clear"])
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.inline("breaks what reads or writes the shard")
def test_deleting_that_cannot_be_written_says_so_and_deletes_nothing(
    tmp_path: Path, cache: PagedKVCache, what: str, meta: bool
) -> None:
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:4], range(4)).stored.all()
        delete = {"evict": lambda: store.evict(2), "clear": store.clear}[what]
        with unwritable(store, meta), pytest.raises(errors.StorePathError, match="could not be deleted"):
            delete()
        assert store.get_blocks(HASHES[:4], range(4, 8)).verified.all()
        assert delete() == {"evict": 2, "clear": 4}[what]


# --- the STORE file ------------------------------------------------------------------------------------------------


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_slot_that_is_written_in_part_is_an_error(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(capacity_bytes=64 * MIB, durability="process")
    store = open_store(tmp_path, cache, config)
    assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    store.close()
    pwrite = os.pwrite
    with open_store(tmp_path, cache, config) as store:
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:40], offset))
        assert set(store.put_blocks(HASHES[2:4], [2, 3], start=2).failed.values()) == {"io_error"}
        monkeypatch.setattr(os, "pwrite", pwrite)
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).stored.all()
    assert (store.folder / STORE_NAME).stat().st_size == 1024


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_store_whose_first_slot_is_written_in_part_does_not_open_and_is_made_later(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:40], offset))
    with pytest.raises(errors.StorePathError, match="a slot was written in part"):
        open_store(tmp_path, cache, COMMIT)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:1], [0]).stored.all()


# --- a smaller capacity --------------------------------------------------------------------------------------------


def shrunk(path: Path) -> KVStore:
    """A store of a smaller capacity than its file had."""
    cache, hashes = make_cache(**LARGE), block_hashes(96, "fill")
    config = StoreConfig(capacity_bytes=4 * MIB, batch_bytes=MIB // 4, durability="process")
    with open_store(path, cache, config) as store:
        assert store.put_blocks(hashes[:64], range(64)).stored.all()
    small = open_store(path, cache, StoreConfig(capacity_bytes=MIB, durability="process"))
    assert small.stats()["file_bytes"] <= MIB
    return small


def test_a_store_that_was_made_smaller_keeps_what_it_condemns(tmp_path: Path) -> None:
    hashes = block_hashes(96, "fill")
    with shrunk(tmp_path) as store:
        raw = Raw(store)
        kept = [i for i in range(64) if store.match_prefix([hashes[i]])]
        chunk = next(key for key in raw.payload() if key[8:] == b"\0\1")
        raw.put_chunk(chunk, flip(raw.payload()[chunk], 5))
        rejected = [i for i in kept if store.get_blocks([hashes[i]], [i], start=i).rejected]
        assert len(rejected) == 1
        assert store.stats()["quarantine_records"] == len(raw.quarantined()) == 1
        assert not store.stats().get("quarantine_failed")


@pytest.mark.inline("breaks what reads or writes the shard")
def test_an_environment_reads_what_it_wrote_after_it_was_opened_anew(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        db = shard_of(store).db
        assert isinstance(db, Environment)
        db._reopen()
        assert store.get_blocks(HASHES[:2], [2, 3]).verified.all()
        raw = Raw(store)
        chunk = next(key for key in raw.payload() if key[8:] == b"\0\1")
        raw.put_chunk(chunk, flip(raw.payload()[chunk], 5))
        assert len(store.get_blocks(HASHES[:2], [4, 5]).rejected) == 1
        assert store.stats()["quarantine_records"] == 1


@pytest.mark.parametrize("data", [b"", bytes(1024), bytes(512) + b"\x89kvstore" + bytes(100)])
def test_a_shard_whose_making_was_cut_short_is_made_anew(tmp_path: Path, cache: PagedKVCache, data: bytes) -> None:
    folder = tmp_path / "tp0of1-pp0of1"
    folder.mkdir()
    (folder / STORE_NAME).write_bytes(data)
    if data:
        with pytest.raises(errors.StoreDamaged, match="neither of its two slots is intact"):
            open_store(tmp_path, cache, COMMIT, mode="r")
    with open_store(tmp_path, cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    with open_store(tmp_path, cache, COMMIT) as again:
        assert again.get_blocks(HASHES[:2], [2, 3]).verified.all()
