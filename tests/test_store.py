"""put, get, match: what a store answers, and each kind of rejection with what it does to the record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import CacheIdentity, KVStore, LayerSpec, PagedKVCache, Rank, StoreConfig
from kvstore.blockdb import ReadView
from kvstore.checksum import block_checksum_tags
from kvstore.hostpath import NumbaPath, NumpyPath
from kvstore.quarantine import parse_entry
from kvstore.record import Header, chunk_key, parse_header
from kvstore.saving import Save, Started
from tests.support import (
    IDENTITY,
    LAYOUTS,
    MIB,
    SMALL,
    Raw,
    block_hashes,
    canonical,
    flip,
    index_key,
    layer_tensors,
    make_cache,
    open_store,
    reference_checksums,
)

pytestmark = pytest.mark.both
HASHES = block_hashes(6)


def header_of(store: KVStore, block_hash: bytes, group: int = 0) -> Header:
    header = parse_header(Raw(store).entry(index_key(store, block_hash, group)) or b"")
    assert isinstance(header, Header)
    return header


def put_header(store: KVStore, header: Header, key: bytes | None = None) -> None:
    """Store an intact header that says what a damaged or foreign writer might."""
    Raw(store).put_entry(key or header.key, header.encode(header.sequence, header.written))


@pytest.fixture(params=["numba", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on both host paths."""
    if request.param == "numpy":
        monkeypatch.setattr("kvstore.transfer.host_path", NumpyPath)
    return str(request.param)


def test_blocks_come_back_in_other_places(store: KVStore, cache: PagedKVCache, loops: str) -> None:
    other = make_cache(seed=9)
    assert store.put_blocks(HASHES[:3], [5, 0, 7]).stored.all()
    got = store.attach(other).get_blocks(HASHES[:3], [1, 6, 2])
    assert got.verified.tolist() == [True] * 3
    assert got.num_leading == 3
    assert not got.missing.any()
    assert not got.rejected
    assert np.array_equal(canonical(other, [1, 6, 2]), canonical(cache, [5, 0, 7]))


@pytest.mark.parametrize("stored", LAYOUTS)
@pytest.mark.parametrize("loaded", ["BHNC", "2BNHD", "BNHD"])
def test_what_one_layout_stored_another_loads(tmp_path: Path, stored: str, loaded: str, loops: str) -> None:
    source, target = make_cache(stored), make_cache(loaded, seed=5)
    with open_store(tmp_path, source) as store:
        assert store.put_blocks(HASHES[:2], [3, 4]).stored.all()
        assert store.attach(target).get_blocks(HASHES[:2], [0, 7]).verified.all()
    assert np.array_equal(canonical(source, [3, 4]), canonical(target, [0, 7]))


def test_blocks_survive_the_store_object(tmp_path: Path, cache: PagedKVCache) -> None:
    for durability in ("commit", "process"):
        config = replace(SMALL, durability=durability)
        with open_store(tmp_path / durability, cache, config) as store:
            assert store.put_blocks(HASHES, range(6)).stored.all()
        with open_store(tmp_path / durability, make_cache(seed=2), config) as store:
            assert store.match_prefix(HASHES) == 6
            assert store.get_blocks(HASHES, range(6)).verified.all()
            assert np.array_equal(canonical(store.cache, range(6)), canonical(cache, range(6)))


def test_stored_checksums_are_the_protocols(store: KVStore, cache: PagedKVCache) -> None:
    store.put_blocks(HASHES[2:4], [1, 3], start=2, num_tokens=15, parent=HASHES[1])
    sums = reference_checksums(cache.group(0), canonical(cache, [1, 3]), 2, [4, 3])
    tags = block_checksum_tags(HASHES[2:4], store._views[0].shape.fingerprint)
    headers = [header_of(store, h) for h in HASHES[2:4]]
    assert [h.tagged_checksum ^ int(tag) for h, tag in zip(headers, tags, strict=True)] == sums
    assert [h.parent for h in headers] == HASHES[1:3]
    assert [h.position for h in headers] == [2, 3]
    assert [h.valid_tokens for h in headers] == [4, 3]


