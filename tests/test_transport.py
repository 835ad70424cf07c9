"""Records taken from store to store: they arrive as they were, and nothing that changed on the way is written."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore import CacheIdentity, Rank
from kvstore.blockdb import BlockDB
from kvstore.container import (
    FRAME,
    FRAME_MAGIC,
    HEAD,
    NO_RANK,
    RECORD,
    RECORD_HEAD,
    SHARD,
    Reader,
    Writer,
    parse_record,
)
from kvstore.container import IDENTITY as IDENTITY_FRAME
from kvstore.errors import ConfigError, ExportDamaged, IdentityError, KVStoreError, StorePathError, UnsupportedFormat
from kvstore.fsck.shards import shards as shard_folders
from kvstore.inspect import Filter, items
from kvstore.inspect import opened as opened_shards
from kvstore.record import Header, chunk_key, parse_header
from kvstore.snapshot import ReadView
from kvstore.transport import Report, bring, destinations, export, ranks_of
from tests.records import PREFIX, change, opened, put, record_of, shape_of
from tests.support import (
    IDENTITY,
    MIB,
    SMALL,
    block_hashes,
    canonical,
    flip,
    make_cache,
    open_store,
    own_cache,
    report_campaign,
)

COUNT = 8
HASHES = block_hashes(COUNT)
ROOM = 16 * MIB
WHOLE = Rank()
ALL = Filter()


def fill(path: Path, codec: str = "raw", count: int = COUNT, rank: Rank = WHOLE, identity: Any = None) -> CacheIdentity:
    config = replace(SMALL, codec=codec)
    with open_store(path, own_cache(blocks=count), config, rank=rank, identity=identity or IDENTITY) as store:
        assert store.put_blocks(block_hashes(count), range(count), num_tokens=count * 4 - 1).stored.all()
        return store.identity


def exported(path: Path, chosen: Filter = ALL, limit: int | None = None) -> tuple[bytes, Report]:
    file = io.BytesIO()
    with opened_shards(shard_folders(path)) as shards:
        report = export(shards, file, chosen, limit)
    return file.getvalue(), report


def imported(data: bytes, path: Path, room: int = ROOM, replaced: bool = False) -> Report:
    reader = Reader(io.BytesIO(data))
    with opened_shards(destinations(reader.head, path), True, room) as shards:
        return bring(reader, shards, replaced)


def contents(path: Path) -> dict[tuple[str, bytes], tuple[Header, list[bytes]]]:
    """Every record of a store by shard and key: its header without what a writer gives anew, and its chunks."""
    found = {}
    with opened_shards(shard_folders(path)) as shards:
        for shard in shards:
            for item in items(shard):
                header = item.header
                assert isinstance(header, Header)
                with shard.read() as snapshot:
                    found[item.shard, item.key] = (replace(header, sequence=0, written=0), chunks_of(snapshot, header))
    return found


def chunks_of(snapshot: ReadView, header: Header) -> list[bytes]:
    chunks: list[bytes] = []
    while (chunk := snapshot.chunk(header.sequence, len(chunks))) is not None:
        chunks.append(bytes(chunk))
    return chunks


# --- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
@pytest.mark.parametrize("room", [MIB, 4 * MIB, 64 * MIB])
def test_records_arrive_as_they_were_stored_and_are_served(tmp_path: Path, codec: str, room: int) -> None:
    identity = fill(tmp_path / "a", codec)
    data, out = exported(tmp_path / "a")
    report = imported(data, tmp_path / "b", room)
    assert (out.records, report.records, out.nbytes) == (COUNT, COUNT, report.nbytes)
    assert (out.damaged, report.damaged, report.kept, report.problem) == (0, 0, 0, None)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    cache, other = make_cache(), replace(SMALL, codec="raw" if codec != "raw" else "bf16-planes")
    blank = make_cache(seed=5)
    with open_store(tmp_path / "b", blank, other) as store:
        assert store.identity == identity
        assert store.get_blocks(HASHES, range(COUNT), num_tokens=COUNT * 4 - 1).verified.all()
    assert canonical(blank, range(COUNT - 1)).tobytes() == canonical(cache, range(COUNT - 1)).tobytes()


def test_every_rank_arrives_in_its_own_shard(tmp_path: Path) -> None:
    identity = fill(tmp_path / "a")
    for rank in (Rank(0, 2), Rank(1, 2), Rank(0, 2, 1, 2)):
        fill(tmp_path / "a", "bf16-planes", rank.tp_rank + 2, rank, identity)
    data, _ = exported(tmp_path / "a")
    assert imported(data, tmp_path / "b").records == COUNT + 2 + 3 + 2
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert [folder.name for folder in shard_folders(tmp_path / "b")] == [f.name for f in shard_folders(tmp_path / "a")]


def test_what_is_written_is_new_in_the_importing_shard(tmp_path: Path) -> None:
    """Sequence numbers that were used already may never come again, whatever clock the exporting machine had."""
    fill(tmp_path / "a")
    data, _ = exported(tmp_path / "a")
    fill(tmp_path / "b", count=2)
    before = sequences(tmp_path / "b")
    imported(data, tmp_path / "b", 64 * MIB)
    after = sequences(tmp_path / "b")
    assert before < after
    assert min(after - before) > max(before)
    assert not after & sequences(tmp_path / "a")


def sequences(path: Path) -> set[int]:
    with opened_shards(shard_folders(path)) as (shard,):
        return {item.header.sequence for item in items(shard) if isinstance(item.header, Header)}


def test_filters_and_a_limit_choose_what_is_exported(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    fill(tmp_path / "a", identity=replace(IDENTITY, model="other"), count=3)
    one = HASHES[3].hex()
    for chosen, limit, expected in (
        (Filter(prefix=one), None, 1),
        (Filter(), 4, 4),
        (Filter(), 0, 0),
        (Filter(codec="bf16-planes"), None, 0),
        (Filter(group=0), None, COUNT + 3),
    ):
        data, report = exported(tmp_path / "a", chosen, limit)
        assert report.records == expected
        frames = list(Reader(io.BytesIO(data)).frames())
        assert sum(frame.kind == RECORD for frame in frames) == expected


def test_an_empty_store_is_exported_and_imported(tmp_path: Path) -> None:
    open_store(tmp_path / "a", make_cache()).close()
    data, report = exported(tmp_path / "a")
    assert report.records == 0
    assert imported(data, tmp_path / "b").records == 0
    assert contents(tmp_path / "b") == {}


def test_what_the_store_has_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "a", "bf16-planes")
    fill(tmp_path / "b", count=3)
    data, _ = exported(tmp_path / "a")
    had = contents(tmp_path / "b")
    report = imported(data, tmp_path / "b", 64 * MIB)
    # The third block of the shorter request lacks a token: another record, under the same key.
    assert (report.records, report.kept) == (COUNT - 3, 3)
    assert had.items() <= contents(tmp_path / "b").items()
    report = imported(data, tmp_path / "b", 64 * MIB, replaced=True)
    assert (report.records, report.kept) == (COUNT, 0)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    with opened_shards(shard_folders(tmp_path / "b")) as (shard,):
        figures = shard.usage()
        assert figures["records"] == COUNT
        stored = [item.header.stored_length for item in items(shard) if isinstance(item.header, Header)]
        assert figures["stored_bytes"] == sum(stored)


def test_an_entry_that_is_damaged_does_not_count_as_one_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "b" / "tp0of1-pp0of1"
    fill(tmp_path / "a")
    data, _ = exported(tmp_path / "a")
    imported(data, tmp_path / "b")
    key = next(iter(contents(tmp_path / "b")))[1]
    with opened(folder) as db:
        change(db, "_index", key, lambda value: flip(value, 300))
    report = imported(data, tmp_path / "b")
    assert (report.records, report.kept) == (1, COUNT - 1)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


# --- damage in the store -----------------------------------------------------------------------------------------


def test_damaged_records_are_left_out_and_told(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    with opened(tmp_path / "a" / "tp0of1-pp0of1") as db:
        found = list(items(db))
        change(db, "_index", found[0].key, lambda value: flip(value, 300))
        for item, chunk in ((found[1], 0), (found[2], 1)):
            assert isinstance(item.header, Header)
            change(db, "_payload", chunk_key(item.header.sequence, chunk), lambda value: flip(value, 9))
        header = found[3].header
        assert isinstance(header, Header)
        newer = replace(header, flags=2).encode(header.sequence, header.written)
        change(db, "_index", found[3].key, lambda value: newer)
    data, report = exported(tmp_path / "a")
    assert (report.records, report.damaged, dict(report.left)) == (
        COUNT - 4,
        3,
        {"header": 1, "storage_hash": 2, "version": 1},
    )
    assert [key for key, _ in report.told] == [item.key for item in found[:4]]
    assert imported(data, tmp_path / "b").records == COUNT - 4


def test_damage_that_a_second_read_does_not_find_is_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "a")
    chunk, reads = ReadView.chunk, [0]

    def flaky(self: ReadView, sequence: int, number: int) -> memoryview | None:
        reads[0] += 1
        found = chunk(self, sequence, number)
        return memoryview(flip(bytes(found), 1)) if reads[0] == 2 and found else found

    monkeypatch.setattr(ReadView, "chunk", flaky)
    _, report = exported(tmp_path / "a")
    assert (report.records, report.transient, report.damaged) == (COUNT, 1, 0)


def test_what_is_audited_is_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that change between two looks (a bad memory module) cannot slip between audit and file."""
    fill(tmp_path / "a")
    expected, chunk, seen = contents(tmp_path / "a"), ReadView.chunk, set[tuple[int, int]]()

    def once(self: ReadView, sequence: int, number: int) -> memoryview | None:
        found = chunk(self, sequence, number)
        again = (sequence, number) in seen
        seen.add((sequence, number))
        return memoryview(flip(bytes(found), 1)) if again and found else found

    with monkeypatch.context() as patch:
        patch.setattr(ReadView, "chunk", once)
        data, report = exported(tmp_path / "a")
    assert report.records == COUNT
    imported(data, tmp_path / "b")
    assert contents(tmp_path / "b") == expected


