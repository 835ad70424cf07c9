"""Mamba states in a store beside attention's blocks: what was stored comes back verified, whatever went astray is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvstore import CacheIdentity, KVStore, LayerSpec, PrefixBlocks, Rank, StateSpec, StateTensor, route, statepath
from kvstore.errors import ConfigError, IdentityError, UnsupportedCache
from kvstore.explain import StateRun, explain, runs_in_words
from kvstore.fsck.findings import Finding, Summary
from kvstore.fsck.glance import intact
from kvstore.fsck.options import Options
from kvstore.fsck.salvage import salvage
from kvstore.fsck.scan import check
from kvstore.identity import identity_digest
from kvstore.inspect import items
from kvstore.record import Directory, Header, chunk_key, parse_directory, parse_header
from kvstore.shape import GroupShape
from kvstore.stategeometry import STATES, decode_states, encode_states
from kvstore.survey import Names
from kvstore.tools.look_text import show_lines, show_object
from kvstore.verify import fingerprints
from tests.fsck_damage import place, recount, value
from tests.records import opened
from tests.state_cases import (
    FORMS,
    GROUP,
    SLOTS,
    TOKENS,
    States,
    cache_of,
    mamba,
    ranks_part,
    reference_sum,
    snapshot,
    split,
    unknown,
    with_tensors,
)
from tests.support import IDENTITY, MIB, SMALL, Raw, block_hashes, canonical, flip, index_key, open_store, random_tensor
from tests.test_transport import exported, imported

HASHES = block_hashes(4)
IDS, OTHERS = [3, 0, 4], [1, 2, 0]


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which loops move and sum states."""
    if request.param == "numpy":
        monkeypatch.setattr(statepath, "_compiled_states", lambda: None)
    return str(request.param)


def twins(seed: int = 0) -> States:
    """Layers and states of one shape, which fit in each other's places."""
    return {
        f"layers.{layer}.mixer": [
            StateTensor(random_tensor((SLOTS, 6, 4), torch.float32, 100 * seed + 2 * layer + i), 1) for i in range(2)
        ]
        for layer in range(2)
    }


def whole_identity(states: States) -> CacheIdentity:
    """An identity with the layers of the cache of these states."""
    cache = cache_of(states)
    return IDENTITY.with_layers(layer.spec(g.number) for g in cache.all_groups.values() for layer in g.layers)


def header_of(store: KVStore, block_hash: bytes) -> Header:
    header = parse_header(Raw(store).entry(index_key(store, block_hash, GROUP)) or b"")
    assert isinstance(header, Header)
    return header


# --- there and back ----------------------------------------------------------------------------------------------


@pytest.mark.both(cases=4)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "a rank's part"])
@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_states_come_back_in_other_slots(form: str, codec: str, tmp_path: Path, loops: str) -> None:
    source, target = FORMS[form](1), FORMS[form](2)
    before = snapshot(target)
    with open_store(tmp_path, cache_of(source), replace(SMALL, codec=codec)) as store:
        put = store.put_blocks(HASHES[:3], IDS, group=GROUP)
        assert put.stored.all()
        got = store.attach(cache_of(target)).get_blocks(HASHES[:3], OTHERS, group=GROUP)
        assert got.verified.all()
        tags = [int.from_bytes(h[:8], "little") ^ header_of(store, h).fingerprint for h in HASHES[:3]]
        stored = [header_of(store, h).tagged_checksum ^ tag for h, tag in zip(HASHES[:3], tags, strict=True)]
    assert stored == [reference_sum(source, slot) for slot in IDS]
    after = snapshot(target)
    assert np.array_equal(after[OTHERS], snapshot(source)[IDS])
    assert np.array_equal(after[[3, 4]], before[[3, 4]])


