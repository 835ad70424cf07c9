"""The story: readers stay open for days beside a writer that grows the store, evicts from it, clears it, makes its file
smaller, and is started anew on a folder that an operator emptied. A reader goes with the store that lies at its path: it
finds what is there, misses what is not, raises nothing, and keeps no file alive that was removed. A reader that is killed
in the middle of a read costs no room.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import StoreConfig, errors
from kvstore.blockdb import BlockDB
from kvstore.following import LOOK_INTERVAL_S, RETRY_INTERVAL_S
from kvstore.storefile import SLOT, SLOT_STRIDE, slot_hash
from tests.records import opened, put, record_of, shape_of
from tests.support import MIB, block_hashes, canonical, make_cache, open_store
from tests.test_processes import PATIENCE, Script, run_python, start  # noqa: F401

SIZES: dict[str, int] = {"layers": 4, "heads": 4, "tokens": 16, "head_size": 32, "blocks": 64}
"""Blocks of 32 KiB."""
Start = Callable[..., Script]

READER = """
cache = make_cache(seed=9, layers=4, heads=4, tokens=16, head_size=32, blocks=64)
with open_store(Path(sys.argv[1]), cache, mode="r") as store:
    print("ready", flush=True)
    for line in sys.stdin:
        request, count = line.split()
        hashes = block_hashes(int(count), request)
        matched, got = store.match_prefix(hashes), store.get_blocks(hashes, range(int(count)))
        found = np.flatnonzero(got.verified)
        digest = hashlib.sha256(canonical(cache, found).tobytes()).hexdigest()
        print(matched, found.size, len(got.rejected), digest, flush=True)
"""


def digest_of(seed: int, count: int) -> str:
    """Of the first blocks of a cache of this seed."""
    return hashlib.sha256(canonical(make_cache(seed=seed, **SIZES), range(count)).tobytes()).hexdigest()


def write(path: Path, request: str, count: int, seed: int, **config: Any) -> None:
    """Open the store, put blocks of a request from a cache of this seed, and close it."""
    with open_store(path, make_cache(seed=seed, **SIZES), settings(**config)) as store:
        assert not store.put_blocks(block_hashes(count, request), range(count)).failed


def settings(capacity_mib: int = 16, **config: Any) -> StoreConfig:
    return StoreConfig(capacity_bytes=capacity_mib * MIB, durability="process", eviction="lru", **config)


class Reader:
    """A reader in a process of its own."""

    def __init__(self, start: Start, path: Path) -> None:  # noqa: F811
        self.script = start("import hashlib\n" + READER, str(path))
        assert self.script.line() == "ready"

    def ask(self, request: str, count: int = 16) -> tuple[int, int, int, str]:
        """What it finds of a request: blocks matched, verified and rejected, and a digest of the verified ones."""
        self.script.send(f"{request} {count}")
        said = self.script.line().split()
        assert len(said) == 4, said
        return int(said[0]), int(said[1]), int(said[2]), said[3]

    def finds(self, request: str, count: int, seed: int) -> bool:
        """Whether it finds all blocks of a request, and those of the cache of this seed."""
        return self.ask(request, count) == (count, count, 0, digest_of(seed, count))

    def misses(self, request: str, count: int = 16) -> bool:
        return self.ask(request, count)[:3] == (0, 0, 0)

    def holds_removed(self) -> list[str]:
        """The removed files that the process keeps alive, mapped ones too."""
        process = Path("/proc") / str(self.script.process.pid)
        found = [os.readlink(fd) for fd in (process / "fd").iterdir() if fd.is_symlink()]
        found += (process / "maps").read_text().splitlines()
        return [name for name in found if "(deleted)" in name and ("mdb" in name or "STORE" in name)]

    def end(self) -> list[str]:
        """End it in the ordinary way; the lines of its log."""
        _, said = self.script.process.communicate(timeout=PATIENCE)
        assert self.script.process.returncode == 0, said
        return str(said).splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def folder_of(path: Path) -> Path:
    return path / "tp0of1-pp0of1"


def noticed() -> None:
    """Wait until a reader's next call looks, and tries to open what it could not."""
    time.sleep(LOOK_INTERVAL_S + RETRY_INTERVAL_S + 0.05)


# --- beside a writer -----------------------------------------------------------------------------------------------