# --- damage in the file ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small store, and its records in a file."""
    path = tmp_path_factory.mktemp("exports")
    fill(path / "a", "bf16-planes", 3)
    return path / "a", exported(path / "a")[0]


def test_every_flipped_bit_is_found_and_nothing_else_is_written(exports: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = exports
    expected, random_ = contents(path), random.Random(4)
    heads = [frame.offset for frame in Reader(io.BytesIO(data)).frames()]
    exact = {at + i for at in (0, *heads) for i in range(HEAD.size + SHARD.size)}
    places = sorted({*exact, *range(len(data) - 60, len(data)), *range(0, len(data), 11)})
    found = 0
    with opened(tmp_path / "b" / "tp0of1-pp0of1") as db:
        for at in places:
            if at >= len(data):
                continue
            damaged = flip(data, 8 * at + random_.randrange(8))
            try:
                report = bring(Reader(io.BytesIO(damaged)), [db], replace=True)
            except KVStoreError:
                found += 1
                continue
            found += bool(report.problem or report.damaged or report.left)
        for item in items(db):
            header = item.header
            assert isinstance(header, Header)
            with db.read() as snapshot:
                chunks = chunks_of(snapshot, header)
            assert (replace(header, sequence=0, written=0), chunks) == expected["tp0of1-pp0of1", item.key]
    tried = sum(at < len(data) for at in places)
    report_campaign("export_bits", tried, found, 0, "4")
    assert found == tried


def test_a_file_that_ends_early_is_found_and_what_came_before_is_taken(
    exports: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, data = exports
    expected = contents(path)
    for number, end in enumerate([*range(0, len(data), 97), *range(len(data) - 60, len(data))]):
        try:
            report = imported(data[:end], tmp_path / str(number))
        except ExportDamaged:
            assert end < HEAD.size + SHARD.size
            continue
        assert isinstance(report.problem, ExportDamaged)
        assert "cut short" in str(report.problem)
        there = contents(tmp_path / str(number))
        assert there.items() <= expected.items()
        assert len(there) == report.records


def test_frames_that_are_exchanged_doubled_or_dropped_are_found(exports: tuple[Path, bytes], tmp_path: Path) -> None:
    data = exports[1]
    frames = list(Reader(io.BytesIO(data)).frames())
    starts = [frame.offset for frame in frames]
    ends = [frame.offset + frame.nbytes for frame in frames]
    parts = [data[a:b] for a, b in zip(starts, ends, strict=True)]
    head, end = data[: starts[0]], data[ends[-1] :]
    for number, order in enumerate(([0, 2, 1, 3], [0, 1, 1, 2, 3], [0, 1, 3], [1, 2, 3], [])):
        changed = head + b"".join(parts[i] for i in order) + end
        assert isinstance(imported(changed, tmp_path / str(number)).problem, ExportDamaged)
    assert isinstance(imported(data + b"\0", tmp_path / "more").problem, ExportDamaged)
    other, _ = exported(exports[0])
    spliced = data[: starts[2]] + other[starts[2] :]
    assert isinstance(imported(spliced, tmp_path / "spliced").problem, ExportDamaged)


@pytest.mark.parametrize("data", [b"", b"\x89kvexprt", b"x" * 4096, b"\0" * 100, b"\x89kvstore" + b"\0" * 100])
def test_what_is_no_export_is_refused(data: bytes) -> None:
    with pytest.raises(ExportDamaged):
        Reader(io.BytesIO(data))


def test_another_version_is_refused(exports: tuple[Path, bytes]) -> None:
    data = bytearray(exports[1])
    data[8] = 2
    length = int.from_bytes(data[12:16], "little")
    data[16:24] = xxh3_64_intdigest(bytes(data[:16] + data[24:length])).to_bytes(8, "little")
    with pytest.raises(UnsupportedFormat, match="version 2"):
        Reader(io.BytesIO(bytes(data)))


class Crafting(Writer):
    """Writes frames that no export would."""

    def frame(self, kind: int, parts: Sequence[bytes], shard: int = 0) -> None:
        self._frame(kind, shard, parts)


def crafted(tmp_path: Path, kind: int, *parts: bytes) -> Report:
    file = io.BytesIO()
    writer = Crafting(file, [(0, 1, 0, 1)], 0)
    writer.frame(kind, parts)
    writer.end()
    return imported(file.getvalue(), tmp_path / "b")


def record_parts(change_header: dict[str, Any] | None = None, more: Sequence[bytes] = ()) -> list[bytes]:
    record = record_of(shape_of(), HASHES[0])
    header = replace(record.header, **(change_header or {})).encode(5, 5)
    chunks = [record.directory, *map(bytes, record.chunks), *more]
    lengths = b"".join(len(chunk).to_bytes(4, "little") for chunk in chunks)
    return [RECORD_HEAD.pack(len(header), len(chunks)), lengths, header, *chunks]


def test_a_crafted_record_is_taken_where_it_is_one(tmp_path: Path) -> None:
    report = crafted(tmp_path, RECORD, *record_parts())
    assert (report.records, report.damaged, report.problem) == (1, 0, None)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\0" * 8],
        [b"\xff" * 8],
        [RECORD_HEAD.pack(100, 2**16), b"\xff" * 2**18],
        record_parts({"tagged_checksum": 1}),
        record_parts({"raw_length": 2**40}),
        record_parts({"stored_length": 8}),
        record_parts({"block_size": 2**31}),
        record_parts({"fingerprint": 0}),
        record_parts({"key": PREFIX + HASHES[1]}),
        record_parts({"codec": 1}, [b"x"]),
        record_parts(None, [b""]),
        record_parts(None, [b"more"]),
        [*record_parts(), b"x"],
        record_parts()[:-1],
    ],
)
def test_a_crafted_record_that_is_none_is_refused(tmp_path: Path, parts: list[bytes]) -> None:
    report = crafted(tmp_path, RECORD, *parts)
    assert (report.records, report.damaged, report.problem) == (0, 1, None)
    assert contents(tmp_path / "b") == {}