@pytest.mark.both
def test_what_one_layout_stored_another_loads(tmp_path: Path) -> None:
    source = FORMS["pages"](1)
    target = with_tensors(source, 5)
    with open_store(tmp_path, cache_of(source)) as store:
        store.put_blocks(HASHES[:2], [4, 1], group=GROUP)
        assert store.attach(cache_of(target)).get_blocks(HASHES[:2], [0, 3], group=GROUP).verified.all()
    assert np.array_equal(snapshot(target)[[0, 3]], snapshot(source)[[4, 1]])


@pytest.mark.both
def test_attention_and_states_of_one_request_share_a_store_and_its_hashes(tmp_path: Path) -> None:
    source, target = cache_of(mamba(1), seed=1), cache_of(mamba(2), seed=2)
    with open_store(tmp_path, source) as store:
        assert store.put_blocks(HASHES[:3], IDS).stored.all()
        assert store.put_blocks(HASHES[:2], IDS[:2], group=GROUP).stored.all()
        assert store.put_blocks(HASHES[:2], IDS[:2], group=GROUP).present.all()
        assert store.match_prefix(HASHES) == 3
        assert store.match_prefix(HASHES, group=GROUP) == 2
        assert store.match_prefix({0: HASHES, GROUP: HASHES}) == 2
        loader = store.attach(target)
        assert loader.get_blocks(HASHES[:3], OTHERS).verified.all()
        got = loader.get_blocks(HASHES[:3], OTHERS, group=GROUP)
        assert got.verified.tolist() == [True, True, False]
        assert got.missing.tolist() == [False, False, True]
    assert np.array_equal(canonical(target, OTHERS), canonical(source, IDS))
    stored, loaded = (snapshot(cast(States, cache.states)) for cache in (source, target))
    assert np.array_equal(loaded[OTHERS[:2]], stored[IDS[:2]])


@pytest.mark.both
def test_a_block_larger_than_a_chunk_and_a_call_larger_than_a_buffer(tmp_path: Path) -> None:
    def large(seed: int) -> States:
        return {"layers.5": [StateTensor(random_tensor((SLOTS, 16, 128, 64), torch.float32, seed), 1)]}

    source, target = large(1), large(2)
    with open_store(tmp_path, cache_of(source), replace(SMALL, batch_bytes=1)) as store:
        assert store.put_blocks(HASHES[:3], IDS, group=GROUP).stored.all()
        assert len(Raw(store).payload()) == 3 * (1 + 2)
        assert store.attach(cache_of(target)).get_blocks(HASHES[:3], OTHERS, group=GROUP).verified.all()
    assert np.array_equal(snapshot(target)[OTHERS], snapshot(source)[IDS])


@pytest.mark.both
def test_a_state_after_another_number_of_tokens_is_a_miss(tmp_path: Path) -> None:
    with open_store(tmp_path, cache_of(mamba())) as store:
        assert store.put_blocks(HASHES[:1], [0], start=2, num_tokens=2 * TOKENS + 5, group=GROUP).stored.all()
        for tokens in (2 * TOKENS + 4, None):
            got = store.get_blocks(HASHES[:1], [1], start=2, num_tokens=tokens, group=GROUP)
            assert got.missing.all()
            assert not got.rejected
        assert store.get_blocks(HASHES[:1], [1], start=2, num_tokens=2 * TOKENS + 5, group=GROUP).verified.all()
        got = store.get_blocks(HASHES[:1], [1], start=3, num_tokens=3 * TOKENS + 5, group=GROUP)
        assert (got.rejected[0].kind, got.rejected[0].condemned) == ("position", False)


# --- ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.both
def test_each_rank_stores_its_rows_and_their_checksums_add_up(tmp_path: Path) -> None:
    whole = {name: given for name, given in mamba(1).items() if name.startswith("model.layers.0")}
    identity, total = whole_identity(whole), 0
    for part in range(2):
        own, target = split(whole, 2, part), with_tensors(split(whole, 2, part), 3 + part)
        cache = cache_of(own, tp_rank=part)
        with open_store(tmp_path, cache, identity=identity, rank=Rank(part, 2)) as store:
            assert store.put_blocks(HASHES[:1], [3], group=GROUP).stored.all()
            assert store.attach(cache_of(target, tp_rank=part)).get_blocks(HASHES[:1], [1], group=GROUP).verified.all()
            header = header_of(store, HASHES[0])
        assert np.array_equal(snapshot(target)[1], snapshot(own)[3])
        total += header.tagged_checksum ^ header.fingerprint ^ int.from_bytes(HASHES[0][:8], "little")
    assert total % 2**64 == reference_sum(whole, 3)


