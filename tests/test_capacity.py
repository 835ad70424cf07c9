"""The story: a store that is full most of the time. Its file never outgrows the capacity, the tail of a request goes before
its head, what a load needs stays, and a smaller capacity is reached at the next opening."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, StoreConfig, errors
from kvstore.loading import Landing, Load
from kvstore.space import oldest_snapshot, record_bytes
from kvstore.storefile import DATA_NAME
from tests.support import MIB, Raw, block_hashes, canonical, index_key, io_mode, make_cache, open_store, shard_of

pytestmark = pytest.mark.both
FORM = {"layers": 2, "blocks": 32, "heads": 2, "tokens": 16, "head_size": 64}
"""Blocks of 16 KiB."""
LRU = StoreConfig(capacity_bytes=4 * MIB, durability="process", eviction="lru")
POLICIES = ("hazard", "lru")


class Clock:
    """Seconds since 1970, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def put(store: KVStore, name: str, blocks: int = 16, first: int = 0) -> list[bytes]:
    """Touch and put a request of so many blocks; its hashes."""
    hashes = block_hashes(blocks, name)
    store.touch(hashes)
    store.put_blocks(hashes, range(first, first + blocks))
    return hashes


def here(store: KVStore, hashes: list[bytes]) -> list[bool]:
    """Which blocks have a record, whatever is before them."""
    raw = Raw(store)
    return [raw.entry(index_key(store, h)) is not None for h in hashes]


def recount(store: KVStore) -> dict[str, int]:
    """The figures of `stats` as the databases have them."""
    raw = Raw(store)
    from kvstore.record import Header, parse_header

    headers = [parse_header(entry) for entry in raw.entries().values()]
    good = [h for h in headers if isinstance(h, Header)]
    assert len(good) == len(headers)
    chunks = {int.from_bytes(key[:8], "big") for key in raw.payload()}
    assert chunks == {h.sequence for h in good}, "chunks without a record, or a record without chunks"
    sums = {"records": len(good), "raw_bytes": sum(h.raw_length for h in good)}
    return sums | {"stored_bytes": sum(h.stored_length for h in good)}


def check_figures(store: KVStore) -> None:
    stats = store.stats()
    assert {name: stats[name] for name in ("records", "raw_bytes", "stored_bytes")} == recount(store)
    assert stats["eviction_resident"] == stats["records"]


# --- the bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_file_never_outgrows_the_capacity(tmp_path: Path, policy: str, clock: Clock) -> None:
    config = replace(LRU, eviction=policy)
    stop, largest = threading.Event(), [0]

    def watch(data: Path) -> None:
        while not stop.wait(0.0005):
            largest[0] = max(largest[0], data.stat().st_size)

    with open_store(tmp_path, make_cache(**FORM), config, clock=clock) as store:
        watcher = threading.Thread(target=watch, args=(store.folder / DATA_NAME,))
        watcher.start()
        for number in range(80):
            clock.now += 60
            put(store, f"request {number}")
        stop.set()
        watcher.join()
        stats = store.stats()
        check_figures(store)
    assert 0 < largest[0] <= LRU.capacity_bytes
    assert stats["free_bytes"] < LRU.capacity_bytes / 6
    assert stats["evicted"] > 0
    assert {k for k in stats if k.startswith("put_failed")} <= {"put_failed_not_admitted"}


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_of_many_sizes_share_a_full_store(tmp_path: Path, policy: str, clock: Clock) -> None:
    """No put fails for want of room that is there, though what goes and what comes differ in size."""
    config = StoreConfig(capacity_bytes=32 * MIB, durability="process", eviction=policy)
    sizes = (4, 16, 64, 256)
    caches = {tokens: make_cache(**FORM | {"tokens": tokens, "blocks": 4, "layers": 4, "heads": 4}) for tokens in sizes}
    chooser = np.random.default_rng(0)
    with open_store(tmp_path, caches[4], config, clock=clock) as store:
        loaders = {tokens: store.attach(cache) for tokens, cache in caches.items()}
        written = 0
        for number in range(400):
            clock.now += 60
            tokens = int(chooser.choice(sizes))
            hashes = block_hashes(4, f"{number}")
            store.touch(hashes)
            found = loaders[tokens].put_blocks(hashes, range(4))
            assert set(found.failed.values()) <= {"not_admitted"}
            written += int(found.stored.sum()) * caches[tokens].group(0).block_bytes
        assert written > 4 * config.capacity_bytes
        check_figures(store)
        assert (store.folder / DATA_NAME).stat().st_size <= config.capacity_bytes


