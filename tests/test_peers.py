"""What goes wrong for users of other stores, case by case.

Each test breaks the one step of its case (a copy, a database value, the caller's memory) and asserts that no wrong
block is served. Comparisons are of bytes, never of a model's output.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from kvstore import KVStore, PagedKVCache, block_checksums
from kvstore.hostpath import HostPath
from kvstore.record import chunk_key
from kvstore.span import Span
from tests.support import (
    IDENTITY,
    IO,
    SMALL,
    Raw,
    block_hashes,
    canonical,
    index_key,
    io_mode,
    layer_tensors,
    make_cache,
    open_store,
    shard_of,
)

pytestmark = pytest.mark.both
HASHES = block_hashes(6)
ROOT = Path(__file__).parents[1]


@pytest.fixture
def path(store: KVStore) -> HostPath:
    """The path that moves the store's blocks, for tests that break it."""
    return store._views[0].route.path


# 1. Failed stores stay visible.


def third_fails(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """The call, whose third time raises."""
    calls = iter(range(99))

    def third(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise error
        return call(*arguments)

    return third


@pytest.mark.inline("breaks what reads or writes the shard")
def test_1_a_put_that_fails_is_absent_and_the_others_stand(
    tmp_path: Path, cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, cache, replace(SMALL, batch_bytes=1)) as store:
        no_space = lmdb.DiskError("mdb_txn_commit: No space left on device")
        monkeypatch.setattr(shard_of(store).db, "write", third_fails(shard_of(store).db.write, no_space))
        put = store.put_blocks(HASHES, range(6))
        assert put.failed == {2: "io_error"}
        assert put.stored.tolist() == [True, True, False, True, True, True]
        monkeypatch.undo()
        assert store.match_prefix(HASHES) == 2
        got = store.get_blocks(HASHES, range(6))
        assert got.missing.tolist() == [False, False, True, False, False, False]
        assert got.verified.sum() == 5
        assert store.stats()["put_failed_io_error"] == 1


@pytest.mark.inline("breaks what reads or writes the shard")
def test_1_a_transaction_that_fails_halfway_leaves_nothing_of_it(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = lmdb.Error("mdb_put: Input/output error")
    monkeypatch.setattr(shard_of(store).db, "_put", third_fails(shard_of(store).db._put, broken))
    assert set(store.put_blocks(HASHES, range(6)).failed.values()) == {"io_error"}
    monkeypatch.undo()
    assert store.match_prefix(HASHES) == 0
    assert not Raw(store).payload()
    assert store.put_blocks(HASHES, range(6)).stored.all(), "16: the next operation completes"


# 2. Another request's KV is returned.


def exchange(store: KVStore, one: bytes, two: bytes) -> None:
    raw, keys = Raw(store), (index_key(store, one), index_key(store, two))
    values = [raw.entry(key) for key in keys]
    raw.put_entry(keys[0], values[1])
    raw.put_entry(keys[1], values[0])


def test_2_exchanged_index_records_are_both_refused(store: KVStore) -> None:
    other = block_hashes(6, "other request")
    store.put_blocks(HASHES[:3], range(3))
    store.put_blocks(other[:3], range(3, 6))
    exchange(store, HASHES[1], other[1])
    for hashes in (HASHES, other):
        got = store.get_blocks(hashes[:3], range(3))
        assert got.verified.tolist() == [True, False, True]
        assert got.rejected[1].kind == "key"


def test_2_exchanged_payloads_are_both_refused(store: KVStore) -> None:
    store.put_blocks(HASHES[:2], range(2))
    raw = Raw(store)
    sequences = sorted({key[:8] for key in raw.payload()})
    for number in range(2):
        one, two = (chunk_key(int.from_bytes(s, "big"), number) for s in sequences)
        values = raw.payload()
        raw.put_chunk(one, values[two])
        raw.put_chunk(two, values[one])
    got = store.get_blocks(HASHES[:2], [4, 5])
    assert [r.kind for r in got.rejected.values()] == ["storage_hash", "storage_hash"]


# 3. A packed layout is read as another of the same shape.


@pytest.mark.inline("opens no store")
def test_3_the_same_bytes_under_a_transposed_view_sum_to_something_else() -> None:
    tensors = layer_tensors("BHNC", heads=4, tokens=4)
    right = PagedKVCache.from_tensors(tensors, "BHNC")
    wrong = PagedKVCache.from_tensors(tensors, "BNHC")
    assert (block_checksums(right, range(8)) != block_checksums(wrong, range(8))).all()


def test_3_a_block_copied_by_one_layout_and_summed_by_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's cache is NHD; the copy took it for HND, as a tier does that was told the wrong layout."""
    target = make_cache("BNHC", heads=4, tokens=4, seed=3)
    with open_store(tmp_path, make_cache("BHNC", heads=4, tokens=4)) as store:
        store.put_blocks(HASHES[:2], range(2))
        loader = store.attach(target)
        misread = PagedKVCache.from_tensors(dict(target.tensors), "BHNC")
        wrong = store.attach(misread)._views[0].route.path
        go_astray(
            monkeypatch, loader._views[0].route, lambda land, span, addresses: wrong.scatter_from(span, addresses)
        )
        got = loader.get_blocks(HASHES[:2], [4, 5])
        assert [r.kind for r in got.rejected.values()] == ["content", "content"]
        assert not any(r.condemned for r in got.rejected.values())


def test_3_a_record_of_another_geometry_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache(heads=2, tokens=4)) as store:
        store.put_blocks(HASHES[:1], [0])
        specs = store.identity
        small = PagedKVCache.from_tensors(layer_tensors("BHNC", heads=2, tokens=3), "BHNC")
        assert store.attach(small).get_blocks(HASHES[:1], [0]).rejected[0].kind == "geometry"
    one_head = PagedKVCache.from_tensors(layer_tensors("BHNC", heads=1, tokens=6), "BHNC")
    with open_store(tmp_path, one_head, identity=specs) as store:
        assert store.get_blocks(HASHES[:1], [0]).rejected[0].kind == "geometry"


# 4. Two KV groups share a block hash.


def test_4_groups_of_one_hash_do_not_meet(tmp_path: Path) -> None:
    tensors = layer_tensors("BHNC", layers=2)
    first, second = tensors
    cache = PagedKVCache.from_tensors(tensors, "BHNC", groups={0: [first], 1: [second]})
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:1], [0], group=0)
        assert store.match_prefix(HASHES, group=1) == 0
        assert store.get_blocks(HASHES[:1], [0], group=1).missing.all()
        store.put_blocks(HASHES[:1], [1], group=1)
        one, two = (index_key(store, HASHES[0], group) for group in (0, 1))
        Raw(store).put_entry(two, Raw(store).entry(one))
        assert store.get_blocks(HASHES[:1], [0], group=1).rejected[0].kind == "key"
        assert store._views[0].shape.tags(HASHES[:1]) != store._views[1].shape.tags(HASHES[:1])