@pytest.mark.parametrize(("change_header", "left"), [({"codec": 77}, "version"), ({"flags": 4}, "version")])
def test_a_record_of_a_newer_version_is_left_out_and_is_no_damage(
    tmp_path: Path, change_header: dict[str, Any], left: str
) -> None:
    report = crafted(tmp_path, RECORD, *record_parts(change_header))
    assert (report.records, report.damaged, dict(report.left)) == (0, 0, {left: 1})


def test_a_frame_of_a_kind_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    report = crafted(tmp_path, 9, b"whatever")
    assert (report.damaged, dict(report.left), report.problem) == (0, {"version": 1}, None)


def test_an_identity_that_is_not_its_ids_is_refused(tmp_path: Path) -> None:
    assert crafted(tmp_path, IDENTITY_FRAME, b"i" * 16, b"{}").damaged == 1
    assert crafted(tmp_path, IDENTITY_FRAME, b"short").damaged == 1


def test_a_frame_of_a_length_that_none_has_asks_for_no_memory() -> None:
    file = io.BytesIO()
    writer = Writer(file, [NO_RANK], 0)
    fixed = FRAME.pack(FRAME_MAGIC, RECORD, 0, 0, 2**62, 0, 0)[:-8]
    hashed = xxh3_64_intdigest(writer._export_id + fixed).to_bytes(8, "little")
    file.write(fixed + hashed)
    with pytest.raises(ExportDamaged, match="with 4611686018427387904 bytes"):
        list(Reader(io.BytesIO(file.getvalue())).frames())


