"""Looking into a store: what an operator names is found, what is shown agrees with the engine, and nothing holds it up."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import KVStore, Rank
from kvstore.blockdb import BlockDB
from kvstore.errors import AmbiguousKey, ConfigError, StoreDamaged, StorePathError, UnknownRecord
from kvstore.explain import Explained, explain, explain_condemned, geometry_runs, numbers_in_words, runs_in_words
from kvstore.fsck.shards import shards as shard_folders
from kvstore.geometry import RUN
from kvstore.inspect import BATCH, Filter, condemned, find, find_condemned, items, now
from kvstore.inspect import opened as opened_shards
from kvstore.record import FIXED, Header, chunk_key, parse_header, record_key
from kvstore.survey import Survey, names_of, survey
from kvstore.verify import Checker, fingerprints
from tests.records import PREFIX, change, opened, put, record_of, shape_of
from tests.support import IDENTITY, SMALL, Raw, block_hashes, flip, index_key, make_cache, open_store, own_cache

COUNT = 8
HASHES = block_hashes(COUNT)
OTHER = replace(IDENTITY, model="test/other")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[BlockDB]:
    with opened(tmp_path / "tp0of1-pp0of1") as shard:
        yield shard


def fill(path: Path) -> str:
    """A store of COUNT blocks; its identity id in hexadecimal."""
    with open_store(path, make_cache()) as store:
        assert store.put_blocks(HASHES, range(COUNT)).stored.all()
        return store.identity.digest().hex()


def surveyed(path: Path) -> Survey:
    with opened_shards(shard_folders(path)) as (shard,):
        return survey(shard)


def hashes_of(db: BlockDB, chosen: Filter) -> list[bytes]:
    return [item.block_hash for item in items(db, chosen)]


# --- finding -----------------------------------------------------------------------------------------------------


def test_a_block_is_found_by_key_hash_and_any_unambiguous_start(db: BlockDB) -> None:
    shape = shape_of()
    put(db, *(record_of(shape, h) for h in HASHES))
    for block_hash in HASHES:
        text = block_hash.hex()
        shortest = next(n for n in range(1, 65) if sum(h.hex().startswith(text[:n]) for h in HASHES) == 1)
        for wanted in (text, text.upper(), text[:shortest], text[:33], (PREFIX + block_hash).hex()):
            (found,) = find([db], wanted)
            assert found.key == PREFIX + block_hash


def test_an_ambiguous_start_names_the_candidates(db: BlockDB) -> None:
    put(db, *(record_of(shape_of(), bytes([7, i]) * 4) for i in range(12)))
    with pytest.raises(AmbiguousKey, match="several blocks") as raised:
        find([db], "07")
    assert (bytes([7, 0]) * 4).hex() in str(raised.value)
    assert str(raised.value).count(",") <= 9
    with pytest.raises(AmbiguousKey):
        find([db], "0")


def test_a_whole_hash_is_meant_though_a_longer_one_begins_so(db: BlockDB) -> None:
    short, long = b"\x07" * 8, b"\x07" * 9
    put(db, record_of(shape_of(), long), record_of(shape_of(), short))
    assert [item.block_hash for item in find([db], short.hex())] == [short]
    with pytest.raises(AmbiguousKey):
        find([db], short.hex()[:-1])


def test_a_block_of_several_groups_and_identities_is_every_record_of_it(db: BlockDB) -> None:
    prefixes = [record_key(bytes([i]) * 16, group, b"") for i in (0, 9, 255) for group in (0, 1, 65535)]
    for prefix in prefixes:
        put(db, *(record_of(replace(shape_of(), prefix=prefix), h) for h in HASHES))
    found = find([db], HASHES[3].hex()[:20])
    assert [item.key for item in found] == [prefix + HASHES[3] for prefix in sorted(prefixes)]


@pytest.mark.parametrize(("text", "error"), [("", ConfigError), ("xy", ConfigError), ("0" * 165, ConfigError)])
def test_what_is_no_key_is_refused(db: BlockDB, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        find([db], text)


@pytest.mark.parametrize("text", ["00", "0" * 64, "0" * 52])
def test_what_is_not_there_is_said_to_be_unknown(db: BlockDB, text: str) -> None:
    with pytest.raises(UnknownRecord):
        find([db], text)


def test_keys_that_are_none_get_in_nobodys_way(db: BlockDB) -> None:
    put(db, *(record_of(shape_of(), h) for h in HASHES))
    with db._env.begin(write=True) as txn:
        for key in (b"\x00", b"short", PREFIX[:-1], b"\xff" * 18, b"\xff" * 30):
            txn.put(key, b"value", db=db._index)
    assert len(list(items(db))) == COUNT + 5
    assert find([db], HASHES[0].hex())[0].block_hash == HASHES[0]


# --- listing -----------------------------------------------------------------------------------------------------


def test_filters_are_what_a_plain_loop_says(db: BlockDB) -> None:
    small, large = shape_of(), shape_of((0, 3, 1, 0, 1, 64, 64))
    for i in range(30):
        prefix = record_key(bytes([i % 3, 0x3F]) * 8, i % 2, b"")
        codec = ("raw", "bf16-planes")[i % 2]
        put(db, record_of(replace((small, large)[i % 2], prefix=prefix), block_hashes(30)[i], codec=codec, seed=i))
    everything = list(items(db))
    headers = {item.key: h for item in everything if isinstance(h := item.header, Header)}
    times = sorted(header.written for header in headers.values())
    random.seed(1)
    for _ in range(60):
        chosen = Filter(
            identity=random.choice(["", "0", "013f", "00", "02", "f"]),
            group=random.choice([None, 0, 1, 2]),
            prefix=random.choice(["", everything[3].block_hash.hex()[:1], everything[4].block_hash.hex()[:3]]),
            older=random.choice([None, times[20]]),
            newer=random.choice([None, times[5]]),
            min_bytes=random.choice([0, 2000]),
            codec=random.choice([None, "raw", "bf16-planes"]),
        )
        expected = [
            item.key
            for item in everything
            if item.identity_id.hex().startswith(chosen.identity)
            and chosen.group in (None, item.group)
            and item.block_hash.hex().startswith(chosen.prefix)
            and (chosen.older is None or headers[item.key].written < chosen.older)
            and (chosen.newer is None or headers[item.key].written > chosen.newer)
            and headers[item.key].stored_length >= chosen.min_bytes
            and (chosen.codec is None or headers[item.key].codec == ["raw", "bf16-planes"].index(chosen.codec))
        ]
        assert [item.key for item in items(db, chosen)] == expected


@pytest.mark.parametrize("options", [{"identity": "g"}, {"identity": "0" * 33}, {"prefix": "0x"}, {"codec": "zip"}])
def test_a_filter_that_means_nothing_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Filter(**options)  # type: ignore[arg-type]


def test_more_than_a_snapshot_reads_is_listed_once_each_and_no_snapshot_is_held(db: BlockDB) -> None:
    record, count = record_of(shape_of(), b"\0" * 8), 2 * BATCH + 3
    made = [replace(record, header=replace(record.header, key=PREFIX + i.to_bytes(8, "big"))) for i in range(count)]
    put(db, *made)
    seen = []
    for item in items(db):
        if len(seen) in (0, BATCH, 2 * BATCH + 2):
            assert all(line.split()[-1] == "-" for line in db._env.readers().splitlines()[1:])
        seen.append(item.key)
    assert seen == [record.header.key for record in made]


def test_what_is_written_while_it_is_listed_ends_the_list_all_the_same(db: BlockDB) -> None:
    put(db, *(record_of(shape_of(), h) for h in HASHES))
    for number, _ in enumerate(items(db)):
        put(db, record_of(shape_of(), number.to_bytes(8, "big")))
    assert number < 3 * COUNT


def test_damaged_entries_are_listed_unless_a_field_of_theirs_is_asked_for(db: BlockDB) -> None:
    put(db, *(record_of(shape_of(), h) for h in HASHES))
    change(db, "_index", PREFIX + HASHES[0], lambda value: flip(value, 400))
    change(db, "_index", PREFIX + HASHES[1], lambda value: b"x" * 5000)
    assert len(hashes_of(db, Filter())) == COUNT
    assert set(hashes_of(db, Filter(min_bytes=1))) == set(HASHES[2:])
    assert set(hashes_of(db, Filter(prefix=HASHES[0].hex()))) == {HASHES[0]}


def test_paths_that_are_no_store_say_what_is_expected(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(StorePathError, match="expected the folder of a store"):
            shard_folders(path)


# --- figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_the_figures_are_those_of_stats(tmp_path: Path, codec: str) -> None:
    config = replace(SMALL, codec=codec)
    with open_store(tmp_path, make_cache(), config) as store:
        store.put_blocks(HASHES, range(COUNT))
        Raw(store).put_entry(index_key(store, HASHES[0]), b"no header")
        assert store.get_blocks(HASHES[:1], [0]).rejected
        stats = store.stats()
    found = surveyed(tmp_path)
    for name in ("records", "raw_bytes", "stored_bytes", "quarantine_records", "quarantine_bytes", "capacity_bytes"):
        assert found.figures[name] == stats[name], name
    assert found.condemned == {"header": 1}
    assert found.total.records == COUNT - 1
    assert found.settled
    # The header that was lost under the counted bytes: what nobody can count again.
    assert found.accounts_differ == ["raw_bytes", "stored_bytes"]


def test_a_full_store_adds_up(tmp_path: Path) -> None:
    identity = fill(tmp_path)
    found = surveyed(tmp_path)
    (((name, group), one),) = found.groups.items()
    assert (name.hex(), group, one.records, found.accounts_differ) == (identity, 0, COUNT, [])
    assert (one.raw_bytes, one.stored_bytes) == (found.figures["raw_bytes"], found.figures["stored_bytes"])
    assert one.codecs == {0: COUNT}
    assert 0 < one.oldest <= one.newest <= now()
    assert found.identities[name].model == IDENTITY.model
    assert found.identities[name].layers == 2


def test_an_empty_store_is_all_zeros(tmp_path: Path) -> None:
    open_store(tmp_path, make_cache()).close()
    found = surveyed(tmp_path)
    assert found.groups == {}
    assert found.total.records == found.figures["records"] == 0
    assert found.accounts_differ == []


def test_accounting_that_is_wrong_is_told(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, make_cache(), io="inline") as store:
        Raw(store).put_entry(index_key(store, HASHES[0]), None)
    assert surveyed(tmp_path).accounts_differ == ["raw_bytes", "stored_bytes"]


def test_entries_of_a_newer_version_are_counted_apart_from_damage(db: BlockDB) -> None:
    put(db, *(record_of(shape_of(), h) for h in HASHES))
    header = parse_header(next(items(db)).value)
    assert isinstance(header, Header)
    newer = replace(header, flags=2).encode(header.sequence, header.written)
    change(db, "_index", header.key, lambda value: newer)
    change(db, "_index", PREFIX + HASHES[1], lambda value: value[:-1])
    total = survey(db).total
    assert (total.unknown, total.damaged) == (1, 1)


def test_what_readers_reported_is_counted_and_stays(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, make_cache(), io="inline") as store:
        Raw(store).put_entry(index_key(store, HASHES[0]), b"no header")
    with open_store(tmp_path, make_cache(), mode="r") as reader:
        assert reader.get_blocks(HASHES[:1], [0]).rejected
    for _ in range(2):
        assert surveyed(tmp_path).reported == {"header": 1}


@pytest.mark.parametrize("text", [None, b"", b"{", b"[]", b'{"model":1}', b"\xff", b"[" * 100_000])
def test_an_identity_that_is_damaged_has_no_names_and_no_fingerprints(text: bytes | None) -> None:
    assert names_of(b"x" * 16, text).model == ""
    assert fingerprints(b"x" * 16, text) == {}


# --- a record taken apart ----------------------------------------------------------------------------------------


def explained(db: BlockDB, block_hash: bytes = HASHES[0]) -> Explained:
    found = explain(db, find([db], block_hash.hex())[0])
    assert found is not None
    return found


def test_every_field_is_the_headers(db: BlockDB) -> None:
    put(db, record_of(shape_of(), HASHES[0], position=3, valid=2, codec="bf16-planes"))
    found = explained(db)
    header = found.item.header
    assert isinstance(header, Header)
    values = {field.name: field.value for field in found.fields}
    assert len(values) == len(FIXED.unpack_from(found.item.value))
    for name in set(values) & set(vars(header)):
        assert values[name] == vars(header)[name], name
    assert (values["header_length"], values["num_runs"], values["key_length"]) == (len(found.item.value), 1, 50)
    assert found.hash_right
    assert found.slices == 6
    assert found.directory is not None
    assert all(chunk.right for chunk in (found.directory, *found.chunks))
    assert found.directory.stored + sum(chunk.stored for chunk in found.chunks) == header.stored_length
    assert found.checked.wrong is None


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("edit", [lambda value: flip(value, 3), lambda value: value[:-1], lambda value: None])
def test_a_chunk_that_is_wrong_is_shown(db: BlockDB, number: int, edit: object) -> None:
    shape = shape_of((0, 2, 1, 0, 1, 24_000, 24_000))
    put(db, record_of(shape, HASHES[0]))
    sequence = explained(db).item.header
    assert isinstance(sequence, Header)
    change(db, "_payload", chunk_key(sequence.sequence, number), edit)  # type: ignore[arg-type]
    found = explained(db)
    assert found.checked.damaged
    assert found.directory is not None
    assert [chunk.number for chunk in (found.directory, *found.chunks) if not chunk.right] == [number]


def test_a_damaged_header_is_shown_as_it_stands(db: BlockDB) -> None:
    put(db, record_of(shape_of(), HASHES[0]))
    for edit in (lambda value: flip(value, 8 * 60), lambda value: value[:50], lambda value: b""):
        change(db, "_index", PREFIX + HASHES[0], edit)
        found = explained(db)
        assert not found.hash_right
        assert found.checked.wrong is not None
        assert found.checked.wrong.kind == "header"
        assert found.chunks == []


def test_a_crafted_geometry_makes_nothing_large(db: BlockDB) -> None:
    put(db, record_of(shape_of(), HASHES[0]))
    header = explained(db).item.header
    assert isinstance(header, Header)
    run = RUN.pack(0, 65535, 1, 0, 65535, 2**32 - 8, 2**32 - 8)
    crafted = replace(header, geometry=run * 81, raw_length=2**63).encode(header.sequence, 2**64 - 1)
    change(db, "_index", header.key, lambda value: crafted)
    found = explained(db)
    assert found.chunks == []
    assert found.checked.wrong is not None
    assert survey(db).total.newest == 2**64 - 1


def test_geometry_in_words() -> None:
    runs = geometry_runs(
        RUN.pack(0, 3, 1, 4, 3, 256, 128) + RUN.pack(3, 1, 0, 0, 0, 8, 0) + RUN.pack(5, 4, 4, 0, 1, 8, 8)
    )
    assert runs_in_words(runs) == [
        "layers 0 to 2 (3), heads 4 to 7: K of 256 and V of 128 bytes a token and head",
        "layers 3 (1), heads 0: K of 8 and V of 0 bytes a token and head",
        "layers 5, 9, ... 17 (4), heads 0 to 1: K of 8 and V of 8 bytes a token and head",
    ]
    assert numbers_in_words(1, 2, 3) == "1, 4"


def test_a_record_of_other_layers_than_its_identity_has_is_told(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_store(tmp_path, make_cache(), io="inline") as store:
        raw, key = Raw(store), index_key(store, HASHES[0])
        header = parse_header(raw.entry(key) or b"", key)
        assert isinstance(header, Header)
        stranger = replace(
            header, fingerprint=header.fingerprint ^ 1, tagged_checksum=header.tagged_checksum ^ 1
        ).encode(header.sequence, header.written)
        raw.put_entry(key, stranger)
    with opened_shards(shard_folders(tmp_path)) as (shard,):
        checked = Checker(shard).check(key)
    assert checked is not None
    assert checked.wrong is not None
    assert checked.wrong.kind == "fingerprint"
    assert checked.damaged


# --- quarantine --------------------------------------------------------------------------------------------------


@pytest.fixture
def condemning(tmp_path: Path) -> Path:
    """A store with three records in quarantine: two of damaged chunks, one of a damaged header."""
    fill(tmp_path)
    with open_store(tmp_path, make_cache(), io="inline") as store:
        raw = Raw(store)
        for block_hash in HASHES[:2]:
            header = parse_header(raw.entry(index_key(store, block_hash)) or b"")
            assert isinstance(header, Header)
            chunk = chunk_key(header.sequence, 1)
            raw.put_chunk(chunk, flip(raw.chunk(chunk), 5))
        raw.put_entry(index_key(store, HASHES[2]), b"no header")
        assert len(store.get_blocks(HASHES, range(COUNT)).rejected) == 3
    return tmp_path


def test_the_quarantine_is_listed_found_and_explained(condemning: Path) -> None:
    with opened_shards(shard_folders(condemning)) as (shard,):
        found = list(condemned(shard))
        assert sorted(one.entry.kind for one in found if one.entry) == ["header", "storage_hash", "storage_hash"]
        for one in found:
            assert find_condemned([shard], str(one.number)) == [one]
            assert find_condemned([shard], one.item.block_hash.hex()) == [one]
            assert find_condemned([shard], one.item.key.hex()) == [one]
            told = explain_condemned(shard, one.item).checked
            assert one.entry is not None
            assert told.wrong is not None
            assert told.wrong.kind == one.entry.kind
        with pytest.raises(UnknownRecord):
            find_condemned([shard], HASHES[5].hex())
        with pytest.raises(ConfigError):
            find_condemned([shard], "no number")


def test_what_is_dropped_from_quarantine_frees_its_room_and_is_counted(condemning: Path) -> None:
    with opened_shards(shard_folders(condemning), writable=True) as (shard,):
        names = [one.name for one in condemned(shard)]
        used = shard.usage()["free_bytes"]
        assert shard.drop_condemned([*names[:1], b"not there"]) == 1
        assert len(list(condemned(shard))) == shard.usage()["quarantine_records"] == 2
        assert shard.drop_condemned(names) == 2
        left = shard.usage()
        assert (left["quarantine_records"], left["quarantine_bytes"]) == (0, 0)
        assert left["free_bytes"] > used
    with open_store(condemning, make_cache()) as store:
        assert store.get_blocks(HASHES[3:], range(3, COUNT), start=3).verified.all()


def test_a_quarantine_entry_that_is_damaged_can_be_dropped(condemning: Path) -> None:
    with opened_shards(shard_folders(condemning), writable=True) as (shard,):
        name = next(condemned(shard)).name
        with shard._env.begin(write=True) as txn:
            txn.put(name, b"?", db=shard.quarantine.database)
        (one,) = [one for one in condemned(shard) if one.entry is None]
        assert survey(shard).condemned["?"] == 1
        assert shard.drop_condemned([one.name]) == 1
        assert shard.usage()["quarantine_records"] == 2


# --- shards, and what LMDB cannot read ---------------------------------------------------------------------------


def test_the_shards_of_a_store_are_looked_at_together(tmp_path: Path) -> None:
    identity = _ranks(tmp_path)
    with opened_shards(shard_folders(tmp_path)) as shards:
        assert [shard.folder.name for shard in shards] == ["tp0of1-pp0of1", "tp0of2-pp0of1", "tp1of2-pp0of1"]
        found = find(shards, HASHES[0].hex())
        assert [item.shard for item in found] == [shard.folder.name for shard in shards]
        assert {item.identity_id.hex() for item in found} == {identity}


def _ranks(path: Path) -> str:
    with open_store(path, make_cache()) as store:
        store.put_blocks(HASHES, range(COUNT))
        identity = store.identity
    for rank in range(2):
        with open_store(path, own_cache(), identity=identity, rank=Rank(rank, 2)) as store:
            store.put_blocks(HASHES, range(COUNT))
    return identity.digest().hex()


def test_an_index_that_is_not_in_order_ends_and_is_told(db: BlockDB, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.inspect.BATCH", 2)
    monkeypatch.setattr("kvstore.snapshot.ReadView.entries", lambda self, start, most: [(b"b", b""), (b"a", b"")])
    with pytest.raises(StoreDamaged, match="not in order"):
        list(items(db))


def test_a_store_that_an_engine_has_open_is_read_beside_it(tmp_path: Path, store: KVStore) -> None:
    """The engine's process is this one, so the looking one is another."""
    store.put_blocks(HASHES, range(COUNT))
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvstore.fsck.shards import shards\n"
        "from kvstore.inspect import opened\nfrom kvstore.survey import survey\n"
        "with opened(shards(Path(sys.argv[1]))) as found:\n    print(survey(found[0]).total.records)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == COUNT
    assert store.get_blocks(HASHES, range(COUNT)).verified.all()