# 5. The source changes while it is being stored.


def test_5_a_source_that_changes_between_checksum_and_copy_fails_that_put(
    store: KVStore, cache: PagedKVCache, path: HostPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = path.gather

    def late(span: Span, staging: Any) -> None:
        layer = next(iter(cache.tensors.values()))
        layer[2].view(torch.uint8)[0, 0, 0] ^= 1
        gather(span, staging)

    monkeypatch.setattr(path, "gather", late)
    put = store.put_blocks(HASHES[:4], range(4))
    assert put.failed == {2: "source_changed"}
    assert put.stored.tolist() == [True, True, False, True]
    monkeypatch.undo()
    assert store.match_prefix(HASHES) == 2
    assert store.put_blocks(HASHES[:4], range(4)).stored.tolist() == [False, False, True, False]


def test_5_a_gather_of_the_wrong_block_fails_that_put(
    store: KVStore, path: HostPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = path.gather
    monkeypatch.setattr(
        path, "gather", lambda span, staging: gather(replace(span, block_ids=span.block_ids[::-1].copy()), staging)
    )
    assert set(store.put_blocks(HASHES[:4], range(4)).failed.values()) == {"source_changed"}
    assert not Raw(store).payload()


# 6 and 7. The destination is overwritten, or a transfer fails and is reported as done.


def nothing(land: Callable[..., Any], span: Span, addresses: Any) -> None:
    """A copier that reports success and copies nothing."""


def exchanged_rows(land: Callable[..., Any], span: Span, *rest: Any) -> Any:
    order = np.array([1, 0, *range(2, len(span))])
    return land(replace(span, block_ids=span.block_ids[order]), *rest)


def wrong_block(land: Callable[..., Any], span: Span, *rest: Any) -> Any:
    return land(replace(span, block_ids=(span.block_ids + 4) % 8), *rest)


def two_rows_in_one_block(land: Callable[..., Any], span: Span, *rest: Any) -> Any:
    ids = span.block_ids.copy()
    ids[0] = ids[1]
    return land(replace(span, block_ids=ids), *rest)


def one_token_off(land: Callable[..., Any], span: Span, addresses: Any) -> None:
    land(span, addresses + 64)


def exchanged_slices(land: Callable[..., Any], span: Span, addresses: Any) -> None:
    land(span, np.ascontiguousarray(addresses[:, [1, 0, 2, 3]]))


def go_astray(monkeypatch: pytest.MonkeyPatch, route: Any, fault: Callable[..., Any]) -> None:
    """Break what brings blocks to the engine's: also the loop that takes them from a connection, where the fault is one of
    places; where it is one of sources, that loop is not used."""
    of_places = fault in (exchanged_rows, wrong_block, two_rows_in_one_block)
    if io_mode() == "process" and not of_places:
        monkeypatch.setattr(route, "direct", False)
    for name in ("scatter_from", "land"):
        land = getattr(route.path, name)
        monkeypatch.setattr(route.path, name, lambda *rest, land=land: fault(land, *rest))


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (nothing, [0, 1, 2]),
        (exchanged_rows, [0, 1]),
        (wrong_block, [0, 1, 2]),
        (two_rows_in_one_block, [0]),
        (one_token_off, [0, 1, 2]),
        (exchanged_slices, [0, 1, 2]),
    ],
)
def test_7_bytes_that_went_astray_are_refused_and_the_record_kept(
    store: KVStore, fault: Any, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_blocks(HASHES[:3], range(3))
    loader = store.attach(make_cache(seed=6))
    go_astray(monkeypatch, loader._views[0].route, fault)
    got = loader.get_blocks(HASHES[:3], [1, 2, 3])
    assert sorted(got.rejected) == wrong
    assert {(r.kind, r.condemned) for r in got.rejected.values()} == {("content", False)}
    assert got.verified.sum() == 3 - len(wrong)
    monkeypatch.undo()
    assert not Raw(store).quarantined()
    assert store.put_blocks(HASHES[:3], range(3)).stored.sum() == len(wrong), "a refused key is written again"
    assert loader.get_blocks(HASHES[:3], [1, 2, 3]).verified.all()


@pytest.mark.parametrize(("times", "detail"), [(1, "layer 1 head 1"), (2, "they changed while they were checked")])
def test_6_a_block_overwritten_after_the_copy_is_refused(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, times: int, detail: str
) -> None:
    """Also by a later block of the same call: the check comes after the last copy."""
    store.put_blocks(HASHES[:3], range(3))
    target = make_cache(seed=6)
    loader = store.attach(target)
    path = loader._views[0].route.path
    checksum = path.checksum

    calls = iter(range(99))

    def late(span: Span) -> Any:
        if next(calls) < times:
            list(target.tensors.values())[1][2].view(torch.uint8)[1, 3, 5] ^= 0x80
        return checksum(span)

    monkeypatch.setattr(path, "checksum", late)
    got = loader.get_blocks(HASHES[:3], [1, 2, 3])
    assert got.verified.tolist() == [True, False, True]
    assert detail in got.rejected[1].detail


def test_6_a_copy_that_lands_late_in_an_earlier_block_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot a block: the second block's bytes go into the first one's place, long after the first landed."""
    with open_store(tmp_path, make_cache(), replace(SMALL, read_batch_bytes=1)) as store:
        store.put_blocks(HASHES[:2], range(2))
        go_astray(
            monkeypatch,
            store._views[0].route,
            lambda land, span, addresses: land(replace(span, block_ids=np.array([4], np.int64)), addresses),
        )
        assert not store.get_blocks(HASHES[:2], [4, 5]).verified.any()


# 8. Eight threads put and get overlapping keys.


def fill(cache: PagedKVCache, block: int, content: bytes) -> None:
    """Fill a block with bytes that follow from `content`."""
    for number, tensor in enumerate(cache.tensors.values()):
        seed = hashlib.sha256(content + bytes([number])).digest()
        size = tensor[block].numel() * tensor.itemsize
        data = np.frombuffer((seed * (size // 32 + 1))[:size], np.uint8)
        tensor[block].view(torch.uint8).copy_(torch.from_numpy(data.copy()).view(tensor[block].view(torch.uint8).shape))


def test_8_eight_threads_on_overlapping_keys_get_no_wrong_block(tmp_path: Path) -> None:
    store = open_store(tmp_path, make_cache(), replace(SMALL, durability="process"))
    hashes, wrong, served = block_hashes(24), [], [0] * 8

    def work(number: int) -> None:
        chooser, cache = random.Random(number), make_cache(seed=number)
        own = store.attach(cache)
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            first = chooser.randrange(20)
            chosen = hashes[first : first + 4]
            if chooser.random() < 0.4:
                for i, block_hash in enumerate(chosen):
                    fill(cache, i, block_hash)
                own.put_blocks(chosen, range(4), first + chooser.randrange(2))
            got = own.get_blocks(chosen, range(4, 8), first)
            for i in np.flatnonzero(got.verified):
                fill(cache, 0, chosen[i])
                served[number] += 1
                if not np.array_equal(canonical(cache, [0]), canonical(cache, [4 + int(i)])):
                    wrong.append(chosen[i])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    store.close()
    assert not wrong
    assert min(served) > 0


# 10. Hashes differ between processes. 11. A reader during a write.

LOADER = """
import sys
from tests.support import *
cache = make_cache(seed=7)
with open_store(__import__("pathlib").Path(sys.argv[1]), cache, mode="r") as store:
    got = store.get_blocks(block_hashes(6), range(6))
    print(store.match_prefix(block_hashes(6)), int(got.verified.sum()), canonical(cache, range(6)).tobytes().hex())
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_10_what_one_process_put_another_gets(store: KVStore, cache: PagedKVCache, hash_seed: str) -> None:
    store.put_blocks(HASHES, range(6))
    command = [sys.executable, "-c", LOADER, str(store.folder.parent)]
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), IO: io_mode()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["6", "6", canonical(cache, range(6)).tobytes().hex()]