def test_a_reader_goes_through_growth_eviction_and_clear(path: Path, start: Start) -> None:  # noqa: F811
    write(path, "a", 16, seed=1, capacity_mib=1)
    reader = Reader(start, path)
    assert reader.finds("a", 16, seed=1)
    cache = make_cache(seed=2, **SIZES)
    with open_store(path, cache, settings(capacity_mib=8)) as store:
        for request in range(10):
            assert not store.put_blocks(block_hashes(64, f"r{request}"), range(64)).failed
            matched, verified, rejected, _ = reader.ask(f"r{request}", 64)
            assert (matched, verified, rejected) == (64, 64, 0)
        assert store.stats()["evicted"] > 300
        assert reader.misses("a")
        assert reader.misses("r0", 64)
        assert reader.finds("r9", 64, seed=2)
        store.clear()
        assert reader.misses("r9", 64)
        assert not store.put_blocks(block_hashes(4, "b"), range(4)).failed
        assert reader.ask("b", 16)[:3] == (4, 4, 0)
    assert reader.finds("b", 4, seed=2)
    assert [line for line in reader.end() if "opened anew" in line] == []


def test_a_file_is_made_smaller_once_its_readers_closed_it(path: Path, start: Start) -> None:  # noqa: F811
    write(path, "a", 64, seed=1)
    size = (folder_of(path) / "data.mdb").stat().st_size
    reader = Reader(start, path)
    with pytest.raises(errors.StoreBusy, match="close them"):
        write(path, "b", 1, seed=1, capacity_mib=1)
    assert reader.finds("a", 64, seed=1)
    reader.end()
    write(path, "b", 8, seed=2, capacity_mib=1)
    assert (folder_of(path) / "data.mdb").stat().st_size <= MIB < size
    assert Reader(start, path).finds("b", 8, seed=2)


def test_a_second_writer_is_refused_at_once(path: Path, start: Start) -> None:  # noqa: F811
    with open_store(path, make_cache(**SIZES)) as store:
        before = time.monotonic()
        done = run_python(
            """
before = time.monotonic()
try:
    open_store(Path(sys.argv[1]), make_cache())
except StoreLocked:
    print(time.monotonic() - before < 10)
""",
            str(path),
        )
        assert done.stdout == "True\n", done.stderr
        assert time.monotonic() - before < PATIENCE
        assert store.put_blocks(block_hashes(1), [0]).stored.all()


# --- the store is replaced -----------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    shutil.rmtree(folder_of(path))


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def remove_data(path: Path) -> None:
    (folder_of(path) / "data.mdb").unlink()


REPLACEMENTS = {"removed": remove, "moved away": move_away, "without data": remove_data}


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_reader_goes_on_with_the_store_that_took_the_place_of_its_own(path: Path, start: Start, how: str) -> None:  # noqa: F811
    write(path, "a", 16, seed=1)
    write(path, "b", 16, seed=1)
    reader = Reader(start, path)
    assert reader.finds("a", 16, seed=1)
    REPLACEMENTS[how](path)
    write(path, "b", 16, seed=2)
    time.sleep(LOOK_INTERVAL_S)
    assert reader.misses("a"), "the new store has no such block"
    assert reader.finds("b", 16, seed=2)
    assert reader.holds_removed() == []
    write(path, "a", 16, seed=3)
    assert reader.finds("a", 16, seed=3)
    assert len([line for line in reader.end() if "opened anew" in line]) == 1


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_while_there_is_no_store_everything_is_a_miss(path: Path, start: Start, how: str) -> None:  # noqa: F811
    write(path, "a", 16, seed=1)
    reader = Reader(start, path)
    assert reader.finds("a", 16, seed=1)
    REPLACEMENTS[how](path)
    time.sleep(LOOK_INTERVAL_S)
    for _ in range(5):
        assert reader.misses("a")
        noticed()
    assert reader.holds_removed() == []
    write(path, "a", 16, seed=2)
    noticed()
    assert reader.finds("a", 16, seed=2)
    log = reader.end()
    assert len([line for line in log if "removed or replaced" in line]) == 1, log
    assert len([line for line in log if "opened anew" in line]) == 1, log
    assert len(log) == 2, log


def make_newer(path: Path) -> None:
    """Give the store a STORE file of a later format version, in both slots."""
    store = folder_of(path) / "STORE"
    data = bytearray(store.read_bytes().ljust(2 * SLOT_STRIDE, b"\0"))
    for at in (0, SLOT_STRIDE):
        slot = bytearray(data[SLOT_STRIDE : SLOT_STRIDE + SLOT.size])
        struct.pack_into("<I", slot, 8, 2)
        struct.pack_into("<Q", slot, 16, slot_hash(slot))
        data[at : at + SLOT.size] = slot
    store.write_bytes(data)


