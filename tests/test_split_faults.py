"""Damage to any shard from which blocks are put together: what is served is right, and what is not right is refused."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, Rank
from kvstore.results import GetResult
from tests.splitmodel import Model, Split
from tests.support import SMALL, Raw, flip, open_store, report_campaign

ONE, TWO = Split(1), Split(2)
FIRST = Rank(0, 2)


def writer(model: Model, path: Path, rank: Rank = FIRST) -> KVStore:
    """A rank of two, to put blocks with, or to damage."""
    return open_store(path, model.cache(TWO, rank, filled=True), identity=model.identity, rank=rank, io="inline")


def load(
    model: Model, path: Path, split: Split = ONE, **options: Any
) -> tuple[GetResult, PagedKVCache, dict[str, int]]:
    """Everything, by a rank of another split."""
    cache = model.cache(split, Rank(), filled=False)
    with open_store(path, cache, options.pop("config", SMALL), identity=model.identity, **options) as store:
        return model.get(store, split), cache, store.stats()


def wrong(model: Model, got: GetResult, cache: PagedKVCache) -> list[int]:
    """Blocks that were served, and are not what was put."""
    found, expected = model.found(cache, ONE, Rank()), model.expected(ONE, Rank())
    size = ONE.block_size
    same = [np.array_equal(*(a[:, :, i * size : (i + 1) * size] for a in (found, expected))) for i in range(8)]
    return [i for i, good in enumerate(got.verified.tolist()) if good and not same[i]]


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_any_flipped_bit_of_a_shard_is_refused_or_harmless(tmp_path: Path, codec: str) -> None:
    model, rng, detected, faults = Model(layers=2), random.Random(7), 0, 150
    model.put(tmp_path / "store", TWO, replace(SMALL, codec=codec))
    for number in range(faults):
        path = tmp_path / f"damaged {number}"
        shutil.copytree(tmp_path / "store", path)
        with writer(model, path, Rank(rng.randrange(2), 2)) as store:
            raw, database = Raw(store), rng.choice(["index", "payload"])
            key, value = rng.choice(sorted(raw.all(database).items()))
            raw.replace(database, key, flip(value, rng.randrange(8 * len(value))))
        got, cache, _ = load(model, path, config=replace(SMALL, codec=codec))
        assert not wrong(model, got, cache), (number, database, key)
        assert got.verified.sum() >= 7
        detected += not got.verified.all()
        shutil.rmtree(path)
    report_campaign(f"splits/{codec}", faults, detected, 0, "7")
    assert detected == faults


def chunks(raw: Raw, store: KVStore, block: int, model: Model) -> list[bytes]:
    """The payload keys of a block's record: directory first."""
    key = store._views[0].shape.keys([model.steps[block]])[0]
    entry = raw.entry(key)
    assert entry is not None
    sequence = entry[40:48][::-1]
    return [k for k in raw.payload() if k[:8] == sequence]


@pytest.mark.both
def test_a_damaged_part_is_refused_reported_to_its_writer_and_stored_again(tmp_path: Path) -> None:
    model = Model()
    model.put(tmp_path, TWO)
    with writer(model, tmp_path) as store:
        raw = Raw(store)
        _, chunk = chunks(raw, store, 3, model)
        raw.put_chunk(chunk, flip(raw.chunk(chunk), 77))
    cache = model.cache(ONE, Rank(), filled=False)
    with open_store(tmp_path, cache, identity=model.identity) as reader:
        assert reader.match_prefix(model.steps) == 8
        got = model.get(reader, ONE)
        assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {3: ("storage_hash", True)}
        assert "tp0of2-pp0of1" in got.rejected[3].detail
        assert reader.stats()["get_rejected_storage_hash"] == 1
        assert reader.match_prefix(model.steps) == 3
        assert model.get(reader, ONE).missing.tolist() == [i == 3 for i in range(8)]
    with writer(model, tmp_path) as store:
        assert store.stats()["reports_condemned"] == 1
        assert store.match_prefix(model.steps) == 3
        assert store.put_blocks(model.steps[3:4], model.ids(TWO)[3:4], start=3).stored.all()
    got, cache, _ = load(model, tmp_path)
    assert got.verified.all()