def test_lengths_of_a_record_are_bounded_by_its_body() -> None:
    assert parse_record(RECORD_HEAD.pack(0, 1) + b"\x05\0\0\0" + b"12345") == (b"", [memoryview(b"12345")])
    for head, body in (
        ((0, 1), b"\x05\0\0\0" + b"1234"),
        ((1901, 1), b"\0" * 4000),
        ((0, 0), b""),
        ((0, 2**31), b"\0" * 9),
    ):
        assert parse_record(RECORD_HEAD.pack(*head) + body) is None


# --- where records go --------------------------------------------------------------------------------------------


def test_one_shards_records_go_into_any_folder_that_is_a_shard_of_that_rank(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    data, _ = exported(tmp_path / "a" / "tp0of1-pp0of1")
    (tmp_path / "a" / "tp0of1-pp0of1").rename(tmp_path / "copy")
    unnamed, _ = exported(tmp_path / "copy")
    fill(tmp_path / "b", count=1)
    fill(tmp_path / "c", rank=Rank(1, 2), count=1, identity=fill(tmp_path / "d"))
    assert imported(unnamed, tmp_path / "b" / "tp0of1-pp0of1", 64 * MIB).records == COUNT - 1
    with pytest.raises(ConfigError, match="another rank's shard"):
        imported(data, tmp_path / "c" / "tp1of2-pp0of1")
    with pytest.raises(ConfigError, match="does not say of which rank"):
        imported(unnamed, tmp_path / "b")


def test_several_shards_need_a_store(tmp_path: Path) -> None:
    identity = fill(tmp_path / "a")
    fill(tmp_path / "a", rank=Rank(1, 2), identity=identity)
    data, _ = exported(tmp_path / "a")
    with pytest.raises(ConfigError, match="give the store's folder"):
        imported(data, tmp_path / "a" / "tp0of1-pp0of1")


@pytest.mark.parametrize(
    "name", ["tp0of1-pp0of1", "tp3of4-pp1of2", "tp4of4-pp0of1", "tp00of1-pp0of1", "copy", "tp0of0-pp0of1"]
)
def test_a_folders_name_says_which_rank_it_is(tmp_path: Path, name: str) -> None:
    found = ranks_of(tmp_path / name)
    assert found == NO_RANK or Rank(*found).folder == name.replace("00", "0")


def test_another_identity_under_the_same_id_is_refused(tmp_path: Path) -> None:
    identity = fill(tmp_path / "a")
    data, _ = exported(tmp_path / "a")
    fill(tmp_path / "b", count=1)
    with opened(tmp_path / "b" / "tp0of1-pp0of1") as db, db._env.begin(write=True) as txn:
        txn.put(b"identity:" + identity.digest(), b"{}", db=db._meta)
    report = imported(data, tmp_path / "b", 64 * MIB)
    assert isinstance(report.problem, IdentityError)
    assert report.records == 0


# --- room --------------------------------------------------------------------------------------------------------


def test_a_store_that_is_full_keeps_what_found_room_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "tp0of1-pp0of1") as db:
        shape = shape_of((0, 4, 1, 0, 7, 256, 256), block_size=16)
        put(db, *(record_of(shape, h) for h in block_hashes(40)))
    data, out = exported(tmp_path)
    assert out.nbytes > 4 * MIB
    report = imported(data, tmp_path / "b", 2 * MIB)
    assert isinstance(report.problem, StorePathError)
    assert "full" in str(report.problem)
    assert 2 <= report.records < 40
    assert len(contents(tmp_path / "b")) == report.records
    assert (tmp_path / "b" / "tp0of1-pp0of1" / "data.mdb").stat().st_size <= 2 * MIB
    assert imported(data, tmp_path / "b", 16 * MIB).records == 40 - report.records
    assert contents(tmp_path / "b") == contents(tmp_path / "tp0of1-pp0of1")