def test_a_rank_needs_an_identity_and_its_own_number(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="holds a part of the model"):
        open_store(tmp_path, cache_of(ranks_part()))
    with pytest.raises(IdentityError, match="holds a part of the model"):
        open_store(tmp_path, cache_of(mamba()), rank=Rank(1, 2))
    with pytest.raises(ConfigError, match=r"tp_rank 0 in the cache.* pass tp_rank=1"):
        open_store(tmp_path, cache_of(unknown()), identity=whole_identity(unknown()), rank=Rank(1, 2))
    with pytest.raises(UnsupportedCache, match=r"rank 1's .* 1 ranks"):
        open_store(tmp_path, cache_of(unknown(), tp_rank=1), identity=whole_identity(unknown()), rank=Rank(1, 2))


def test_ranks_of_a_split_that_is_not_known_are_different_slices(tmp_path: Path) -> None:
    specs = [replace(s, kv_heads=2) if not s.states or s.states[0].rows == 0 else s for s in layers_of(unknown())]
    identity = IDENTITY.with_layers(replace(s, kv_heads=2) if s.type == "full" else s for s in specs)
    found = []
    for part in range(2):
        states = unknown(4)
        with open_store(tmp_path, cache_of(states, tp_rank=part), identity=identity, rank=Rank(part, 2)) as store:
            assert store.put_blocks(HASHES[:1], [2], group=GROUP).stored.all()
            assert store.get_blocks(HASHES[:1], [1], group=GROUP).verified.all()
            found.append(header_of(store, HASHES[0]))
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].tagged_checksum != found[1].tagged_checksum, "equal bytes of another rank"
    assert found[0].geometry != found[1].geometry


def layers_of(states: States) -> tuple[LayerSpec, ...]:
    layers = whole_identity(states).layers
    assert layers is not None
    return layers


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16,bfloat16"},
        {"states": ((40, 3, 2), (8, 15, 4))},
        {"states": ((40, 3, 4), (8, 30, 4))},
        {"states": ((41, 3, 2), (7, 30, 4))},
        {"states": ((48, 3, 2),)},
        {"group": 0},
    ],
)
def test_a_cache_of_other_states_than_the_identitys_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    specs = layers_of(mamba())
    changed = [replace(s, **change) if s.name == "model.layers.0.mixer" else s for s in specs]
    with pytest.raises(IdentityError, match=r"model.layers.0.mixer is .* they must agree"):
        open_store(tmp_path, cache_of(mamba()), identity=IDENTITY.with_layers(changed))


# --- identity ----------------------------------------------------------------------------------------------------


def test_an_identity_names_states_and_reads_back() -> None:
    identity = whole_identity(mamba())
    text = identity.canonical_json().encode()
    (layer,) = (layer for layer in json.loads(text)["layers"] if layer[0] == "model.layers.0.mixer")
    assert layer == ["model.layers.0.mixer", "mamba", "bfloat16,float32", 48, 0, 0, GROUP, [[40, 3, 2], [8, 30, 4]]]
    assert tuple(LayerSpec(*layer) for layer in json.loads(text)["layers"]) == identity.layers
    assert set(fingerprints(identity_digest(text), text)) == {0, GROUP}