def test_a_read_that_fails_once_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore import splicing

    model, calls = Model(), list[int]()
    model.put(tmp_path, TWO)
    check = splicing.check_chunk

    def once(*arguments: Any) -> Any:
        calls.append(1)
        return check(None, *arguments[1:]) if len(calls) == 2 else check(*arguments)

    monkeypatch.setattr(splicing, "check_chunk", once)
    got, cache, stats = load(model, tmp_path, io="inline")
    assert got.verified.all()
    assert not wrong(model, got, cache)
    assert stats["get_transient"] == 1


def test_records_of_two_blocks_exchanged_in_one_shard_are_refused(tmp_path: Path) -> None:
    model = Model()
    model.put(tmp_path, TWO)
    with writer(model, tmp_path) as store:
        raw = Raw(store)
        keys = store._views[0].shape.keys(model.steps)
        one, two = raw.entry(keys[1]), raw.entry(keys[2])
        raw.put_entry(keys[1], two)
        raw.put_entry(keys[2], one)
    got, cache, _ = load(model, tmp_path)
    assert got.verified.tolist() == [i not in (1, 2) for i in range(8)]
    assert not wrong(model, got, cache)


def test_chunks_of_two_ranks_exchanged_are_refused(tmp_path: Path) -> None:
    """Both have their right hashes: the directory says which belong to the record."""
    model, ranks = Model(), [Rank(0, 2), Rank(1, 2)]
    model.put(tmp_path, TWO)
    taken = []
    for rank in ranks:
        with writer(model, tmp_path, rank) as store:
            raw = Raw(store)
            taken.append([(key, raw.chunk(key)) for key in chunks(raw, store, 4, model)])
    for rank, own, others in zip(ranks, taken, taken[::-1], strict=True):
        with writer(model, tmp_path, rank) as store:
            for (key, _), (_, value) in zip(own, others, strict=True):
                Raw(store).put_chunk(key, value)
    got, cache, _ = load(model, tmp_path)
    assert list(got.rejected) == [4]
    assert not wrong(model, got, cache)


@pytest.mark.both
@pytest.mark.parametrize("kind", ["header", "key"])
def test_a_damaged_index_entry_is_refused_and_reported_to_its_writer(tmp_path: Path, kind: str) -> None:
    model = Model()
    model.put(tmp_path, TWO)
    with writer(model, tmp_path) as store:
        raw, keys = Raw(store), store._views[0].shape.keys(model.steps)
        entry = raw.entry(keys[2] if kind == "key" else keys[5])
        assert entry is not None
        raw.put_entry(keys[5], entry if kind == "key" else flip(entry, 300))
    got, cache, _ = load(model, tmp_path)
    assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {5: (kind, True)}
    assert not wrong(model, got, cache)
    with writer(model, tmp_path) as store:
        assert store.stats()["reports_condemned"] == 1


@pytest.mark.both
def test_bytes_that_change_in_the_engines_blocks_are_refused_and_the_records_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    model.put(tmp_path, TWO)
    cache = model.cache(ONE, Rank(), filled=False)
    with open_store(tmp_path, cache, identity=model.identity) as store:
        spoil(monkeypatch, store, cache, model, block=5)
        got = model.get(store, ONE)
        assert list(got.rejected) == [5]
        assert got.rejected[5].kind == "content"
        assert not got.rejected[5].condemned
        assert "went astray" in got.rejected[5].detail
        monkeypatch.undo()
        assert model.get(store, ONE).missing.tolist() == [i == 5 for i in range(8)]
    got, _, _ = load(model, tmp_path)
    assert got.verified.all()


def spoil(monkeypatch: pytest.MonkeyPatch, store: KVStore, cache: PagedKVCache, model: Model, block: int) -> None:
    """Change a byte of a block once it has landed, before it is summed."""
    route = store._views[0].route
    begin = route.begin_get

    def begin_get() -> Any:
        transfer = begin()
        sums = transfer.block_checksums

        def spoiled(*arguments: Any, **options: Any) -> Any:
            cache.tensors[model.name(1)][model.ids(ONE)[block], 3, 2, 9] ^= 4  # type: ignore[index]
            return sums(*arguments, **options)

        transfer.block_checksums = spoiled  # type: ignore[method-assign]
        return transfer

    monkeypatch.setattr(route, "begin_get", begin_get)


