"""The stories of arguments, interrupts and closing: nothing that a caller does between two calls, or a signal in the
middle of one, makes wrong KV look right or leaves a store that hangs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, errors, storefile
from kvstore.blockdb import BlockDB
from kvstore.saving import Save
from kvstore.staging import StagingPool
from tests.support import MIB, SMALL, Raw, block_hashes, buffers_of, canonical, make_cache, open_store
from tests.test_processes import run_python

pytestmark = pytest.mark.both
HASHES = block_hashes(4)

INTERRUPTED = """
import random, signal, sys, time
from pathlib import Path
from tests.support import *

class Interrupt(BaseException): pass
def handler(*_): raise Interrupt
signal.signal(signal.SIGALRM, handler)
chooser = random.Random(7)
cache, target = make_cache(blocks=16), make_cache(blocks=16, seed=3)
store = open_store(Path(sys.argv[1]), cache)
loader, good = store.attach(target), canonical(cache, range(8))
end, count = time.monotonic() + 6, 0
while time.monotonic() < end:
    hashes = block_hashes(8, str(count))
    try:
        signal.setitimer(signal.ITIMER_REAL, chooser.uniform(1e-5, 3e-3))
        while True:
            store.put_blocks(hashes, range(8)); loader.get_blocks(hashes, range(8)); store.match_prefix(hashes); store.stats()
    except Interrupt:
        count += 1
        # While the exception lives, and with it the frames that it came through.
        assert not store._front.storage.calls, "a call is counted that has ended"
        assert not buffers_are_lost(store), "a staging buffer is lost"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    got = loader.submit_get_blocks(hashes, range(8)).result(5)
    assert (canonical(target, range(8))[got.verified] == good[got.verified]).all(), "wrong bytes were served"
start = time.monotonic()
store.close()
assert time.monotonic() - start < 5, "close waited for a call that had ended"
with open_store(Path(sys.argv[1]), cache) as again:
    payload = Raw(again).payload()
    assert again.stats()["stored_bytes"] == sum(map(len, payload.values()))
print("interrupts", count)
"""


def test_interrupts_anywhere_leave_a_store_that_works(tmp_path: Path) -> None:
    done = run_python(INTERRUPTED, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 100


def hold(store: KVStore) -> threading.Event:
    """Keep the store's threads busy until the event is set."""
    free = threading.Event()
    for _ in range(store._front.config.threads):
        store._front.submit(free.wait, 30)
    return free


def test_a_submitted_put_has_its_own_copy_of_the_block_table(store: KVStore, cache: PagedKVCache) -> None:
    free, table = hold(store), np.array([3, 2])
    future = store.submit_put_blocks(HASHES[:2], table)
    table[:] = (6, 7)
    free.set()
    assert future.result(30).stored.all()
    target = make_cache(seed=4)
    assert store.attach(target).get_blocks(HASHES[:2], [0, 1]).verified.all()
    assert np.array_equal(canonical(target, [0, 1]), canonical(cache, [3, 2]))


def test_a_submitted_get_has_its_own_copy_of_the_block_table(store: KVStore, cache: PagedKVCache) -> None:
    store.put_blocks(HASHES[:1], [3])
    target = make_cache(seed=4)
    free, table = hold(store), np.array([6])
    future = store.attach(target).submit_get_blocks(HASHES[:1], table)
    table[0] = 7
    free.set()
    assert future.result(30).verified.all()
    assert np.array_equal(canonical(target, [6]), canonical(cache, [3]))


def test_a_submitted_call_keeps_its_cache_alive(store: KVStore) -> None:
    store.put_blocks(HASHES, range(4))
    free = hold(store)
    future = store.attach(make_cache(seed=4)).submit_get_blocks(HASHES, range(4))
    free.set()
    assert future.result(30).verified.all()


def test_misuse_of_a_submitted_call_is_raised_at_once(store: KVStore) -> None:
    with pytest.raises(errors.InvalidBlockId):
        store.submit_put_blocks(HASHES[:1], [99])
    with pytest.raises(errors.LengthMismatch):
        store.submit_get_blocks(HASHES[:2], [1])