def test_an_identity_of_tokens_alone_is_what_it_was() -> None:
    specs = tuple(s for s in layers_of(mamba()) if not s.states)
    text = replace(IDENTITY, layers=specs).canonical_json()
    assert [len(layer) for layer in json.loads(text)["layers"]] == [7, 7]


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "full"},
        {"kv_heads": 47},
        {"k_bytes": 8},
        {"states": ((40, 3, 2), (8, 30, 8))},
        {"states": ((40, 3, 2), (8, 0, 4))},
        {"states": ((48, 3, 2), (0, 30, 4))},
        {"states": ((40, 3), (8, 30, 4))},
        {"states": ((40, 3, 2), (8, 30, True))},
        {"states": "ab"},
        {"states": 7},
    ],
)
def test_states_that_contradict_themselves_are_refused(fields: dict[str, Any]) -> None:
    good = {"kv_heads": 48, "k_bytes": 0, "v_bytes": 0, "states": (StateSpec(40, 3, 2), StateSpec(8, 30, 4))}
    assert LayerSpec("layers.0", **{"type": "mamba", "dtype": "bfloat16,float32", **good}).kv_heads == 48
    with pytest.raises(IdentityError):
        LayerSpec("layers.0", **{"type": "mamba", "dtype": "bfloat16,float32", **good, **fields})


# --- what goes astray --------------------------------------------------------------------------------------------


def tensors_of(states: States) -> list[list[torch.Tensor]]:
    return [[state.tensor for state in given] for given in states.values()]


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


ASTRAY: dict[str, Callable[[list[list[torch.Tensor]], int], None]] = {
    "neighbouring rows": lambda t, slot: exchange(t[0][0][slot, 1], t[0][0][slot, 2]),
    "rows of two ranges of a rank": lambda t, slot: exchange(t[1][0][slot, 0], t[1][0][slot, 5]),
    "elements of a row": lambda t, slot: exchange(t[1][1][slot, 2, 0], t[1][1][slot, 2, 3]),
    "layers": lambda t, slot: exchange(t[0][0][slot], t[1][0][slot]),
    "conv and recurrent": lambda t, slot: exchange(t[0][0][slot], t[0][1][slot]),
    "another slot": lambda t, slot: exchange(t[0][1][slot], t[0][1][slot - 1]),
    "a bit": lambda t, slot: t[1][1].view(torch.int32)[slot, 5, 3].bitwise_xor_(1 << 30),
    "zeros": lambda t, slot: t[1][0][slot, 4].zero_(),
}