def test_11_a_reader_during_a_write_sees_a_miss_or_the_whole_block(store: KVStore) -> None:
    stop = threading.Event()
    target = make_cache(seed=5)
    loader = store.attach(target)
    good = canonical(store.cache, range(3))

    def write() -> None:
        while not stop.is_set():
            for start in (0, 1):
                store.put_blocks(HASHES[:3], range(3), start)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            got = loader.get_blocks(HASHES[:3], [4, 5, 6])
            assert {r.kind for r in got.rejected.values()} <= {"position"}
            for i in np.flatnonzero(got.verified):
                assert np.array_equal(canonical(target, [4 + int(i)])[0], good[i])
                seen += 1
    finally:
        stop.set()
        writer.join(30)
    assert seen > 0


# 14. A failed load is retried for ever.


def test_14_after_a_rejection_the_next_lookup_misses_and_a_new_put_succeeds(store: KVStore, path: HostPath) -> None:
    store.put_blocks(HASHES[:3], range(3))
    exchange(store, HASHES[0], HASHES[1])
    assert len(store.get_blocks(HASHES[:3], range(3)).rejected) == 2
    for _ in range(3):
        assert store.match_prefix(HASHES[:3]) == 0
        assert not store.get_blocks(HASHES[:3], range(3)).rejected
    put = store.put_blocks(HASHES[:3], range(3))
    assert put.stored.tolist() == [True, True, False]
    assert store.match_prefix(HASHES[:3]) == 3