def test_a_partial_block_leaves_the_slots_past_it_alone(store: KVStore, cache: PagedKVCache, loops: str) -> None:
    other = make_cache(seed=3)
    before = canonical(other, [2]).reshape(-1, 4, 64)
    assert store.put_blocks(HASHES[:2], [0, 1], num_tokens=7).stored.all()
    assert store.attach(other).get_blocks(HASHES[:2], [5, 2], num_tokens=7).verified.all()
    after, stored = canonical(other, [2]).reshape(-1, 4, 64), canonical(cache, [1]).reshape(-1, 4, 64)
    assert np.array_equal(after[:, :3], stored[:, :3])
    assert np.array_equal(after[:, 3:], before[:, 3:])


def test_another_number_of_valid_tokens_is_a_miss_and_the_latest_put_wins(store: KVStore) -> None:
    assert store.put_blocks(HASHES[:1], [0], num_tokens=3).stored.all()
    assert store.get_blocks(HASHES[:1], [1]).missing.tolist() == [True]
    assert store.put_blocks(HASHES[:1], [0]).stored.all()
    assert store.get_blocks(HASHES[:1], [1]).verified.all()
    assert store.get_blocks(HASHES[:1], [1], num_tokens=3).missing.all()
    assert store.stats()["records"] == 1


def test_present_blocks_are_not_written_again(store: KVStore) -> None:
    store.put_blocks(HASHES[:2], [0, 1])
    size = header_of(store, HASHES[0]).sequence
    again = store.put_blocks(HASHES[:3], [0, 1, 2])
    assert again.present.tolist() == [True, True, False]
    assert again.stored.tolist() == [False, False, True]
    assert header_of(store, HASHES[0]).sequence == size


def test_match_prefix_stops_at_the_first_gap(store: KVStore) -> None:
    store.put_blocks(HASHES[:2], [0, 1])
    store.put_blocks(HASHES[3:5], [3, 4], start=3, parent=HASHES[2])
    assert store.match_prefix(HASHES) == 2
    assert store.match_prefix(HASHES[3:]) == 0, "they lie at other positions"
    assert store.match_prefix([]) == 0
    got = store.get_blocks(HASHES, range(6))
    assert got.verified.tolist() == [True, True, False, True, True, False]
    assert got.num_leading == 2


def test_match_prefix_of_several_groups_is_the_shortest(tmp_path: Path) -> None:
    tensors = layer_tensors("BHNC", layers=3)
    names = list(tensors)
    cache = PagedKVCache.from_tensors(tensors, "BHNC", groups={0: names[:2], 7: names[2:]})
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:3], range(3))
        store.put_blocks(HASHES[:2], range(2), group=7)
        assert store.match_prefix({0: HASHES, 7: HASHES}) == 2
        assert store.match_prefix(HASHES) == 3
        assert store.match_prefix(HASHES, group=7) == 2
        assert store.match_prefix({}) == 0


def test_submitted_calls_answer_the_same(store: KVStore) -> None:
    assert store.submit_put_blocks(HASHES, range(6)).result(30).stored.all()
    futures = [store.submit_get_blocks(HASHES[i : i + 1], [i], start=i) for i in range(6)]
    assert all(future.result(30).verified.all() for future in futures)


def test_empty_calls_answer_nothing(store: KVStore) -> None:
    assert store.put_blocks([], []).stored.shape == (0,)
    assert store.get_blocks([], []).verified.shape == (0,)


def test_a_long_call_is_split_into_transactions_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, hashes, written = make_cache(blocks=40), block_hashes(40), list[int]()
    block = cache.group(0).block_bytes
    config = replace(SMALL, batch_bytes=3 * block, read_batch_bytes=5 * block)
    make_ready = Save._make_ready

    def noted(save: Save, putting: Any, started: Started) -> Any:
        written.append(started.indices.size)
        return make_ready(save, putting, started)

    monkeypatch.setattr(Save, "_make_ready", noted)
    with open_store(tmp_path, cache, config) as store:
        before = Raw(store).transactions()
        assert store.put_blocks(hashes, range(40)).stored.all()
        assert max(written) == 3
        assert sum(written) == 40
        assert Raw(store).transactions() - before == len(written)
        assert store.get_blocks(hashes, range(40)).verified.all()