@pytest.mark.both
@pytest.mark.parametrize("fault", ASTRAY)
def test_what_lies_in_the_wrong_place_is_refused_and_the_record_kept(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = twins(1), twins(2)
    scatter = route.HostTransfer.scatter

    def astray(transfer: Any, span: Any, staged: Any) -> None:
        scatter(transfer, span, staged)
        if 2 in span.block_ids:
            ASTRAY[fault](tensors_of(target), 2)

    with open_store(tmp_path, cache_of(source)) as store:
        store.put_blocks(HASHES[:2], [3, 0], group=GROUP)
        loader = store.attach(cache_of(target))
        monkeypatch.setattr(route.HostTransfer, "scatter", astray)
        got = loader.get_blocks(HASHES[:2], [4, 2], group=GROUP)
        monkeypatch.undo()
        assert got.verified.tolist() == [True, False]
        assert (got.rejected[1].kind, got.rejected[1].condemned) == ("content", False)
        assert "the record is intact" in got.rejected[1].detail
        assert "state rows" in got.rejected[1].detail
        assert store.put_blocks(HASHES[:2], [3, 0], group=GROUP).stored.tolist() == [False, True]
        assert loader.get_blocks(HASHES[:2], [4, 2], group=GROUP).verified.all()


@pytest.mark.both
def test_a_wrong_gather_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(twins(1))
    path = statepath.state_path(cache.state_groups[GROUP])
    gather = path.gather

    def wrong(span: Any, staging: Any) -> None:
        gather(span, staging)
        row = staging[list(span.block_ids).index(0)]
        row[:16], row[16:32] = row[16:32].copy(), row[:16].copy()

    monkeypatch.setattr(path, "gather", wrong)
    with open_store(tmp_path, cache) as store:
        put = store.put_blocks(HASHES[:2], [3, 0], group=GROUP)
        assert put.stored.tolist() == [True, False]
        assert put.failed == {1: "source_changed"}


def test_a_damaged_chunk_is_condemned_whether_its_hash_says_so_or_not(tmp_path: Path) -> None:
    with open_store(tmp_path, cache_of(mamba(1)), io="inline") as store:
        store.put_blocks(HASHES[:2], [3, 0], group=GROUP)
        raw, headers = Raw(store), [header_of(store, h) for h in HASHES[:2]]
        first = chunk_key(headers[0].sequence, 1)
        raw.put_chunk(first, flip(raw.chunk(first), 77))
        spoil(raw, store, headers[1])
        got = store.get_blocks(HASHES[:2], [1, 2], group=GROUP)
        assert [(got.rejected[i].kind, got.rejected[i].condemned) for i in range(2)] == [
            ("storage_hash", True),
            ("content", True),
        ]
        assert store.stats()["quarantine_records"] == 2


def spoil(raw: Raw, store: KVStore, header: Header) -> None:
    """Flip a bit of a record's bytes, under right storage hashes."""
    shape = store._views[GROUP].shape
    data, at = flip(raw.chunk(chunk_key(header.sequence, 1)), 77), chunk_key(header.sequence, 0)
    directory = parse_directory(memoryview(raw.chunk(at)), header, shape.plan)
    assert isinstance(directory, Directory)
    hashes = directory.hashes.copy()
    hashes[0] = xxh3_64_intdigest(data)
    table = replace(directory, hashes=hashes).encode()
    changed = replace(header, directory_hash=xxh3_64_intdigest(table))
    raw.put_chunk(chunk_key(header.sequence, 1), data)
    raw.put_chunk(at, table)
    raw.put_entry(header.key, changed.encode(header.sequence, header.written))


@pytest.mark.both
def test_a_record_whose_geometry_is_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path, cache_of(mamba())) as store:
        store.put_blocks(HASHES[:1], [0], group=GROUP)
        raw, header = Raw(store), header_of(store, HASHES[0])
        assert header.flags == STATES
        raw.put_entry(header.key, replace(header, flags=0).encode(header.sequence, header.written))
        assert store.match_prefix(HASHES[:1], group=GROUP) == 0
        rejection = store.get_blocks(HASHES[:1], [1], group=GROUP).rejected[0]
        assert (rejection.kind, rejection.condemned) == ("geometry", False)
        assert "K and V bytes" in rejection.detail
        assert "states, as (layers" in rejection.detail


# --- without an engine -------------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A closed shard with three states and a block of tokens."""
    with open_store(tmp_path, cache_of(FORMS["unknown"](1)), io="inline") as store:
        assert store.put_blocks(HASHES[:3], IDS, num_tokens=3 * TOKENS - 2, group=GROUP).stored.all()
        assert store.put_blocks(HASHES[:1], [0]).stored.all()
        return store.folder


def findings(shard: Path, stage: str) -> Iterator[tuple[str, str]]:
    """Kind of each finding, and its words."""
    found = list(check(shard, Options(stage=stage)))
    summary = found[-1]
    assert isinstance(summary, Summary)
    assert (summary.records, summary.unchecked) == (4, [])
    return ((f.kind, f.detail) for f in found if isinstance(f, Finding))


@pytest.mark.parametrize("stage", ["default", "deep"])
def test_a_clean_store_of_states_gives_no_finding(shard: Path, stage: str) -> None:
    assert list(findings(shard, stage)) == []


def test_a_clean_state_is_told_at_a_glance(shard: Path) -> None:
    with opened(shard, capacity_bytes=64 * MIB) as db, db.read() as snapshot:
        assert [intact(snapshot, key, bytes(entry)) for key, entry in db.entries()] == [True] * 4


def state_headers(db: Any) -> list[Header]:
    headers = [parse_header(bytes(entry)) for _, entry in db.entries()]
    return [header for header in headers if isinstance(header, Header) and header.flags == STATES]


