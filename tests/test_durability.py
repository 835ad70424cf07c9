"""The story: the machine goes down, a disk is full, a file is cut short. What was promised as durable is there; what may
have been lost is not served; what cannot be read safely is refused before it is mapped; and a put that finds no room says
so, while everything else stands.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, StoreConfig, errors
from kvstore.storefile import DATA_NAME, SLOT_STRIDE, STORE_NAME, StoreFile, StoreState, boot_id, parse_store
from tests.support import MIB, SMALL, Raw, block_hashes, canonical, index_key, make_cache, open_store, shard_of
from tests.test_processes import child_outcome, run_python, wait_until_unlocked

pytestmark = pytest.mark.both
HASHES = block_hashes(8)
COMMIT = StoreConfig(capacity_bytes=64 * MIB)
LARGE = {"layers": 4, "heads": 4, "tokens": 16, "head_size": 32}
"""Blocks of 32 KiB."""


def state_of(folder: Path) -> StoreState:
    """What the STORE file says on disk."""
    return parse_store((folder / STORE_NAME).read_bytes(), folder / STORE_NAME)


def crash(path: Path, cache: PagedKVCache, config: StoreConfig = SMALL) -> Path:
    """Put three blocks in a child that never closes its store; the shard's folder."""

    kept: list[KVStore] = []

    def run() -> bool:
        kept.append(open_store(path, cache, config))
        return bool(kept[0].put_blocks(HASHES[:3], [0, 1, 2]).stored.all())

    assert child_outcome(run) == "True"
    return wait_until_unlocked(next(path.iterdir()))


def reboot(folder: Path, boot: bytes = b"another boot. -.") -> None:
    """Have the STORE file say that another boot of the machine wrote it last."""
    file = StoreFile(folder, writable=True)
    assert file.state is not None
    file.write(replace(file.state, boot_id=boot))
    file.close()


# --- the clean flag ------------------------------------------------------------------------------------------------


def test_in_commit_mode_a_store_is_clean_all_the_time(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache, COMMIT) as store:
        assert state_of(store.folder).clean
        assert store.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()
        assert state_of(store.folder).clean
    assert state_of(store.folder).clean
    assert state_of(crash(tmp_path / "killed", cache, COMMIT)).clean