def test_blocks_that_were_stored_as_one_are_refused_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.put(tmp_path, Split(block_size=16))
    cache = model.cache(ONE, Rank(), filled=False)
    with open_store(tmp_path, cache, identity=model.identity, io="inline") as store:
        spoil(monkeypatch, store, cache, model, block=2)
        got = model.get(store, ONE)
        assert list(got.rejected) == [0, 1, 2, 3]
        assert got.verified.tolist() == [False] * 4 + [True] * 4


def test_a_record_whose_content_was_wrong_when_it_was_hashed_is_condemned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec at fault: every storage hash is right, the slice table is the engine's, the bytes are others."""
    from kvstore import storing

    model = Model()
    original = storing.Storing.record

    def record(self: Any, index: int, raw: Any, sums: Any, tagged: int) -> Any:
        if index == 6:
            raw[100] ^= 1
        return original(self, index, raw, sums, tagged)

    monkeypatch.setattr(storing.Storing, "record", record)
    with writer(model, tmp_path, Rank(1, 2)) as store:
        store.put_blocks(model.steps, model.ids(TWO))
    monkeypatch.undo()
    with writer(model, tmp_path) as store:
        store.put_blocks(model.steps, model.ids(TWO))
    got, cache, _ = load(model, tmp_path)
    assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {6: ("content", True)}
    assert "tp1of2-pp0of1" in got.rejected[6].detail
    assert not wrong(model, got, cache)
    with writer(model, tmp_path, Rank(1, 2)) as store:
        assert store.match_prefix(model.steps) == 6
    with writer(model, tmp_path) as store:
        assert store.match_prefix(model.steps) == 8


def test_a_table_that_does_not_sum_to_the_records_checksum_is_refused(tmp_path: Path) -> None:
    """A crafted directory with right hashes: what it says of slices must sum to what the header says of the block."""
    from xxhash import xxh3_64_intdigest

    from kvstore.record import parse_header

    model = Model()
    model.put(tmp_path, TWO)
    with writer(model, tmp_path) as store:
        raw = Raw(store)
        key = store._views[0].shape.keys([model.steps[2]])[0]
        entry = raw.entry(key)
        assert entry is not None
        header = parse_header(entry, key)
        directory = flip(raw.chunk(chunks(raw, store, 2, model)[0]), 3)
        changed = replace(header, directory_hash=xxh3_64_intdigest(directory))  # type: ignore[type-var]
        raw.put_chunk(chunks(raw, store, 2, model)[0], directory)
        raw.put_entry(key, changed.encode(header.sequence, header.written))  # type: ignore[union-attr]
    got, _, _ = load(model, tmp_path)
    assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {2: ("content", True)}
    assert "slice table" in got.rejected[2].detail


def test_another_models_shards_are_not_looked_at(tmp_path: Path) -> None:
    model, other = Model(), Model(seed=1)
    other.identity = replace(other.identity, model="other/model")
    other.steps = model.steps
    other.put(tmp_path, TWO)
    got, _, _ = load(model, tmp_path)
    assert got.missing.all()


def test_strange_folders_and_damaged_shards_beside_it_change_nothing(tmp_path: Path) -> None:
    model = Model()
    model.put(tmp_path, TWO)
    for name in ("tp0of3-pp0of1", "tp1of3-pp0of1", "tp0of2-pp0of1.old", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "tp1of3-pp0of1" / "data.mdb").write_bytes(b"no database")
    (tmp_path / "tp2of3-pp0of1").write_bytes(b"a file")
    shutil.copytree(tmp_path / "tp1of2-pp0of1", tmp_path / "tp0of7-pp0of1")
    got, cache, _ = load(model, tmp_path)
    assert got.verified.all()
    assert not wrong(model, got, cache)