def test_blocks_of_several_chunks_and_slices_larger_than_a_chunk(tmp_path: Path, loops: str) -> None:
    form = {"layers": 3, "blocks": 3, "heads": 2, "tokens": 600, "head_size": 128}
    source, target = make_cache(**form), make_cache(seed=4, **form)
    with open_store(tmp_path, source) as store:
        assert store.put_blocks(HASHES[:2], [2, 0], num_tokens=1111).stored.all()
        assert len(Raw(store).payload()) == 2 * (1 + 6 * 2)
        assert store.attach(target).get_blocks(HASHES[:2], [1, 2], num_tokens=1111).verified.all()
    assert np.array_equal(canonical(source, [2]), canonical(target, [1]))


# Rejections: what is damaged, how it is called, and whether the record is to blame.


def damage_header(store: KVStore) -> None:
    raw, key = Raw(store), index_key(store, HASHES[1])
    raw.put_entry(key, flip(raw.entry(key) or b"", 333))


def damage_key(store: KVStore) -> None:
    raw = Raw(store)
    raw.put_entry(index_key(store, HASHES[1]), raw.entry(index_key(store, HASHES[0])))


def damage_chunk(store: KVStore) -> None:
    at = chunk_key(header_of(store, HASHES[1]).sequence, 1)
    Raw(store).put_chunk(at, flip(Raw(store).payload()[at], 99))


def lose_chunk(store: KVStore) -> None:
    Raw(store).put_chunk(chunk_key(header_of(store, HASHES[1]).sequence, 1), None)


def damage_directory(store: KVStore) -> None:
    at = chunk_key(header_of(store, HASHES[1]).sequence, 0)
    Raw(store).put_chunk(at, flip(Raw(store).payload()[at], 5))


def damage_lengths(store: KVStore) -> None:
    put_header(store, replace(header_of(store, HASHES[1]), stored_length=7))


def damage_content(store: KVStore) -> None:
    header = header_of(store, HASHES[1])
    put_header(store, replace(header, tagged_checksum=header.tagged_checksum ^ 4))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (damage_header, "header"),
        (damage_key, "key"),
        (damage_chunk, "storage_hash"),
        (lose_chunk, "storage_hash"),
        (damage_directory, "storage_hash"),
        (damage_lengths, "decode"),
        (damage_content, "content"),
    ],
)
def test_a_damaged_record_is_refused_quarantined_and_stored_again(
    store: KVStore, damage: Any, kind: str, loops: str
) -> None:
    store.put_blocks(HASHES[:3], range(3))
    damage(store)
    got = store.get_blocks(HASHES[:3], [3, 4, 5])
    assert got.verified.tolist() == [True, False, True]
    assert (got.rejected[1].kind, got.rejected[1].condemned) == (kind, True)
    assert store.match_prefix(HASHES[:3]) == 1
    entry = parse_entry(Raw(store).quarantined()[0])
    assert entry is not None
    assert (entry.kind, entry.key) == (kind, index_key(store, HASHES[1]))
    assert store.stats()[f"get_rejected_{kind}"] == store.stats()["quarantine_records"] == 1
    assert store.get_blocks(HASHES[1:2], [4], start=1).missing.all(), "a miss, not refused again"
    assert store.put_blocks(HASHES[:3], range(3)).stored.tolist() == [False, True, False]
    assert store.get_blocks(HASHES[:3], [3, 4, 5]).verified.all()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"position": 2}, "position"),
        ({"fingerprint": 1}, "fingerprint"),
        ({"block_size": 8}, "geometry"),
        ({"raw_length": 8}, "geometry"),
        ({"codec": 9}, "version"),
        ({"algorithm": 9}, "version"),
    ],
)
def test_a_record_that_answers_another_question_is_refused_and_left_alone(
    store: KVStore, change: dict[str, int], kind: str
) -> None:
    store.put_blocks(HASHES[:2], range(2))
    put_header(store, replace(header_of(store, HASHES[1]), **change))
    got = store.get_blocks(HASHES[:2], [3, 4])
    assert (got.rejected[1].kind, got.rejected[1].condemned) == (kind, False)
    assert Raw(store).entry(index_key(store, HASHES[1])) is not None
    assert not Raw(store).quarantined()
    assert store.get_blocks(HASHES[:2], [3, 4]).missing.tolist() == [False, True]
    assert store.match_prefix(HASHES[:2]) == 1
    assert store.put_blocks(HASHES[:2], range(2)).stored.tolist() == [False, True]
    assert store.get_blocks(HASHES[:2], [3, 4]).verified.all()


