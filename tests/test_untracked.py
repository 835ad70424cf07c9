"""The story: what is stored and what the eviction policy was told drift apart. A record that nobody remembers is never
evicted, so whatever may have parted the two makes the keeper read the index again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore import KVStore, StoreConfig, errors
from kvstore.blockdb import BlockDB
from kvstore.saving import Save
from kvstore.storing import Storing
from tests.support import MIB, Raw, block_hashes, buffers_are_lost, index_key, io_mode, make_cache, open_store, shard_of
from tests.test_capacity import FORM, LRU, check_figures, put

pytestmark = pytest.mark.both
HASHES = block_hashes(16)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("durability", ["commit", "process"])
def test_a_put_that_is_cut_off_leaves_no_forgotten_record(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LRU, durability=durability, batch_bytes=4 * 16_384)
    with open_store(tmp_path, make_cache(**FORM), config) as store:
        make_ready, calls = Save._make_ready, iter(range(99))

        def third_is_cut_off(*arguments: Any) -> Any:
            return interrupt() if next(calls) == 2 else make_ready(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Save, "_make_ready", third_is_cut_off)
            with pytest.raises(KeyboardInterrupt):
                store.put_blocks(HASHES, range(16))
        assert 4 <= store.stats()["records"] <= 8
        check_figures(store)
        assert io_mode() == "process" or not shard_of(store).keeper.pins  # type: ignore[union-attr]
        assert not buffers_are_lost(store)
        store.evict(10**6)
        assert store.stats()["records"] == 0


@pytest.mark.parametrize("call", [lambda s: s.evict(10**6), lambda s: s.clear()])
@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_block_that_is_put_while_it_is_deleted_is_not_forgotten(
    tmp_path: Path, call: Callable[[KVStore], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        put(store, "request")
        evict = BlockDB._evict_all

        def put_again(db: BlockDB, *rest: Any) -> Any:
            found = evict(db, *rest)
            monkeypatch.setattr(BlockDB, "_evict_all", evict)
            put(store, "request")
            return found

        monkeypatch.setattr(BlockDB, "_evict_all", put_again)
        call(store)
        check_figures(store)


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_condemned_block_that_was_put_again_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        hashes = put(store, "request")
        raw = Raw(store)
        for key, chunk in raw.payload().items():
            raw.put_chunk(key, bytes(len(chunk)))
        condemn = BlockDB.condemn

        def put_again(db: BlockDB, entries: Any) -> int:
            assert store.put_blocks(hashes, range(16)).stored.all()
            return condemn(db, entries)

        monkeypatch.setattr(BlockDB, "condemn", put_again)
        assert len(store.get_blocks(hashes, range(16, 32)).rejected) == 16
        stats = store.stats()
        assert stats["eviction_resident"] == stats["records"] == 16


@pytest.mark.inline("breaks what reads or writes the shard")
def test_blocks_that_are_present_stay_while_the_others_of_a_put_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        old = put(store, "old", 8)
        for number in range(30):
            put(store, f"request {number}")
            store.touch(old)
        pinned: list[bool] = []
        write = BlockDB.write

        def look(db: BlockDB, *rest: Any) -> Any:
            keeper = shard_of(store).keeper
            assert keeper is not None
            pinned.append(bool(keeper.pins))
            return write(db, *rest)

        monkeypatch.setattr(BlockDB, "write", look)
        found = store.put_blocks(block_hashes(16, "old"), range(16))
        assert found.present[:8].all()
        assert all(pinned)
        assert all(Raw(store).entry(index_key(store, h)) is not None for h in old)


# --- the writer's thread -----------------------------------------------------------------------------------------------

COMMIT = StoreConfig(capacity_bytes=16 * MIB, batch_bytes=1, eviction="lru")


@pytest.mark.inline("breaks what reads or writes the shard")
def test_a_put_waits_for_its_transactions_whatever_signals_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, make_cache(**FORM), COMMIT) as store:
        write, running, ended = Storing.write, threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            running.set()
            threading.Event().wait(0.2)
            found = write(*arguments)
            ended.set()
            return found

        make_ready, calls = Save._make_ready, iter(range(99))

        def second_is_cut_off(*arguments: Any) -> Any:
            if next(calls) == 1:
                assert running.wait(30)
                raise KeyboardInterrupt
            return make_ready(*arguments)

        wait, waits = shard_of(store)._writer, iter(range(99))
        assert wait is None

        def interrupted(futures: Any) -> Any:
            from concurrent.futures import wait

            if next(waits) < 3:
                raise KeyboardInterrupt
            return wait(futures)

        with monkeypatch.context() as patch:
            patch.setattr(Storing, "write", slow)
            patch.setattr(Save, "_make_ready", second_is_cut_off)
            patch.setattr("kvstore.shard.wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put_blocks(HASHES, range(16))
            assert ended.is_set()
        check_figures(store)


@pytest.mark.inline("breaks what reads or writes the shard")
def test_without_a_thread_the_caller_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with open_store(tmp_path, make_cache(**FORM), COMMIT) as store:
        monkeypatch.setattr("kvstore.shard.ThreadPoolExecutor", no_thread)
        assert store.put_blocks(HASHES, range(16)).stored.all()
        assert store.get_blocks(HASHES, range(16)).verified.all()


def test_two_threads_close_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10 if io_mode() == "inline" else 3):
        store = open_store(tmp_path / str(number), make_cache(**FORM), LRU)
        put(store, "request")
        threads = [threading.Thread(target=store.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "Traceback" not in caplog.text


# --- clocks and lives --------------------------------------------------------------------------------------------------


def test_a_clock_that_shows_anything_costs_nothing(tmp_path: Path) -> None:
    times = iter([1e9, 1e300, 5.0, math.nan, -1e308, 1e308, 0.0, float(10**300), -1.0, 2.0**63] * 1000)
    with open_store(tmp_path, make_cache(**FORM), LRU, clock=lambda: next(times)) as store:
        for number in range(60):
            hashes = put(store, f"request {number}")
            assert store.get_blocks(hashes, range(16)).verified.all()
        check_figures(store)


@pytest.mark.parametrize("age", [math.inf, math.nan, True, 2.0**60])
@pytest.mark.inline("opens no store")
def test_an_age_that_is_none_is_misuse(age: float) -> None:
    with pytest.raises(errors.ConfigError, match="max_age_s"):
        StoreConfig(max_age_s=age)


def test_chunks_that_no_record_names_keep_a_capacity_from_shrinking(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        for number in range(10):
            put(store, f"request {number}")
        raw = Raw(store)
        for key in list(raw.entries())[:140]:
            raw.put_entry(key, b"\0" * 150)
        store.clear()
        left = len(raw.payload())
        assert left > 0
    with pytest.raises(errors.StoreDamaged, match="belong to no record"):
        open_store(tmp_path, make_cache(**FORM), replace(LRU, capacity_bytes=MIB))
    with open_store(tmp_path, make_cache(**FORM), LRU) as store:
        assert len(Raw(store).payload()) == left