def change(shard: Path, number: int, edit: Callable[[Any, Header], dict[str, Any]]) -> None:
    """Change a record of a state under right hashes of its header."""
    with opened(shard, capacity_bytes=64 * MIB) as db:
        header = state_headers(db)[number]
        changed = replace(header, **edit(db, header))
        place(db, "_index", header.key, changed.encode(header.sequence, header.written))
        recount(db)


def spoiled_bytes(hashed: bool) -> Callable[[Any, Header], dict[str, Any]]:
    """A bit of the record's bytes changed, under right hashes or not."""

    def edit(db: Any, header: Header) -> dict[str, Any]:
        shape = GroupShape(header.block_size, header.geometry, header.fingerprint, header.key[:18], header.flags)
        keys = [chunk_key(header.sequence, number) for number in (0, 1)]
        data = flip(value(db, "_payload", keys[1]), 500)
        place(db, "_payload", keys[1], data)
        if not hashed:
            return {}
        directory = parse_directory(memoryview(value(db, "_payload", keys[0])), header, shape.plan)
        assert isinstance(directory, Directory)
        table = replace(directory, hashes=np.array([xxh3_64_intdigest(data)], np.uint64)).encode()
        place(db, "_payload", keys[0], table)
        return {"directory_hash": xxh3_64_intdigest(table)}

    return edit


def other_rows(change: dict[str, int]) -> Callable[[Any, Header], dict[str, Any]]:
    """The first rows of the geometry changed."""

    def edit(db: Any, header: Header) -> dict[str, Any]:
        first, *others = decode_states(header.geometry)
        return {"geometry": encode_states([first._replace(**change), *others])}

    return edit


@pytest.mark.parametrize(
    ("edit", "stage", "expected"),
    [
        (spoiled_bytes(hashed=False), "default", {"STORAGE_HASH"}),
        (spoiled_bytes(hashed=True), "default", set()),
        (spoiled_bytes(hashed=True), "deep", {"CONTENT"}),
        (other_rows({"itemsize": 3}), "default", {"GEOMETRY"}),
        (other_rows({"elements": 2}), "default", {"LENGTH"}),
        (other_rows({"layer": 12}), "default", {"GEOMETRY"}),
        (other_rows({"layer": 3}), "default", set()),
        (other_rows({"layer": 3}), "deep", {"CONTENT", "GEOMETRY"}),
        (lambda db, header: {"flags": 0}, "default", {"GEOMETRY"}),
        (lambda db, header: {"flags": 2}, "default", {"UNKNOWN_VERSION"}),
        (lambda db, header: {"valid_tokens": TOKENS + 1}, "default", {"HEADER"}),
    ],
)
def test_damage_of_a_state_is_named(edit: Any, stage: str, expected: set[str], shard: Path) -> None:
    change(shard, 1, edit)
    assert {kind for kind, _ in findings(shard, stage)} == expected


def test_a_spoiled_state_is_named_by_its_rows(shard: Path) -> None:
    change(shard, 0, spoiled_bytes(hashed=True))
    ((_, words),) = findings(shard, "deep")
    assert "the first layer 0 state rows" in words


def test_a_state_is_shown_by_its_runs(shard: Path) -> None:
    with opened(shard, capacity_bytes=64 * MIB) as db:
        shown = {item.group: explain(db, item) for item in items(db)}
    one, tokens = shown[GROUP], shown[0]
    assert one is not None
    assert tokens is not None
    assert (one.checked.wrong, tokens.checked.wrong) == (None, None)
    assert [run.range_rows for run in one.runs if isinstance(run, StateRun)] == [0, 2, 0, 1]
    assert one.slices == 20 + 8 + 1
    assert all(chunk.right for chunk in one.chunks)
    assert len(one.chunks) == 1
    words = runs_in_words(one.runs)
    assert any(
        "rows 0 to 39 of a state that begins at 0: 3 elements of 2 bytes a row, 2 rows a slice" in w for w in words
    )
    assert any("state 1 of rank 0: 42 elements of 4 bytes" in w for w in words)