def test_a_wrong_position_is_refused_and_right_again_for_another_store(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES[:1], [0])
        assert store.get_blocks(HASHES[:1], [1], start=1).rejected[0].kind == "position"
        assert store.get_blocks(HASHES[:1], [1]).missing.all()
    with open_store(tmp_path, cache) as store:
        assert store.get_blocks(HASHES[:1], [1]).verified.all()


@pytest.mark.inline("breaks what reads the shard")
def test_an_error_that_passes_is_read_again_and_counted(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_blocks(HASHES[:2], range(2))
    reads: list[int] = []
    chunk = ReadView.chunk

    def once(view: ReadView, sequence: int, number: int) -> memoryview | None:
        reads.append(number)
        found = chunk(view, sequence, number)
        return memoryview(flip(bytes(found or b""), 3)) if reads.count(1) == 1 and number == 1 else found

    monkeypatch.setattr(ReadView, "chunk", once)
    got = store.get_blocks(HASHES[:2], [4, 5])
    assert got.verified.all()
    assert store.stats()["get_transient"] == 1
    assert not Raw(store).quarantined()


@pytest.mark.inline("breaks what reads the shard")
def test_a_database_that_cannot_be_read_rejects_and_keeps_the_record(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_blocks(HASHES[:2], range(2))

    def fail(view: ReadView, key: bytes) -> bytes:
        raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED")

    monkeypatch.setattr(ReadView, "header", fail)
    monkeypatch.setattr(ReadView, "headers", fail)
    got = store.get_blocks(HASHES[:2], [4, 5])
    assert [r.kind for r in got.rejected.values()] == ["io", "io"]
    assert store.match_prefix(HASHES[:2]) == 0
    monkeypatch.undo()
    assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()


def test_quarantine_is_bounded_and_frees_what_leaves_it(tmp_path: Path, cache: PagedKVCache) -> None:
    block = cache.group(0).block_bytes
    with open_store(tmp_path, cache, replace(SMALL, quarantine_bytes=3 * block)) as store:
        for _ in range(6):
            store.put_blocks(HASHES[:2], range(2))
            damage_chunk(store)
            assert store.get_blocks(HASHES[:2], [4, 5]).rejected[1].kind == "storage_hash"
        stats = store.stats()
        assert 1 <= stats["quarantine_records"] <= 3
        assert stats["quarantine_bytes"] <= 3 * block
        assert len(Raw(store).payload()) == 2 * (1 + stats["quarantine_records"])


NO_QUARANTINE = replace(SMALL, quarantine_bytes=0)


def test_exchanged_records_lose_no_other_record_and_no_space(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES, range(6))
        raw, keys = Raw(store), [index_key(store, h) for h in HASHES]
        one, two = raw.entry(keys[1]), raw.entry(keys[3])
        raw.put_entry(keys[1], two)
        raw.put_entry(keys[3], one)
        got = store.get_blocks(HASHES, range(6))
        assert {i: r.kind for i, r in got.rejected.items()} == {1: "key", 3: "key"}
        store.put_blocks(HASHES, range(6))
        assert store.get_blocks(HASHES, range(6)).verified.all()
    with open_store(tmp_path, cache, NO_QUARANTINE) as store:
        damage_chunk(store)
        store.get_blocks(HASHES, range(6))
        assert not Raw(store).quarantined()
        assert len(Raw(store).payload()) == 2 * 5, "the chunks of all that left quarantine are free"


def test_a_copied_index_entry_never_frees_its_owners_chunks(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache, NO_QUARANTINE) as store:
        store.put_blocks(HASHES[:2], range(2))
        damage_key(store)
        assert store.get_blocks(HASHES[:2], [4, 5]).rejected[1].kind == "key"
        assert store.put_blocks(HASHES[1:2], [1], start=1).stored.all()
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()


def test_accounting_counts_what_is_there(store: KVStore, cache: PagedKVCache) -> None:
    block = cache.group(0).block_bytes
    store.put_blocks(HASHES, range(6))
    store.put_blocks(HASHES[:2], range(2), start=1)
    stats, payload = store.stats(), Raw(store).payload()
    assert (stats["records"], stats["raw_bytes"]) == (6, 6 * block)
    assert stats["stored_bytes"] == sum(map(len, payload.values()))
    assert stats["put_stored"] == 8
    assert stats["put_bytes"] == 8 * block
    assert 0 < stats["file_bytes"] <= stats["capacity_bytes"] == 64 * MIB


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, io: str) -> Iterator[KVStore]:
    """One store for all examples of a property; each has hashes of its own."""
    with open_store(tmp_path_factory.mktemp("store"), make_cache()) as store:
        yield store


EXAMPLES = itertools.count()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_sequence_of_puts_and_gets_agrees_with_a_dictionary(shared: KVStore, data: st.DataObject) -> None:
    cache, hashes = make_cache(), block_hashes(8, f"example {next(EXAMPLES)}")
    store, refused = shared.attach(cache), shared._front.storage.refused._sequences
    held: dict[tuple[bytes, int], bytes] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        first, count = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 4))
        chosen = hashes[first : first + count]
        ids = data.draw(st.permutations(range(8)))[: len(chosen)]
        start = data.draw(st.sampled_from([first, first + 1]))
        if data.draw(st.booleans()):
            store.put_blocks(chosen, ids, start)
            for block_hash, block, position in zip(chosen, canonical(cache, ids), range(start, 99), strict=False):
                if (block_hash, position) not in held:
                    held = {k: v for k, v in held.items() if k[0] != block_hash}
                    held[block_hash, position] = block.tobytes()
        else:
            got = store.get_blocks(chosen, ids, start)
            for i, block in enumerate(canonical(cache, ids)):
                if got.verified[i]:
                    assert block.tobytes() == held[chosen[i], start + i]
                elif got.missing[i]:
                    assert (chosen[i], start + i) not in held or index_key(store, chosen[i]) in refused
            for i in got.rejected:
                held = {k: v for k, v in held.items() if k[0] != chosen[i]}