def test_in_process_mode_a_store_is_unclean_until_it_is_closed(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        assert store.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()
        assert not state_of(store.folder).clean
    assert state_of(store.folder).clean
    with open_store(tmp_path, cache) as store:
        assert store.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()
        assert state_of(store.folder).clean, "reading leaves a store clean"
        assert store.put_blocks(HASHES[3:4], [3], start=3).stored.all()
        assert not state_of(store.folder).clean
    assert not state_of(crash(tmp_path / "killed", cache)).clean


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What happens in order: each fsync of a STORE file and each sync of LMDB, with the clean flag that is on disk."""
    events: list[tuple[str, bool]] = []
    write, opened = StoreFile.write, lmdb.open

    def noted_write(file: StoreFile, state: StoreState) -> None:
        write(file, state)
        events.append(("STORE", state_of(file.path.parent).clean))

    def noted_open(path: str, *args: Any, **options: Any) -> Any:
        made = Path(path, DATA_NAME).exists()
        events.append(("open" if made else "make", state_of(Path(path)).clean))
        return opened(path, *args, **options)

    monkeypatch.setattr(StoreFile, "write", noted_write)
    monkeypatch.setattr(lmdb, "open", noted_open)
    return events


@pytest.mark.inline("breaks what reads or writes the shard")
def test_the_store_file_is_synced_whenever_it_is_written(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    pwrite, fsync = os.pwrite, os.fsync

    def name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    monkeypatch.setattr(os, "pwrite", lambda fd, *a: (calls.append(("pwrite", name(fd))), pwrite(fd, *a))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(("fsync", name(fd))), fsync(fd))[1])
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:1], [0])
    writes = [i for i, call in enumerate(calls) if call == ("pwrite", STORE_NAME)]
    assert len(writes) >= 2
    assert all(calls[i + 1] == ("fsync", STORE_NAME) for i in writes)
    assert ("fsync", store.folder.name) in calls, "the new files' names are made durable"
    assert ("fsync", tmp_path.name) in calls, "the new folder's name is made durable"


@pytest.mark.parametrize("config", [SMALL, COMMIT])
@pytest.mark.inline("breaks what reads or writes the shard")
def test_lmdb_makes_its_file_only_after_the_store_file_says_unclean(
    tmp_path: Path, cache: PagedKVCache, synced: list[tuple[str, bool]], config: StoreConfig
) -> None:
    open_store(tmp_path, cache, config).close()
    assert synced == [("STORE", False), ("make", False), ("STORE", True)]
    synced.clear()
    open_store(tmp_path, cache, config).close()
    assert synced == [("open", True)]


@pytest.mark.inline("breaks what reads or writes the shard")
def test_unclean_is_on_disk_before_the_first_write_that_is_not_synced(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path, cache).close()
    with open_store(tmp_path, cache) as store:
        db, seen = shard_of(store).db, []
        put = db._put

        def noted(*arguments: Any) -> Any:
            seen.append(state_of(store.folder).clean)
            return put(*arguments)

        monkeypatch.setattr(db, "_put", noted)
        assert state_of(store.folder).clean
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    assert seen == [False, False]


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_map_size_that_no_process_can_map_is_damage(tmp_path: Path, cache: PagedKVCache, mode: str) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:2], [0, 1])
    data = bytearray((store.folder / "data.mdb").read_bytes())
    for page in (0, 4096):
        data[page + 32 + 6] |= 0x80
    (store.folder / "data.mdb").write_bytes(data)
    with pytest.raises(errors.StoreDamaged, match="names a map of"):
        open_store(tmp_path, cache, mode=mode)


@pytest.mark.inline("breaks what reads or writes the shard")
def test_clean_is_written_only_after_the_last_sync(
    tmp_path: Path, cache: PagedKVCache, synced: list[tuple[str, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, cache)
    assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    env = shard_of(store).db._env

    class Broken:
        """An environment whose disk fails to sync."""

        def sync(self, force: bool = False) -> None:
            raise lmdb.Error("Input/output error")

        def close(self) -> None:
            env.close()

    shard_of(store).db._env = Broken()  # type: ignore[assignment]
    with pytest.raises(errors.StorePathError, match="the last sync failed: Input/output error"):
        store.close()
    assert not state_of(store.folder).clean
    with open_store(tmp_path, cache) as again:
        assert again.get_blocks(HASHES[:2], [2, 3]).verified.all()


# --- after a power loss --------------------------------------------------------------------------------------------


def test_after_another_boot_an_unclean_store_is_emptied_and_says_so(
    tmp_path: Path, cache: PagedKVCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = crash(tmp_path, cache)
    reboot(folder)
    with pytest.raises(errors.StoreDamaged, match='mode="rw", which empties it'):
        open_store(tmp_path, cache, mode="r")
    with caplog.at_level(logging.WARNING), open_store(tmp_path, cache) as store:
        assert store.stats()["emptied_at_open"] == 1
        assert store.stats()["records"] == 0
        assert store.get_blocks(HASHES[:3], [3, 4, 5]).missing.all()
        assert store.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()
    assert any("emptied" in record.getMessage() for record in caplog.records)
    assert (state_of(folder).clean, state_of(folder).boot_id) == (True, boot_id())
    with open_store(tmp_path, cache) as store:
        assert store.stats()["emptied_at_open"] == 0
        assert store.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


def test_a_crash_while_emptying_empties_again(tmp_path: Path, cache: PagedKVCache) -> None:
    folder = crash(tmp_path, cache)
    reboot(folder)
    (folder / DATA_NAME).unlink()
    with open_store(tmp_path, cache) as store:
        assert store.stats()["records"] == 0
        assert not state_of(folder).clean, "its new file is not synced yet"


def test_in_the_same_boot_an_unclean_store_is_kept(
    tmp_path: Path, cache: PagedKVCache, caplog: pytest.LogCaptureFixture
) -> None:
    folder = crash(tmp_path, cache)
    for config in (SMALL, COMMIT):
        with open_store(tmp_path, cache, config) as store:
            assert store.stats()["emptied_at_open"] == 0
            assert store.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()
    assert not caplog.records
    assert state_of(folder).clean


def test_commit_mode_makes_an_unclean_store_of_this_boot_clean(tmp_path: Path, cache: PagedKVCache) -> None:
    folder = crash(tmp_path, cache)
    with open_store(tmp_path, cache, COMMIT):
        assert state_of(folder).clean


def test_a_clean_store_of_another_boot_is_kept(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    reboot(store.folder)
    with open_store(tmp_path, cache) as again:
        assert again.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


# --- damaged files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("length", [1, 24, 72])
def test_a_torn_write_of_one_slot_leaves_the_other(tmp_path: Path, cache: PagedKVCache, slot: int, length: int) -> None:
    with open_store(tmp_path, cache, COMMIT) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    data = bytearray((store.folder / STORE_NAME).read_bytes())
    at = slice(slot * SLOT_STRIDE + 24, slot * SLOT_STRIDE + 24 + length)
    data[at] = bytes(byte ^ 0xFF for byte in data[at])
    (store.folder / STORE_NAME).write_bytes(data)
    with open_store(tmp_path, cache, COMMIT) as again:
        assert again.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_store_file_with_no_intact_slot_is_damaged(tmp_path: Path, cache: PagedKVCache, mode: str) -> None:
    open_store(tmp_path, cache, COMMIT).close()
    path = next(tmp_path.iterdir()) / STORE_NAME
    data = bytearray(path.read_bytes())
    for slot in (0, SLOT_STRIDE):
        data[slot + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.StoreDamaged, match="neither of its two slots is intact"):
        open_store(tmp_path, cache, mode=mode)


OPEN_SHORT = """
path, whole = Path(sys.argv[1]), Path(sys.argv[1], "tp0of1-pp0of1", "data.mdb").read_bytes()
lengths = (1, 100, 4095, 4096, 8191, 8192, 3 * 4096, len(whole) // 2, len(whole) - 4096, len(whole) - 1)
for length in lengths if io_mode() == "inline" else lengths[1::4]:
    for mode in ("r", "rw"):
        data = Path(path, "tp0of1-pp0of1", "data.mdb")
        data.write_bytes(whole[:length])
        try:
            open_store(path, make_cache(), mode=mode)
        except StoreDamaged as error:
            assert "kvstore-fsck --repair" in str(error), error
            assert data.read_bytes() == whole[:length]
        else:
            print("opened", length, mode)
data.write_bytes(whole)
with open_store(path, make_cache()) as store:
    print(store.get_blocks(block_hashes(3), [3, 4, 5]).num_leading)
"""


def test_a_database_that_was_cut_short_is_damaged_and_not_mapped(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    done = run_python(OPEN_SHORT, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_database_of_length_zero_holds_nothing(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
    (store.folder / DATA_NAME).write_bytes(b"")
    with pytest.raises(errors.StorePathError, match="expected a shard that a writer has made"):
        open_store(tmp_path, cache, mode="r")
    with open_store(tmp_path, cache) as again:
        assert again.get_blocks(HASHES[:3], [3, 4, 5]).missing.all()
        assert again.put_blocks(HASHES[:3], [0, 1, 2]).stored.all()


def test_a_file_that_lacks_only_free_pages_is_whole(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:3], [0, 1, 2])
        with Raw(store).transaction(write=True) as (txn, databases):
            # Pages that one transaction takes and gives back are counted in the file and never written.
            txn.put(b"\0" * 10, bytes(MIB), db=databases["payload"])
            txn.delete(b"\0" * 10, db=databases["payload"])
        pages = Raw(store).info()["last_pgno"] + 1
    assert (store.folder / DATA_NAME).stat().st_size < pages * 4096
    for mode in ("r", "rw"):
        with open_store(tmp_path, cache, mode=mode) as again:
            assert again.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


# --- a full store --------------------------------------------------------------------------------------------------


def fill(store: KVStore, blocks: int = 96) -> list[bytes]:
    """Put blocks until the store is full; the hashes of those that it has."""
    hashes, kept = block_hashes(blocks, "fill"), []
    for first in range(0, blocks, 8):
        put = store.put_blocks(hashes[first : first + 8], range(8), start=first)
        assert set(put.failed.values()) <= {"store_full"}
        assert all(put.stored[i] != (i in put.failed) for i in range(8))
        kept += [hashes[first + int(i)] for i in np.flatnonzero(put.stored)]
    return kept


def check_kept(store: KVStore, kept: list[bytes], blocks: int = 96) -> None:
    """Every kept block verifies with the right bytes."""
    engine, hashes = make_cache(seed=1, **LARGE), block_hashes(blocks, "fill")
    loader = store.attach(engine)
    for position in (hashes.index(h) for h in kept):
        assert loader.get_blocks([hashes[position]], [position % 8], start=position).verified.all()
        assert np.array_equal(canonical(engine, [position % 8]), canonical(store.cache, [position % 8]))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[KVStore, list[bytes]]]:
    config = StoreConfig(capacity_bytes=2 * MIB, durability="process", eviction="none")
    with open_store(tmp_path, make_cache(**LARGE), config) as store:
        yield store, fill(store)


def test_a_full_store_says_so_and_keeps_what_it_has(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    assert 32 < len(kept) < 64
    put = store.put_blocks(block_hashes(8), range(8))
    assert (set(put.failed.values()), put.stored.any(), put.present.any()) == ({"store_full"}, False, False)
    check_kept(store, kept)
    figures = store.stats()
    assert figures["records"] == len(kept)
    assert figures["put_failed_store_full"] == 96 - len(kept) + 8
    assert figures["file_bytes"] <= figures["capacity_bytes"] == 2 * MIB


def test_a_full_store_knows_what_is_present(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    first = kept[:8]
    assert store.put_blocks(first, range(8)).present.all()
    put = store.put_blocks([*first[:2], block_hashes(1)[0]], range(3))
    assert put.present.tolist() == [True, True, False]
    assert put.failed == {2: "store_full"}


def test_a_full_store_takes_a_smaller_block_that_fits(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    store.close()
    path, config = store.folder.parent, StoreConfig(capacity_bytes=2 * MIB, durability="process")
    with open_store(path, make_cache(layers=1, heads=1, tokens=1, head_size=4), config) as small:
        hashes = block_hashes(1, "small")
        put = small.put_blocks(hashes, [0])
        assert put.stored[0] == (not put.failed)
        assert small.get_blocks(hashes, [1]).verified[0] == put.stored[0]
    with open_store(path, store.cache, config) as again:
        check_kept(again, kept)


def test_rewriting_blocks_of_a_full_store_never_loses_them(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    for position, block_hash in enumerate(kept[:16]):
        put = store.put_blocks([block_hash], [position % 8], start=position, num_tokens=position * 16 + 9)
        assert put.stored[0] or put.failed == {0: "store_full"}
        tokens = position * 16 + 9 if put.stored[0] else None
        assert store.get_blocks([block_hash], [position % 8], start=position, num_tokens=tokens).verified.all()
    assert store.stats()["records"] == len(kept)
    assert store.stats()["file_bytes"] <= 2 * MIB


def test_a_store_full_of_damage_still_answers(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    raw, key = Raw(store), index_key(store, kept[0])
    raw.put_entry(key, (raw.entry(key) or b"")[:-1] + b"\xff")
    got = store.get_blocks(kept[:2], range(2))
    assert got.verified.tolist() == [False, True]
    assert list(got.rejected) == [0]
    assert store.get_blocks(kept[:1], [0]).missing.all()


def test_more_capacity_is_room_again(full: tuple[KVStore, list[bytes]]) -> None:
    store, kept = full
    store.close()
    with open_store(store.folder.parent, store.cache, StoreConfig(capacity_bytes=8 * MIB)) as larger:
        check_kept(larger, kept)
        assert larger.put_blocks(block_hashes(8), range(8)).stored.all()


# --- a full disk ---------------------------------------------------------------------------------------------------

LIMITED = """
import resource
sizes, hashes = dict(layers=4, heads=4, tokens=16, head_size=32), block_hashes(24)
cache, engine = make_cache(**sizes), make_cache(seed=1, **sizes)
source = canonical(cache, range(8))
def check(store, count):
    for first in range(0, count, 8):
        assert store.get_blocks(hashes[first : first + 8], range(8), start=first).verified.all()
        assert (canonical(engine, range(8)) == source).all()
def limit(nbytes):
    resource.prlimit(store.io_process_id or 0, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
for name in ("commit", "process"):
    with open_store(Path(sys.argv[1], name), cache, StoreConfig(capacity_bytes=64 * MIB, durability=name)) as store:
        other = store.attach(engine)
        assert store.put_blocks(hashes[:8], range(8)).stored.all()
        limit(store.stats()["file_bytes"] + 100_000)
        for _ in range(3):
            put = store.put_blocks(hashes[8:16], range(8), start=8)
            assert put.failed == dict.fromkeys(range(8), "io_error"), put
            check(other, 8)
        assert store.stats()["records"] == 8
        limit(resource.RLIM_INFINITY)
        assert store.put_blocks(hashes[8:16], range(8), start=8).stored.all()
        check(other, 16)
print("whole")
"""


def test_a_file_that_may_not_grow_fails_the_put_and_nothing_else(tmp_path: Path) -> None:
    done = run_python(LIMITED, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("durability", ["commit", "process"])
def test_a_full_disk_fails_the_put_and_nothing_else(disk: Path, durability: str) -> None:
    config = StoreConfig(capacity_bytes=64 * MIB, durability=durability)
    with open_store(disk / "store", make_cache(**LARGE), config) as store:
        hashes, kept = block_hashes(96, "fill"), block_hashes(96, "fill")[:8]
        assert store.put_blocks(kept, range(8)).stored.all()
        (disk / "ballast").write_bytes(bytes(3 * MIB))
        for first in range(8, 32, 8):
            put = store.put_blocks(hashes[first : first + 8], range(8), start=first)
            assert set(put.failed.values()) <= {"disk_full", "io_error"}
            kept += [hashes[first + int(i)] for i in np.flatnonzero(put.stored)]
            check_kept(store, kept)
        assert "disk_full" in put.failed.values()
        assert store.stats()["records"] == len(kept) < 32
        (disk / "ballast").unlink()
        assert not store.put_blocks(hashes[24:32], range(8), start=24).failed
        check_kept(store, kept)
    with open_store(disk / "store", make_cache(**LARGE), config) as again:
        check_kept(again, [*kept, *hashes[24:32]])


@pytest.mark.parametrize("left", [0, 1024, 4096, 8192, 12288, 20480])
def test_a_store_that_finds_no_room_to_be_made_says_so_and_is_made_later(
    disk: Path, cache: PagedKVCache, left: int
) -> None:
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - left)))
    if left < 40960:
        said = child_outcome(lambda: open_store(disk / "store", cache, COMMIT))
        assert said.startswith("StorePathError"), said or "killed by a signal"
        assert "room" in said or "full" in said
    (disk / "ballast").unlink()
    with open_store(disk / "store", cache, COMMIT) as store:
        assert store.put_blocks(HASHES[:1], [0]).stored.all()