def test_a_state_is_printed_with_its_rows(shard: Path) -> None:
    with opened(shard, capacity_bytes=64 * MIB) as db:
        shown = [explain(db, item) for item in items(db)]
    text = {one.item.group: "\n".join(show_lines(one, Names())) for one in shown if one}
    assert "29 slices of a layer and a range of state rows, 8 tokens that a block stands for" in text[GROUP]
    assert "slices of a layer and a head, 8 tokens each" in text[0]
    objects = {one.item.group: show_object(one, Names()) for one in shown if one}
    assert objects[GROUP]["flags"] == STATES
    assert [run["range_rows"] for run in objects[GROUP]["runs"]] == [0, 2, 0, 1]


def taken_along(shard: Path, folder: Path) -> Path:
    """The store exported and imported elsewhere."""
    data, out = exported(shard.parent)
    report = imported(data, folder / "other", 64 * MIB)
    assert (out.records, out.damaged, report.records, report.damaged) == (4, 0, 4, 0)
    return folder / "other"


def salvaged(shard: Path, folder: Path) -> Path:
    """The shard salvaged from its raw bytes, after what leads to its records was lost."""
    with (shard / "data.mdb").open("r+b") as file:
        file.write(bytes(2 * 4096))
    assert salvage(shard, folder / "new" / shard.name).records == 4
    return folder / "new"


@pytest.mark.parametrize("move", [taken_along, salvaged])
def test_states_are_served_from_where_they_were_taken(move: Any, shard: Path, tmp_path: Path) -> None:
    target = FORMS["unknown"](2)
    with open_store(move(shard, tmp_path / "moved"), cache_of(target), io="inline") as store:
        got = store.get_blocks(HASHES[:3], OTHERS, num_tokens=3 * TOKENS - 2, group=GROUP)
        assert got.verified.all()
    assert np.array_equal(snapshot(target)[OTHERS], snapshot(FORMS["unknown"](1))[IDS])


# --- beside other groups, and other ranks ------------------------------------------------------------------------


@pytest.mark.both
def test_a_prefix_needs_every_block_of_tokens_and_the_state_at_its_end(tmp_path: Path) -> None:
    source, target = cache_of(mamba(1), seed=1), cache_of(mamba(2), seed=2)
    hashes = {0: HASHES, GROUP: HASHES}
    with open_store(tmp_path, source) as store:
        store.put_blocks(HASHES, [0, 1, 2, 3])
        assert store.match_tokens(hashes) == 0
        store.put_blocks(HASHES[2:3], [4], start=2, group=GROUP)
        assert store.match_tokens(hashes) == 3 * TOKENS
        assert store.match_prefix(hashes) == 3
        assert store.match_prefix(HASHES, group=GROUP) == 0
        blocks = {0: PrefixBlocks(HASHES[:3], [1, 2, 3]), GROUP: PrefixBlocks(HASHES[2:3], [0], 2)}
        got = store.attach(target).get_prefix(blocks)
        assert got.tokens == 3 * TOKENS
    stored, loaded = (snapshot(cast(States, cache.states)) for cache in (source, target))
    assert np.array_equal(loaded[0], stored[4])


@pytest.mark.both
def test_states_of_another_split_are_misses(tmp_path: Path) -> None:
    whole = {name: given for name, given in mamba(1).items() if name.startswith("model.layers.0")}
    identity = whole_identity(whole)
    for part in range(2):
        with open_store(tmp_path, cache_of(split(whole, 2, part)), identity=identity, rank=Rank(part, 2)) as store:
            assert store.put_blocks(HASHES[:1], [3], group=GROUP).stored.all()
    with open_store(tmp_path, cache_of(whole), identity=identity) as store:
        assert store.match_prefix(HASHES[:1], group=GROUP) == 0
        assert store.get_blocks(HASHES[:1], [1], group=GROUP).missing.all()
        assert store.put_blocks(HASHES[:1], [3], group=GROUP).stored.all()
        assert store.get_blocks(HASHES[:1], [1], group=GROUP).verified.all()