# Ranks and identities.


def test_ranks_write_shards_of_their_own(tmp_path: Path) -> None:
    whole = layer_tensors("BHNC", heads=4)
    specs = tuple(LayerSpec(name, "full", "bfloat16", 4, 32, 32) for name in whole)
    identity = replace(IDENTITY, layers=specs)
    fingerprints = set()
    for rank in range(2):
        part = {name: tensor[:, 2 * rank : 2 * rank + 2] for name, tensor in whole.items()}
        cache = PagedKVCache.from_tensors(part, "BHNC", first_head=dict.fromkeys(part, 2 * rank))
        with open_store(tmp_path, cache, identity=identity, rank=Rank(tp_rank=rank, tp_size=2)) as store:
            assert store.put_blocks(HASHES, range(6)).stored.all()
            assert store.get_blocks(HASHES, range(6)).verified.all()
            fingerprints.add(store._views[0].shape.fingerprint)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tp0of2-pp0of1", "tp1of2-pp0of1"]
    assert len(fingerprints) == 1


def test_another_ranks_record_is_of_another_geometry(tmp_path: Path) -> None:
    whole = layer_tensors("BHNC", heads=4)
    specs = tuple(LayerSpec(name, "full", "bfloat16", 4, 32, 32) for name in whole)
    caches = [
        PagedKVCache.from_tensors(
            {n: t[:, h : h + 2] for n, t in whole.items()}, "BHNC", first_head=dict.fromkeys(whole, h)
        )
        for h in (0, 2)
    ]
    with open_store(tmp_path, caches[0], identity=replace(IDENTITY, layers=specs), rank=Rank(0, 2)) as store:
        store.put_blocks(HASHES[:1], [0])
        assert store.attach(caches[1]).get_blocks(HASHES[:1], [0]).rejected[0].kind == "geometry"