def test_usage_is_exact_after_a_restart_and_a_kill(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from tests.test_capacity import *
store = open_store(Path(sys.argv[1]), make_cache(**FORM), LRU)
for number in range(40):
    put(store, f"request {number}")
print(store.stats()["records"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr
    for _ in range(2):
        with open_store(tmp_path, make_cache(**FORM), LRU) as store:
            assert store.stats()["records"] == int(run.stdout)
            check_figures(store)


# --- what goes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_request_the_tail_goes_before_the_head(tmp_path: Path, policy: str, clock: Clock) -> None:
    config = replace(LRU, eviction=policy)
    with open_store(tmp_path, make_cache(**FORM), config, clock=clock) as store:
        requests = []
        for number in range(40):
            clock.now += 60
            requests.append(put(store, f"request {number}"))
            for hashes in requests:
                left = here(store, hashes)
                assert left == sorted(left, reverse=True), "a block is here and an earlier one is not"
                assert store.match_prefix(hashes) == sum(left)
        assert sum(sum(here(store, hashes)) for hashes in requests) < 40 * 16


def test_what_is_asked_for_stays(tmp_path: Path, clock: Clock) -> None:
    for touch in (True, False):
        with open_store(tmp_path / str(touch), make_cache(**FORM), LRU, clock=clock) as store:
            wanted = put(store, "wanted")
            for number in range(40):
                clock.now += 120
                if touch:
                    store.touch(wanted)
                else:
                    assert store.get_blocks(wanted, range(16, 32)).verified.all()
                put(store, f"request {number}")
            assert all(here(store, wanted))


def test_a_block_of_a_load_in_flight_stays(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = Load if io_mode() == "inline" else Landing
    name = "_verify" if io_mode() == "inline" else "land"
    step, target = getattr(owner, name), make_cache(**FORM, seed=1)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        wanted, loader = put(store, "wanted"), store.attach(target)

        def fill_meanwhile(*arguments: Any) -> Any:
            monkeypatch.setattr(owner, name, step)
            for number in range(30):
                clock.now += 60
                put(store, f"request {number}")
            return step(*arguments)

        monkeypatch.setattr(owner, name, fill_meanwhile)
        assert loader.get_blocks(wanted, range(16)).verified.all()
        assert all(here(store, wanted))
        for number in range(30, 60):
            clock.now += 60
            put(store, f"request {number}")
        assert not any(here(store, wanted)), "the load is over, and its pins with it"
        assert io_mode() == "process" or not shard_of(store).keeper.pins  # type: ignore[union-attr]
    assert np.array_equal(canonical(target, range(16)), canonical(store.cache, range(16)))


def test_what_was_not_asked_for_in_so_long_goes_first(tmp_path: Path, clock: Clock) -> None:
    config = replace(LRU, eviction="hazard", max_age_s=3600.0)
    with open_store(tmp_path, make_cache(**FORM), config, clock=clock) as store:
        old = put(store, "old")
        store.touch(old)
        store.touch(old)
        clock.now += 4000
        for number in range(40):
            clock.now += 1
            put(store, f"request {number}")
        assert not any(here(store, old))


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_see_the_same_touches_evict_the_same_blocks(tmp_path: Path, policy: str) -> None:
    left = []
    for rank in range(2):
        clock = Clock()
        cache = make_cache(**FORM, seed=rank)
        with open_store(tmp_path / str(rank), cache, replace(LRU, eviction=policy), clock=clock) as store:
            chooser, names = np.random.default_rng(5), list[str]()
            for number in range(60):
                clock.now += float(chooser.integers(1, 300))
                names.append(f"request {number // 3 if chooser.random() < 0.5 else number}")
                put(store, names[-1], int(chooser.integers(1, 17)))
            left.append([here(store, block_hashes(16, name)) for name in sorted(set(names))])
            assert store.stats()["evicted"] > 0
    assert left[0] == left[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_restart_the_policy_goes_on(tmp_path: Path, policy: str, clock: Clock) -> None:
    config, puts = replace(LRU, eviction=policy), 1 if io_mode() == "inline" else 10
    for life in range(40 // puts):
        with open_store(tmp_path, make_cache(**FORM), config, clock=clock) as store:
            for number in range(puts):
                clock.now += 60
                hashes = put(store, f"request {life}/{number}")
            check_figures(store)
    if policy == "lru":
        assert all(here_again(tmp_path, config, hashes))
    else:
        with open_store(tmp_path, make_cache(**FORM), config, clock=clock) as store:
            assert Raw(store).value("meta", b"eviction:hazard")


def here_again(path: Path, config: StoreConfig, hashes: list[bytes]) -> list[bool]:
    with open_store(path, make_cache(**FORM), config) as store:
        return here(store, hashes)


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_policy_that_was_cut_short_is_made_anew(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may raise anywhere in the bookkeeping: no later call may work on what it left."""
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        put(store, "request")
        keeper = shard_of(store).keeper
        assert keeper is not None
        with monkeypatch.context() as patch:
            patch.setattr("kvstore.eviction_base.ArrayPolicy._touch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.touch(block_hashes(16, "request"))
        for number in range(40):
            clock.now += 60
            put(store, f"request {number}")
        check_figures(store)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_records_with_damaged_headers_can_be_evicted(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        damaged = put(store, "damaged")
        raw = Raw(store)
        for block_hash in damaged:
            key = index_key(store, block_hash)
            raw.put_entry(key, b"\0" * 150)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        for number in range(40):
            clock.now += 60
            assert not store.put_blocks(block_hashes(16, f"{number}"), range(16)).failed
        assert not any(here(store, damaged))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_blocks_are_evicted_by_hand(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        requests = [put(store, f"request {number}") for number in range(4)]
        assert store.evict(0) == 0
        assert store.evict(20) == 20
        assert [sum(here(store, hashes)) for hashes in requests] == [0, 12, 16, 16]
        check_figures(store)
        assert store.evict(10**6) == 44
        assert store.stats()["records"] == 0
        assert put(store, "again")


@pytest.mark.parametrize("blocks", [-1, 1.5, True, "all"])
def test_a_wrong_number_of_blocks_is_misuse(tmp_path: Path, blocks: Any) -> None:
    with (
        open_store(tmp_path, make_cache(**FORM), LRU) as store,
        pytest.raises(errors.ConfigError, match="expected how many blocks"),
    ):
        store.evict(blocks)


def test_a_store_without_eviction_refuses_and_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache(**FORM), replace(LRU, eviction="none")) as store:
        with pytest.raises(errors.ConfigError, match='eviction="none"'):
            store.evict(1)
        failed = [set(store.put_blocks(block_hashes(16, f"{n}"), range(16)).failed.values()) for n in range(20)]
        assert failed[0] == set()
        assert failed[-1] == {"store_full"}


@pytest.mark.parametrize("option", [{"eviction": "mru"}, {"max_age_s": 0}, {"max_age_s": -1.0}, {"max_age_s": "1"}])
@pytest.mark.inline("opens no store")
def test_a_wrong_configuration_is_misuse(option: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        StoreConfig(**option)


def test_a_store_is_cleared(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        requests = [put(store, f"request {number}") for number in range(4)]
        assert store.clear() == 64
        assert not any(any(here(store, hashes)) for hashes in requests)
        assert (store.stats()["records"], store.stats()["stored_bytes"], len(Raw(store).payload())) == (0, 0, 0)
        assert store.clear() == 0
        assert store.put_blocks(requests[0], range(16)).stored.all()


@pytest.mark.parametrize("call", [lambda s: s.evict(1), lambda s: s.clear()])
def test_a_reader_changes_nothing(tmp_path: Path, call: Callable[[KVStore], Any]) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        put(store, "request")
    with (
        open_store(tmp_path, make_cache(**FORM), LRU, mode="r") as reader,
        pytest.raises(errors.ReadOnlyStore),
    ):
        call(reader)


# --- a reader in the way ---------------------------------------------------------------------------------------------


def test_a_reader_that_holds_the_pages_is_named_and_little_is_evicted_for_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.storing.READER_PATIENCE_S", 0.05)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        for number in range(30):
            clock.now += 60
            put(store, f"request {number}")
        before = store.stats()
        with Raw(store).transaction():
            outcomes = list[str]()
            for number in range(30, 60 if io_mode() == "inline" else 33):
                clock.now += 60
                outcomes += store.put_blocks(block_hashes(16, f"request {number}"), range(16)).failed.values()
        after = store.stats()
        assert "reader_holds_space" in outcomes
        assert set(outcomes) == {"reader_holds_space"}
        batches = 30 * 16 * 16_384 / LRU.write_batch_bytes
        assert after["evicted"] - before["evicted"] <= 30 * 16 + batches
        clock.now += 60
        assert not store.put_blocks(block_hashes(16, "after"), range(16)).failed
        check_figures(store)


@pytest.mark.parametrize(
    ("table", "oldest"),
    [
        ("    pid     thread     txnid\n", None),
        ("    pid     thread     txnid\n     18321 7f96c6e45b80 2\n     18321 7f96c6e45b81 -\n", 2),
        ("    pid     thread     txnid\n 1 a 77\n 2 b 5\n", 5),
        ("(no active readers)\n", None),
    ],
)
@pytest.mark.inline("opens no store")
def test_the_oldest_snapshot_is_read_from_the_table(table: str, oldest: int | None) -> None:
    assert oldest_snapshot(table) == oldest


@pytest.mark.inline("opens no store")
def test_a_record_takes_whole_pages() -> None:
    assert record_bytes(200, [4080]) == 4096 + 400
    assert record_bytes(200, [4081, 300]) == 2 * 4096 + 2 * (200 + 316)


# --- another capacity ------------------------------------------------------------------------------------------------


def filled(path: Path, clock: Clock, config: StoreConfig = LRU) -> list[list[bytes]]:
    with open_store(path, make_cache(**FORM), config, clock=clock) as store:
        requests = []
        for number in range(20):
            clock.now += 60
            requests.append(put(store, f"request {number}"))
    return requests


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_smaller_capacity_is_reached_by_evicting_and_compacting(
    tmp_path: Path, clock: Clock, capacity: int, policy: str
) -> None:
    config = replace(LRU, eviction=policy)
    requests = filled(tmp_path, clock, config)
    smaller, target = replace(config, capacity_bytes=capacity * MIB), make_cache(**FORM, seed=1)
    with open_store(tmp_path, make_cache(**FORM), smaller, clock=clock) as store:
        assert (store.folder / DATA_NAME).stat().st_size <= capacity * MIB
        check_figures(store)
        loader, left = store.attach(target), 0
        for hashes in requests:
            matched = store.match_prefix(hashes)
            assert loader.get_blocks(hashes[:matched], range(matched)).verified.all()
            assert np.array_equal(canonical(target, range(matched)), canonical(store.cache, range(matched)))
            left += matched
        assert left == store.stats()["records"] > 0
        for number in range(20, 40):
            clock.now += 60
            assert set(store.put_blocks(block_hashes(16, f"{number}"), range(16)).failed.values()) <= {"not_admitted"}
            assert (store.folder / DATA_NAME).stat().st_size <= capacity * MIB
        mode = (store.folder / DATA_NAME).stat().st_mode & 0o777
        assert mode == 0o600
    assert sorted(p.name for p in store.folder.iterdir()) == ["STORE", "data.mdb", "lock.mdb"]


def test_a_capacity_that_holds_what_is_used_needs_no_eviction(tmp_path: Path, clock: Clock) -> None:
    filled(tmp_path, clock)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        store.evict(200)
        records = store.stats()["records"]
    with open_store(tmp_path, make_cache(**FORM), replace(LRU, capacity_bytes=2 * MIB), clock=clock) as store:
        assert store.stats()["records"] == records
        assert (store.folder / DATA_NAME).stat().st_size <= 2 * MIB


@pytest.fixture
def unchanged(tmp_path: Path, clock: Clock) -> Iterator[tuple[Path, list[list[bytes]]]]:
    """A filled store, whose records must all be there afterwards."""
    requests = filled(tmp_path, clock)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        before = [here(store, hashes) for hashes in requests]
    yield tmp_path, requests
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        assert [here(store, hashes) for hashes in requests] == before
        check_figures(store)


@pytest.mark.inline("breaks what reads or writes the shard")
def test_no_room_for_the_compacted_copy_is_said_with_the_figure(
    unchanged: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(unchanged[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(errors.StorePathError, match=r"compacting it needs \d{7} bytes for a copy where 1000 are free"):
        open_store(unchanged[0], make_cache(**FORM), replace(LRU, capacity_bytes=2 * MIB))


def test_nothing_is_evicted_for_a_capacity_where_nothing_may(unchanged: tuple[Path, Any]) -> None:
    config = replace(LRU, capacity_bytes=2 * MIB, eviction="none")
    with pytest.raises(errors.ConfigError, match='eviction="none"'):
        open_store(unchanged[0], make_cache(**FORM), config)


@pytest.mark.parametrize("reading", [True, False])
def test_a_reader_elsewhere_keeps_the_file(unchanged: tuple[Path, Any], reading: bool) -> None:
    script = """
import contextlib, sys
from pathlib import Path
from tests.test_capacity import *
with open_store(Path(sys.argv[1]), make_cache(**FORM), LRU, mode="r") as reader:
    with Raw(reader).transaction() if sys.argv[2] == "True" else contextlib.nullcontext():
        print("open", flush=True)
        sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(unchanged[0]), str(reading)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        with pytest.raises(
            errors.StoreBusy,
            match=f"processes {reader.pid} read the shard" if reading else "other processes read the shard",
        ):
            open_store(unchanged[0], make_cache(**FORM), replace(LRU, capacity_bytes=2 * MIB))
        reader.communicate("")


def test_a_copy_that_was_cut_short_is_removed(tmp_path: Path, clock: Clock) -> None:
    filled(tmp_path, clock)
    folder = next(tmp_path.iterdir())
    (folder / "data.mdb.compact").write_bytes(os.urandom(5000))
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock):
        assert not (folder / "data.mdb.compact").exists()


def test_caches_share_the_eviction_of_their_store(tmp_path: Path, clock: Clock) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=clock) as store:
        loader: KVStore = store.attach(make_cache(**FORM, seed=1))
        hashes = put(loader, "request")
        assert store.stats()["eviction_resident"] == len(hashes)
        assert isinstance(loader.cache, PagedKVCache)
