"""The story: the file's trees are damaged, or its end is gone. LMDB would end the process that writes to them, or reads past
the end, so whoever opens a shard looks first.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from kvstore import errors
from kvstore.fsck.pages import PageFile, free_pages, leaf_nodes
from kvstore.storefile import DATA_NAME, LastMeta, check_data_file, newest_meta, value_cut_short
from tests.campaign.children import Child
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


# --- the end of the file is gone ---------------------------------------------------------------------------------


def last_run(data: Path) -> tuple[int, int]:
    """The last value on pages of its own: its first page, and the page behind it."""
    with PageFile(data) as file:
        root = file.databases(file.metas[0])[b"payload"].root
        nodes = [node for _, page in file.walk(root) for node in leaf_nodes(page) if node.run is not None]
        run, size = max((node.run or 0, node.size) for node in nodes)
        return run, run + file.run_pages(size)


def with_a_value_at_the_end(path: Path) -> tuple[Path, int, int]:
    """A closed store in whose file nothing that is in use lies behind the last value; its file, and that value's pages."""
    cache = make_cache(layers=4, heads=2, tokens=64)
    with open_store(path, cache) as store:
        store.put_blocks(HASHES[:4], range(4))
        data = store.folder / DATA_NAME
    for number in range(4, 8):
        with open_store(path, cache) as store:
            store.put_blocks(HASHES[number : number + 1], [number])
            # Pages that were written after the values move to free ones before them.
            store.evict(1)
    first, end = last_run(data)
    assert end > first + 2
    return data, first, end


def opens_and_reads(path: Path, mode: str) -> str:
    """What comes of opening a store in a process of its own, and reading every block: an error's name, or a signal's."""

    def action(say: Callable[..., None]) -> None:
        try:
            with open_store(path, make_cache(layers=4, heads=2, tokens=64), mode=mode) as store:
                store.get_blocks(HASHES[:1], [0])
                for number in range(1, 8):
                    store.get_blocks(HASHES[number : number + 1], [number])
            say("read", "")
        except errors.KVStoreError as error:
            say("raised", type(error).__name__)

    ending = Child(action).join(60)
    return ending.crash or ending.said[-1][-1]


@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_file_that_ends_within_its_last_value_is_refused(tmp_path: Path, mode: str) -> None:
    """The first page of that value is there, which is all of it that lmdb.verify looks at."""
    data, first, end = with_a_value_at_the_end(tmp_path)
    assert opens_and_reads(tmp_path, mode) == ""
    for pages in (first + 1, end - 1):
        os.truncate(data, pages * PAGE)
        assert opens_and_reads(tmp_path, mode) == "StoreDamaged"
        assert data.stat().st_size == pages * PAGE


@pytest.mark.inline("looks at the file alone")
@pytest.mark.parametrize("large", [False, True], ids=["a free list in leaves", "one on pages of its own"])
def test_pages_past_the_end_may_be_free_and_nothing_else(tmp_path: Path, large: bool) -> None:
    """A file as LMDB leaves it where the last pages were freed before they were ever written; and one with a page less."""
    data, count = tmp_path / DATA_NAME, 1200 if large else 30
    with lmdb.open(str(tmp_path), map_size=2**26, lib_version=0, sync=False) as env:
        with env.begin(write=True) as txn:
            for key in range(count):
                txn.put(b"%06d" % key, bytes(3 * PAGE))
        with env.begin(write=True) as txn:
            for key in range(20, count):
                txn.delete(b"%06d" % key)
        for key in range(3):
            with env.begin(write=True) as txn:
                # Its pages, and those of the free list, move to free ones in the middle of the file.
                txn.put(b"small%d" % key, b"value")
    meta, _ = newest_meta(data)
    assert meta is not None
    free = free_in(data, meta)
    used = max(page for page in range(meta.last + 1) if page not in free)
    assert used < meta.last
    os.truncate(data, (used + 1) * PAGE)
    assert (value_cut_short(data), check_data_file(data)) == (None, 2**26)
    assert on_own_pages(data, meta) == large
    os.truncate(data, used * PAGE)
    assert value_cut_short(data) is not None
    with pytest.raises(errors.StoreDamaged):
        check_data_file(data)


def on_own_pages(data: Path, meta: LastMeta) -> bool:
    """Whether an entry of the free list lies on pages of its own."""
    with PageFile(data) as file:
        return any(node.run is not None for _, page in file.walk(meta.free) for node in leaf_nodes(page))


def free_in(data: Path, meta: LastMeta) -> set[int]:
    """The pages of the free list, read by other code than the one that is tested."""
    with PageFile(data) as file:
        leaves = [page for _, page in file.walk(meta.free)]
        return {
            int(number)
            for page in leaves
            for node in leaf_nodes(page)
            for number in free_pages(file.value(page, node)).tolist()
        }


@pytest.mark.inline("looks at the file alone")
@pytest.mark.parametrize("fill", [b"\xff", b"\x00", b"\x02"])
def test_a_free_list_that_is_none_is_no_reason_to_open(tmp_path: Path, fill: bytes) -> None:
    """What a writer does to the pages of a free list that is being read: any bytes may come to lie there."""
    data, _, end = with_a_value_at_the_end(tmp_path)
    meta, _ = newest_meta(data)
    assert meta is not None
    content = bytearray(data.read_bytes()[: (end - 1) * PAGE])
    content[meta.free * PAGE : (meta.free + 1) * PAGE] = fill * PAGE
    data.write_bytes(content)
    assert value_cut_short(data) is not None


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


@pytest.mark.inline("looks at the file alone")
@pytest.mark.parametrize("name", ["STORE", "data.mdb"])
@pytest.mark.parametrize("mode", ["rw", "r"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str, mode: str) -> None:
    with open_store(tmp_path, make_cache(), io="inline") as store:
        store.put_blocks(block_hashes(1), [0])
        folder = store.folder
    (folder / name).unlink()
    os.mkfifo(folder / name)
    command = (
        "import sys; from pathlib import Path; from tests.support import *\n"
        "try: open_store(Path(sys.argv[1]), make_cache(), mode=sys.argv[2], io='inline')\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, str(tmp_path), mode], timeout=120, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() in ("StoreDamaged", "StorePathError"), done.stderr