@pytest.mark.parametrize(
    "other",
    [
        {"model": "test-model"},
        {"revision": "2"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"extra": {"k_scale": 0.5}},
    ],
)
def test_another_identity_misses(tmp_path: Path, cache: PagedKVCache, other: dict[str, Any]) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES, range(6))
    with open_store(tmp_path, cache, identity=replace(IDENTITY, **other)) as store:
        assert store.match_prefix(HASHES) == 0
        assert store.get_blocks(HASHES, range(6)).missing.all()
        assert store.put_blocks(HASHES, range(6)).stored.all()
    with open_store(tmp_path, cache) as store:
        assert store.get_blocks(HASHES, range(6)).verified.all()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[KVStore, KVStore]]:
    """Two stores of one content: to copy records between."""
    with open_store(tmp_path / "a", make_cache()) as a, open_store(tmp_path / "b", make_cache(seed=8)) as b:
        yield a, b


def test_a_record_of_another_store_is_as_good_and_one_under_another_key_is_refused(
    two: tuple[KVStore, KVStore],
) -> None:
    a, b = two
    a.put_blocks(HASHES[:1], [0])
    for key, chunk in Raw(a).payload().items():
        Raw(b).put_chunk(key, chunk)
    entry = Raw(a).entry(index_key(a, HASHES[0]))
    Raw(b).put_entry(index_key(b, HASHES[0]), entry)
    Raw(b).put_entry(index_key(b, HASHES[1]), entry)
    got = b.get_blocks(HASHES[:2], [0, 1])
    assert got.verified.tolist() == [True, False]
    assert got.rejected[1].kind == "key"


def test_a_forged_key_fails_by_its_tag(store: KVStore) -> None:
    """A record rewritten for another hash, all its own hashes right, still has the first one's tag."""
    store.put_blocks(HASHES[:1], [0])
    key = index_key(store, HASHES[1])
    put_header(store, replace(header_of(store, HASHES[0]), key=key), key)
    got = store.get_blocks(HASHES[1:2], [3])
    assert (got.rejected[0].kind, got.rejected[0].condemned) == ("content", True)


@pytest.mark.inline("opens no store")
def test_paths_are_what_the_machine_allows() -> None:
    from kvstore.hostpath import host_path

    assert isinstance(host_path(make_cache().group(0)), NumbaPath)


@pytest.mark.inline("opens no store")
def test_identities_of_one_cache_differ_by_every_field() -> None:
    variants = [
        IDENTITY,
        CacheIdentity("test/model", "1", "float16"),
        CacheIdentity("test/model", "1bfloat16", ""),
        CacheIdentity("test/model1", "", "bfloat16"),
        CacheIdentity("test/model", "1", "bfloat16", extra={"a": 1}),
        CacheIdentity("test/model", "1", "bfloat16", extra={"a": "1"}),
        CacheIdentity("test/model", "1", "bfloat16", extra={"a": True}),
    ]
    assert len({v.digest() for v in variants}) == len(variants)


def test_fp8_asked_for_where_bf16_was_stored_is_a_miss(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache()) as store:
        store.put_blocks(HASHES, range(6))
    with open_store(tmp_path, make_cache(dtype=torch.float8_e4m3fn, head_size=32)) as store:
        assert store.get_blocks(HASHES, range(6)).missing.all()


def test_config_of_another_capacity_opens_the_same_store(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES, range(6))
    with open_store(tmp_path, cache, StoreConfig(capacity_bytes=128 * MIB)) as store:
        assert store.get_blocks(HASHES, range(6)).verified.all()