def test_close_waits_for_the_whole_of_a_call_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two of its transactions."""
    store = open_store(tmp_path, make_cache(), replace(SMALL, batch_bytes=1))
    make_ready, first, go, calls = Save._make_ready, threading.Event(), threading.Event(), iter(range(99))

    def slow(*arguments: Any) -> Any:
        if next(calls) == 1:
            first.set()
            go.wait(30)
        return make_ready(*arguments)

    monkeypatch.setattr(Save, "_make_ready", slow)
    results: list[Any] = []
    putting = threading.Thread(target=lambda: results.append(store.put_blocks(HASHES, range(4))))
    putting.start()
    first.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()

    def ask_on() -> None:
        while closing.is_alive():
            store.match_prefix(HASHES)

    with pytest.raises(errors.StoreClosed):
        ask_on()
    assert closing.is_alive()
    go.set()
    putting.join(30)
    closing.join(30)
    assert results[0].stored.all()
    assert not closing.is_alive()


def test_close_in_the_callback_of_a_future_does_not_wait_for_itself(tmp_path: Path) -> None:
    store = open_store(tmp_path, make_cache())
    failures: list[BaseException] = []
    done = threading.Event()

    def close(_: Any) -> None:
        try:
            store.close()
        except BaseException as error:
            failures.append(error)
        done.set()

    free = hold(store)
    store.submit_put_blocks(HASHES, range(4)).add_done_callback(close)
    free.set()
    assert done.wait(30)
    assert not failures
    with open_store(tmp_path, make_cache()) as again:
        assert again.match_prefix(HASHES) == 4


def test_two_closes_at_once_both_wait_for_the_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, make_cache())
    store._front.storage.enter("a call")
    free = list[bool]()
    threads = [threading.Thread(target=lambda: (store.close(), free.append(not storefile._opened))) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert all(thread.is_alive() for thread in threads)
    store._front.storage.calls.discard("a call")
    for thread in threads:
        thread.join(30)
    assert free == [True, True]
    open_store(tmp_path, make_cache()).close()


@pytest.mark.inline("breaks what reads or writes the shard")
def test_stats_of_an_accounting_that_cannot_be_read_are_the_counters(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(db: BlockDB) -> dict[str, int]:
        raise lmdb.CorruptedError("Located page was wrong type")

    store.put_blocks(HASHES, range(4))
    monkeypatch.setattr(BlockDB, "usage", fail)
    stats = store.stats()
    assert (stats["put_stored"], stats["stats_failed"]) == (4, 1)
    assert "records" not in stats


@pytest.mark.inline("opens no store")
def test_a_buffer_is_waited_for_and_given_back() -> None:
    pool, order = StagingPool(8), list[str]()

    def third() -> None:
        pool.borrow("three")
        order.append("third")

    assert pool.borrow("one") is not pool.borrow("two")
    waiting = threading.Thread(target=third)
    waiting.start()
    waiting.join(0.05)
    order.append("second is back")
    pool.borrowed.pop("two")
    waiting.join(30)
    assert order == ["second is back", "third"]


def test_many_block_sizes_share_the_staging_buffers(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache()) as store:
        for tokens in range(1, 200):
            view = store.attach(make_cache(tokens=tokens))._views[0]
            pools = [store._front.staging(view, purpose, buffers_of(store)) for purpose in ("put", "get")]
            assert [pool.nbytes for pool in pools] == [2 * MIB, 2 * MIB]
        assert len(buffers_of(store).pools) == 2


def test_a_dropped_store_gives_its_shard_up(tmp_path: Path) -> None:
    for _ in range(3):
        store = open_store(tmp_path, make_cache())
        assert store.put_blocks(HASHES, range(4)).stored.sum() + store.stats()["put_present"] == 4
        del store


def test_condemned_records_of_a_call_leave_in_one_transaction(store: KVStore) -> None:
    store.put_blocks(HASHES, range(4))
    raw = Raw(store)
    for key, chunk in raw.payload().items():
        raw.put_chunk(key, bytes(len(chunk)))
    before = raw.transactions()
    assert len(store.get_blocks(HASHES, range(4)).rejected) == 4
    assert raw.transactions() == before + 1
    assert store.stats()["quarantine_records"] == 4


def test_a_close_that_would_cut_calls_off_leaves_the_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, make_cache())
    store._front.storage.enter("a call")
    for name in ("kvstore.environment.CLOSE_TIMEOUT", "kvstore.remote.CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(name, 0.01)
    with pytest.raises(errors.StoreBusy, match="1 calls are still in flight"):
        store.close()
    store._front.storage.calls.discard("a call")
    store.close()
    open_store(tmp_path, make_cache()).close()


@pytest.mark.parametrize("quarantine_bytes", [0, 128 * 1024])
@pytest.mark.parametrize("reopen", [False, True])
def test_a_full_store_whose_records_are_all_damaged_takes_puts_again(
    tmp_path: Path, quarantine_bytes: int, reopen: bool
) -> None:
    """What leaves quarantine must make room, however little there is to do that in."""
    form = {"layers": 2, "blocks": 64, "heads": 4, "tokens": 16, "head_size": 128}
    config = replace(SMALL, capacity_bytes=4 * MIB, quarantine_bytes=quarantine_bytes)
    cache, hashes = make_cache(**form), block_hashes(64)
    store = open_store(tmp_path, cache, config)
    count = int(store.put_blocks(hashes, range(64)).stored.sum())
    assert 0 < count < 64, "the store must be full"
    store.close()
    damage(store.folder / "data.mdb", canonical(cache, range(count)))
    store = open_store(tmp_path, cache, config)
    got = store.get_blocks(hashes[:count], range(count))
    assert len(got.rejected) == count
    stats = store.stats()
    assert (stats["records"], stats.get("quarantine_failed", 0)) == (0, 0)
    if reopen:
        store.close()
        store = open_store(tmp_path, cache, config)
    assert store.put_blocks(hashes, range(64)).stored.sum() > count // 2
    store.close()


def damage(file: Path, blocks: Any) -> None:
    """Flip a bit of each block's bytes where they lie in the file."""
    data = bytearray(file.read_bytes())
    for block in blocks:
        at = data.find(block[:4096].tobytes())
        assert at > 0
        data[at + 100] ^= 1
    file.write_bytes(data)