def test_memory_is_bounded_by_a_batch_and_a_record(tmp_path: Path) -> None:
    """64 MiB go through a process that may not have 64 MiB more than it starts with."""
    with opened(tmp_path / "tp0of1-pp0of1", capacity_bytes=256 * MIB) as db:
        shape = shape_of((0, 8, 1, 0, 7, 1024, 1024), block_size=16)
        for start in range(0, 32, 8):
            put(db, *(record_of(shape, h, seed=1) for h in block_hashes(32)[start : start + 8]))
    code = (
        "import io, os, sys\nfrom pathlib import Path\nfrom kvstore.fsck.shards import shards\n"
        "from kvstore.inspect import Filter, opened\nfrom kvstore.transport import bring, destinations, export\n"
        "from kvstore.container import Reader\n"
        "a, b, file = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])\n"
        "def anonymous():\n"
        "    lines = (line.split() for line in open('/proc/self/status'))\n"
        "    return next(int(line[1]) for line in lines if line[0] == 'RssAnon:') // 1024\n"
        "most = 0\n"
        "def tick(nbytes):\n    global most\n    most = max(most, anonymous())\n"
        "first = anonymous()\n"
        "with opened(shards(a)) as found, file.open('wb') as out:\n"
        "    n = export(found, out, Filter(), None, tick).records\n"
        "half = most - first\nmost = 0\n"
        "with file.open('rb') as source:\n    reader = Reader(source)\n"
        "    with opened(destinations(reader.head, b), True, 256 * 2**20) as found:\n"
        "        m = bring(reader, found, False, tick).records\n"
        "print(n, m, half, most - first)\n"
    )
    arguments = [str(tmp_path / "tp0of1-pp0of1"), str(tmp_path / "b"), str(tmp_path / "file")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    exported_, imported_, out, into = map(int, done.stdout.split())
    assert (exported_, imported_) == (32, 32)
    assert (tmp_path / "file").stat().st_size > 60 * MIB
    # Compiled loops and LMDB's dirty pages besides.
    assert out < 48
    assert into < 112


# --- beside an engine, and cut off -------------------------------------------------------------------------------


IMPORT = (
    "import sys\nfrom pathlib import Path\nfrom kvstore.container import Reader\nfrom kvstore.inspect import opened\n"
    "from kvstore.transport import bring, destinations\n"
    "with open(sys.argv[1], 'rb') as source:\n    reader = Reader(source)\n"
    "    with opened(destinations(reader.head, Path(sys.argv[2])), True, 64 * 2**20) as shards:\n"
    "        bring(reader, shards, True, lambda nbytes: print('taken', flush=True))\n"
)


def test_a_killed_import_leaves_a_sound_store(tmp_path: Path) -> None:
    with opened(tmp_path / "tp0of1-pp0of1", capacity_bytes=64 * MIB) as db:
        shape = shape_of((0, 4, 1, 0, 7, 256, 256), block_size=16)
        put(db, *(record_of(shape, h) for h in block_hashes(60)))
    data, _ = exported(tmp_path)
    (tmp_path / "file").write_bytes(data)
    expected, random_, partial = contents(tmp_path / "tp0of1-pp0of1"), random.Random(7), 0
    for number in range(8):
        target = tmp_path / str(number)
        arguments = [sys.executable, "-c", IMPORT, str(tmp_path / "file"), str(target)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(random_.randrange(10, 55)):
                process.stdout.readline()
            time.sleep(random_.uniform(0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
        there = contents(target)
        assert there.items() <= expected.items()
        partial += 0 < len(there) < 60
        with opened_shards(shard_folders(target)) as (shard,):
            figures = shard.usage()
            headers = [item.header for item in items(shard)]
            assert figures["records"] == len(headers)
            assert figures["stored_bytes"] == sum(h.stored_length for h in headers if isinstance(h, Header))
    assert partial
    assert imported(data, tmp_path / "0", 64 * MIB).problem is None
    assert contents(tmp_path / "0") == expected


def test_records_that_go_while_they_are_exported_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "a")
    with opened(tmp_path / "a" / "tp0of1-pp0of1") as db:
        keys = [item.key for item in items(db)]

        def going(self: BlockDB, identity_id: bytes) -> None:
            self.drop(keys[-1])

        monkeypatch.setattr(BlockDB, "identity", going)
        report = export([db], io.BytesIO(), Filter())
    assert (report.records, report.gone) == (COUNT - 1, 1)


def test_parse_header_of_what_came_out_is_that_of_what_went_in(exports: tuple[Path, bytes]) -> None:
    path, data = exports
    keys = [key for _, key in contents(path)]
    bodies = [f.body for f in Reader(io.BytesIO(data)).frames() if f.kind == RECORD]
    found = [parse_record(body) for body in bodies if body is not None]
    assert [h.key for p in found if p and isinstance(h := parse_header(p[0]), Header)] == keys
