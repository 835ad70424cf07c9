"""The story: the file's trees are damaged. LMDB would end the process that writes to them, so a writer looks first."""

from __future__ import annotations

import logging
from pathlib import Path

import lmdb
import pytest

from kvstore import errors
from kvstore.storefile import DATA_NAME
from tests.support import SMALL, Raw, block_hashes, index_key, io_mode, make_cache, open_store, shard_of

pytestmark = pytest.mark.both
HASHES = block_hashes(8)
PAGE = 4096


def filled(path: Path) -> Path:
    """A closed store; its file."""
    with open_store(path, make_cache()) as store:
        assert store.put_blocks(HASHES, range(8)).stored.all()
        return store.folder / DATA_NAME


def test_a_broken_tree_is_refused_before_it_is_written_to(tmp_path: Path) -> None:
    data = filled(tmp_path)
    content = bytearray(data.read_bytes())
    leaves = [
        at
        for at in range(2 * PAGE, len(content), PAGE)
        if content[at + 10] == 2 and HASHES[0] in content[at : at + PAGE]
    ]
    assert leaves
    for at in leaves:
        content[at + 16 : at + 18] = b"\xff\x7f"
    data.write_bytes(content)
    with pytest.raises(errors.StoreDamaged, match="the file is damaged"):
        open_store(tmp_path, make_cache())
    assert data.read_bytes() == content


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_large_file_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr("kvstore.storefile.TREE_CHECK_BYTES", PAGE)
    monkeypatch.setattr("kvstore.storefile.verify", lambda *_, **__: pytest.fail("walked"))
    open_store(tmp_path, make_cache()).close()


def test_misplaced_and_missing_index_entries_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    with open_store(tmp_path, make_cache()) as store:
        assert store.stats()["eviction_index_problems"] == 0
        raw, keys = Raw(store), [index_key(store, h) for h in HASHES]
        entries = [raw.entry(key) for key in keys]
        raw.put_entry(keys[0], entries[1])
        raw.put_entry(keys[1], entries[0])
    with caplog.at_level(logging.WARNING), open_store(tmp_path, make_cache()) as store:
        assert store.stats()["eviction_index_problems"] == 2
        assert "2 index entries are missing" in caplog.text
    if io_mode() == "process":
        return
    monkeypatch.setattr("kvstore.blockdb.BlockDB.num_entries", lambda self: 11)
    with open_store(tmp_path, make_cache()) as store:
        assert store.stats()["eviction_index_problems"] == 2 + 3


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_deletion_that_fails_halfway_is_read_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, make_cache(), SMALL) as store:
        store.put_blocks(HASHES, range(8))
        monkeypatch.setattr("kvstore.blockdb.EVICT_AT_ONCE", 3)
        evict, calls = shard_of(store).db._evict_all, iter(range(9))

        def second_fails(*arguments: object) -> object:
            if next(calls) == 1:
                raise lmdb.DiskError("mdb_txn_commit: No space left on device")
            return evict(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(shard_of(store).db, "_evict_all", second_fails)
        with pytest.raises(errors.StorePathError, match="what went before is gone"):
            store.clear()
        stats = store.stats()
        assert stats["records"] == stats["eviction_resident"] == 5