def damage_data(path: Path) -> None:
    (folder_of(path) / "data.mdb").write_bytes(np.random.default_rng(0).bytes(100_000))


def cut_data(path: Path) -> None:
    data = folder_of(path) / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [make_newer, damage_data, cut_data])
def test_a_store_that_cannot_be_opened_is_left_untouched_and_everything_a_miss(
    path: Path,
    start: Start,  # noqa: F811
    spoil: Callable[[Path], None],
) -> None:
    write(path, "a", 16, seed=1)
    reader = Reader(start, path)
    assert reader.finds("a", 16, seed=1)
    other = path.with_name("other")
    write(other, "a", 16, seed=2)
    spoil(other)
    (folder_of(other) / "lock.mdb").unlink()
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder_of(other).iterdir()}
    path.rename(path.with_name("moved"))
    other.rename(path)
    time.sleep(LOOK_INTERVAL_S)
    for _ in range(3):
        assert reader.misses("a")
        noticed()
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder_of(path).iterdir()} == before
    shutil.rmtree(path)
    write(path, "a", 16, seed=3)
    noticed()
    assert reader.finds("a", 16, seed=3)


def test_a_store_file_of_a_newer_version_alone_ends_the_reading(path: Path, start: Start) -> None:  # noqa: F811
    write(path, "a", 16, seed=1)
    reader = Reader(start, path)
    store, kept = folder_of(path) / "STORE", (folder_of(path) / "STORE").read_bytes()
    newer = path.with_name("newer")
    shutil.copytree(path, newer)
    make_newer(newer)
    os.replace(folder_of(newer) / "STORE", store)
    time.sleep(LOOK_INTERVAL_S)
    assert reader.misses("a")
    store.write_bytes(kept)
    noticed()
    assert reader.finds("a", 16, seed=1)


READ_ON_AS_IT_IS_REPLACED = """
sizes = dict(layers=4, heads=4, tokens=16, head_size=32, blocks=64)
sources = [canonical(make_cache(seed=seed, **sizes), range(64)) for seed in range(8)]
hashes, stop, failures, seen = block_hashes(16), threading.Event(), [], set()
def read(base):
    try:
        while not stop.is_set():
            got = other.get_blocks(hashes, range(base, base + 16))
            matched, found = other.match_prefix(hashes), np.flatnonzero(got.verified)
            landed = canonical(cache, base + found)
            seeds = {seed for seed in range(8) if found.size and (landed == sources[seed][found]).all()}
            if found.size and not seeds or {r.kind for r in got.rejected.values()} - {"io"}:
                failures.append(got)
            seen.update(seeds)
    except BaseException as error:
        failures.append(error)
cache = make_cache(seed=9, **sizes)
with open_store(Path(sys.argv[1]), cache, mode="r") as store:
    other = store.attach(cache)
    threads = [threading.Thread(target=read, args=(base,)) for base in (0, 16, 32, 48)]
    [thread.start() for thread in threads]
    print("ready", flush=True)
    input()
    stop.set()
    [thread.join() for thread in threads]
print(sorted(seen), failures)
"""


def test_threads_go_on_while_the_store_is_replaced_again_and_again(path: Path, start: Start) -> None:  # noqa: F811
    write(path, "r", 16, seed=0)
    reader = start(READ_ON_AS_IT_IS_REPLACED, str(path))
    assert reader.line() == "ready"
    for seed in range(1, 8):
        noticed()
        shutil.rmtree(path)
        write(path, "r", 16, seed=seed)
    noticed()
    reader.send()
    code, said = reader.end()
    assert (code, said) == (0, f"{list(range(8))} []\n")


# --- calls in flight -----------------------------------------------------------------------------------------------

SHAPE = shape_of()
HASHES = block_hashes(2)
KEYS = SHAPE.keys(HASHES)
WRITE = """
from tests.records import *
with opened(Path(sys.argv[1])) as db:
    put(db, record_of(shape_of(), block_hashes(2)[int(sys.argv[2])]))
"""


def write_one(folder: Path, which: int) -> None:
    """Write one record from another process."""
    done = run_python(WRITE, str(folder), str(which))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def db(tmp_path: Path) -> Iterator[BlockDB]:
    """A reader of a shard that another process made."""
    write_one(tmp_path / "shard", 0)
    reader = BlockDB(tmp_path / "shard", 16 * MIB, False, False, MIB)
    yield reader
    reader.close()