@pytest.mark.inline("breaks what reads or writes the shard")
def test_14_a_refusal_that_cannot_be_written_is_still_a_miss(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> bool:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    store.put_blocks(HASHES[:2], range(2))
    exchange(store, HASHES[0], HASHES[1])
    monkeypatch.setattr(shard_of(store).db, "condemn", full)
    assert len(store.get_blocks(HASHES[:2], range(2)).rejected) == 2
    assert store.match_prefix(HASHES[:2]) == 0
    assert store.get_blocks(HASHES[:2], range(2)).missing.all()
    assert store.stats()["quarantine_failed"] == 2
    assert store.put_blocks(HASHES[:2], range(2)).stored.all()
    assert store.get_blocks(HASHES[:2], range(2)).verified.all()


# 18. A record that is a pickle is never deserialised.


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_18_a_pickle_is_bytes(store: KVStore, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(mark))
    store.put_blocks(HASHES[:3], range(3))
    raw = Raw(store)
    raw.put_entry(index_key(store, HASHES[0]), bomb)
    chunks = sorted(raw.payload())
    raw.put_chunk(chunks[2], bomb)
    raw.put_chunk(chunks[5], bomb)
    got = store.get_blocks(HASHES[:3], range(3))
    assert [r.kind for r in got.rejected.values()] == ["header", "storage_hash", "storage_hash"]
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb itself works"


# 19. Paths.


@pytest.mark.parametrize("model", ["../../evil", "/etc/kv", "a\0b", "..", "org/model", "org-model", "x" * 5000, "模型"])
def test_19_names_never_become_paths(tmp_path: Path, cache: PagedKVCache, model: str) -> None:
    outer = tmp_path / "outer"
    with open_store(outer / "inner" / "store", cache, identity=replace(IDENTITY, model=model)) as store:
        assert store.put_blocks(HASHES[:1], [0]).stored.all()
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    shard = "outer/inner/store/tp0of1-pp0of1"
    assert files == {f"{shard}/STORE", f"{shard}/data.mdb", f"{shard}/lock.mdb"}


def test_19_a_slash_and_a_dash_are_different_models(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache, identity=replace(IDENTITY, model="org/model")) as store:
        store.put_blocks(HASHES, range(6))
    with open_store(tmp_path, cache, identity=replace(IDENTITY, model="org-model")) as store:
        assert store.get_blocks(HASHES, range(6)).missing.all()


def test_19_files_are_private(store: KVStore) -> None:
    store.put_blocks(HASHES, range(6))
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.folder.parent.stat().st_mode & 0o777 == 0o700
    assert {p.name: p.stat().st_mode & 0o777 for p in store.folder.iterdir()} == dict.fromkeys(
        ("STORE", "data.mdb", "lock.mdb"), 0o600
    )