def present(db: BlockDB) -> list[bool]:
    """Which keys a call finds."""
    token = object()
    try:
        db.enter(token)
        with db.read() as snapshot:
            return [snapshot.header(key) is not None for key in KEYS]
    finally:
        db.calls.discard(token)


def test_what_a_call_in_flight_reads_is_not_unmapped_under_it(db: BlockDB) -> None:
    """And a call that comes after the replacement waits for it, instead of reading the old store."""
    found: list[list[bool]] = []
    db.enter("a call")
    with db.read() as snapshot:
        value = snapshot.header(KEYS[0])
        shutil.rmtree(db.folder)
        write_one(db.folder, 1)
        noticed()
        late = threading.Thread(target=lambda: found.append(present(db)))
        late.start()
        late.join(0.3)
        assert late.is_alive()
        assert snapshot.header(KEYS[0]) == value
        assert snapshot.headers([KEYS[0]]) == [value]
    db.calls.discard("a call")
    late.join(PATIENCE)
    assert found == [[False, True]]


def test_a_call_that_does_not_end_costs_misses_and_no_stale_blocks(
    db: BlockDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.following.REVIVE_PATIENCE_S", 0.1)
    db.enter("a call")
    shutil.rmtree(db.folder)
    write_one(db.folder, 1)
    noticed()
    before = time.monotonic()
    assert present(db) == [False, False]
    first = time.monotonic() - before
    assert present(db) == [False, False]
    assert 0.1 <= first < 5
    assert time.monotonic() - before - first < 0.09, "further calls do not wait again"
    with pytest.raises(lmdb.Error, match="removed or replaced"):
        db.identities()
    db.calls.discard("a call")
    assert present(db) == [False, True]


def test_a_reader_that_is_closed_while_its_store_is_gone_gives_the_shard_up(db: BlockDB) -> None:
    shutil.rmtree(db.folder)
    noticed()
    assert present(db) == [False, False]
    db.close()
    with pytest.raises(errors.StoreClosed):
        present(db)
    with opened(db.folder) as again:
        put(again, record_of(SHAPE, HASHES[1]))


def test_an_interrupted_reopening_is_done_again(db: BlockDB, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    shutil.rmtree(db.folder)
    write_one(db.folder, 1)
    noticed()
    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", interrupt)
        with pytest.raises(KeyboardInterrupt):
            present(db)
    noticed()
    assert present(db) == [False, True]


# --- a reader that is killed ---------------------------------------------------------------------------------------

HOLD_A_SNAPSHOT = """
store = open_store(Path(sys.argv[1]), make_cache(), mode="r")
db = shard_of(store).db
db.enter("a call")
with db.read() as snapshot:
    print("ready", flush=True)
    input()
"""


def readers_of(env: Any) -> set[int]:
    """Process ids in LMDB's table of readers."""
    return {int(line.split()[0]) for line in env.readers().splitlines()[1:]}


def test_a_reader_that_was_killed_while_it_read_costs_no_room(
    path: Path,
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.following.TIDY_INTERVAL_S", 0.0)
    hashes = block_hashes(32)
    with open_store(path, make_cache(**SIZES), settings(capacity_mib=64)) as store:

        def overwrite() -> int:
            """The file's size after its blocks were put anew some times."""
            for _ in range(4):
                store.clear()
                assert not store.put_blocks(hashes, range(32)).failed
            return store.stats()["file_bytes"]

        overwrite()
        assert overwrite() == overwrite()
        reader = start(HOLD_A_SNAPSHOT, str(path))
        assert reader.line() == "ready"
        held = overwrite()
        assert overwrite() > held + 2 * MIB, "the reader's snapshot keeps pages"
        reader.kill()
        held = overwrite()
        assert overwrite() == held


def test_readers_clear_what_killed_readers_left(
    path: Path,
    start: Start,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.following.TIDY_INTERVAL_S", 0.0)
    cache = make_cache()
    with open_store(path, cache) as store:
        store.put_blocks(HASHES, range(2))
    killed = start(HOLD_A_SNAPSHOT, str(path))
    assert killed.line() == "ready"
    db = BlockDB(folder_of(path), 16 * MIB, False, False, MIB)
    killed.kill()
    assert killed.process.pid in readers_of(db._env)
    present(db)
    assert killed.process.pid not in readers_of(db._env)
    db.close()
