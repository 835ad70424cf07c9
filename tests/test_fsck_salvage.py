"""The story: the pages that everything in the database hangs on are overwritten. Every intact record comes back, as it
was, into a new shard; what is not intact does not; and the old file is not touched.
"""

from __future__ import annotations

import random
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import errors
from kvstore.fsck.findings import Progress
from kvstore.fsck.pages import F_BIGDATA, PageFile, leaf_nodes
from kvstore.fsck.salvage import salvage
from kvstore.record import chunk_key
from kvstore.storefile import DATA_NAME, STORE_NAME, StoreState, parse_store
from kvstore.usage import Usage
from tests.fsck_repairs import (
    IDENTITY_ID,
    IDENTITY_JSON,
    PAGE,
    PREFIX,
    Subject,
    checked,
    contents,
    filled,
    salvage_without_roots,
    shapes,
)
from tests.records import opened, put, record_of
from tests.support import MIB, block_hashes, flip


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return filled(tmp_path_factory.mktemp("subject") / "shard", 300)


def came_back(subject: Subject, output: Path) -> int:
    """How many of the subject's records are in the new shard as they were, which is clean."""
    assert list(checked(output)) == []
    found = contents(output)
    return sum(found.get(key) == digest for key, digest in subject.records.items())


def test_a_sound_shard_is_copied_with_all_that_it_says(subject: Subject, tmp_path: Path) -> None:
    result = salvage(subject.folder, tmp_path / "new")
    assert came_back(subject, tmp_path / "new") == len(subject.records)
    assert (result.identities, result.notes) == (1, 1)
    with opened(tmp_path / "new") as db:
        assert db.identity(IDENTITY_ID) == IDENTITY_JSON
        assert len(db.note(b"eviction:lru")) == 100
        assert db.usage()["records"] == result.records
    assert (subject.folder / DATA_NAME).read_bytes() == subject.data
    new, old = (parse_store((f / STORE_NAME).read_bytes(), f) for f in (tmp_path / "new", subject.folder))
    assert new.clean
    assert new.store_id != old.store_id


def test_records_come_back_from_a_database_without_its_roots(subject: Subject, tmp_path: Path) -> None:
    data = subject.data
    for page in subject.roots().values():
        data = data[: page * PAGE] + b"\xee" * PAGE + data[(page + 1) * PAGE :]
    shard = subject.copy(tmp_path / "old", data)
    result = salvage(shard, tmp_path / "new")
    assert came_back(subject, tmp_path / "new") == len(subject.records)
    assert result.identities <= 1


@pytest.mark.parametrize("seed", range(12))
def test_records_come_back_whatever_roots_are_overwritten(subject: Subject, tmp_path: Path, seed: int) -> None:
    back, count = salvage_without_roots(subject, tmp_path / "shards", seed)
    assert back >= 0.99 * count


def test_chunks_are_found_by_their_hashes_where_no_leaf_names_them(subject: Subject, tmp_path: Path) -> None:
    """Every second node of payload's leaves that leads to a run of pages leads nowhere."""
    data = bytearray(subject.data)
    for page in range(2, len(data) // PAGE):
        body = bytes(data[page * PAGE : (page + 1) * PAGE])
        for node in leaf_nodes(body)[::2]:
            if len(node.key) == 10 and node.flags & F_BIGDATA:
                at = page * PAGE + node.offset
                data[at : at + 8] = (2**40 + page).to_bytes(8, "little")
    stages = []
    shard = subject.copy(tmp_path / "old", bytes(data))
    salvage(shard, tmp_path / "new", lambda progress: stages.append(progress))
    assert came_back(subject, tmp_path / "new") == len(subject.records)
    assert {progress.stage for progress in stages} == {"search", "match", "write"}
    assert isinstance(stages[-1], Progress)
    assert stages[-1].records >= len(subject.records)


def test_directories_are_found_by_their_hashes(tmp_path: Path) -> None:
    """A directory of more than half a page lies on pages of its own, as chunks do; no leaf of payload is left."""
    shape = shapes()[0]
    wide = type(shape)(
        1, np.array([0], "<u4").tobytes() + bytes.fromhex("9001010000000000") + (8).to_bytes(4, "little") * 2, 7, PREFIX
    )
    hashes = block_hashes(5)
    with opened(tmp_path / "old") as db:
        put(db, *[record_of(wide, h, seed=n) for n, h in enumerate(hashes)])
    sound = contents(tmp_path / "old")
    data = bytearray((tmp_path / "old" / DATA_NAME).read_bytes())
    with PageFile(tmp_path / "old" / DATA_NAME) as file:
        for number, _ in file.walk(file.databases(file.metas[0])[b"payload"].root):
            data[number * PAGE : (number + 1) * PAGE] = bytes(PAGE)
    (tmp_path / "old" / DATA_NAME).write_bytes(data)
    result = salvage(tmp_path / "old", tmp_path / "new")
    assert contents(tmp_path / "new") == sound
    assert result.records == 5


def test_the_newest_intact_record_of_a_key_wins(tmp_path: Path) -> None:
    shape, (block_hash, other) = shapes()[1], block_hashes(2)
    with opened(tmp_path / "old", capacity_bytes=64 * MIB) as db:
        for seed in range(3):
            put(db, record_of(shape, block_hash, seed=seed))
        put(db, record_of(shape, other, seed=7))
    newest = contents(tmp_path / "old")
    salvage(tmp_path / "old", tmp_path / "same")
    assert contents(tmp_path / "same") == newest
    with opened(tmp_path / "old") as db, db.read() as snapshot:
        entry = snapshot.header(PREFIX + block_hash)
        assert entry is not None
        chunk = bytes(snapshot.chunk(int.from_bytes(entry[40:48], "little"), 1) or b"")
    data = (tmp_path / "old" / DATA_NAME).read_bytes()
    assert data.count(chunk) == 1
    (tmp_path / "old" / DATA_NAME).write_bytes(data.replace(chunk, flip(chunk, 99)))
    result = salvage(tmp_path / "old", tmp_path / "older")
    found = contents(tmp_path / "older")
    assert found[PREFIX + other] == newest[PREFIX + other]
    assert found.get(PREFIX + block_hash) != newest[PREFIX + block_hash]
    # LMDB leaves old memory in the rest of a page: headers of other stores may be found there, and fail.
    assert (PREFIX + block_hash in found) == (result.older == 1)
    assert PREFIX + block_hash in found or result.failed


def test_what_is_damaged_does_not_come_back(subject: Subject, tmp_path: Path) -> None:
    """Half of the pages have a flipped bit: nothing comes back that is not as it was, or as it was before."""
    data, chance = bytearray(subject.data), random.Random(5)
    for page in range(2, len(data) // PAGE, 2):
        data[page * PAGE + chance.randrange(PAGE)] ^= 1 << chance.randrange(8)
    result = salvage(subject.copy(tmp_path / "old", bytes(data)), tmp_path / "new")
    assert list(checked(tmp_path / "new")) == []
    assert 0 < result.records < len(subject.records)
    assert result.failed.total()


def test_sequence_numbers_go_on_after_the_salvaged(subject: Subject, tmp_path: Path) -> None:
    salvage(subject.folder, tmp_path / "new")
    with opened(tmp_path / "new", capacity_bytes=256 * MIB) as db:
        last = Usage.parse(db.note(b"usage")).last_sequence
        put(db, record_of(shapes()[0], b"new" * 8))
        assert Usage.parse(db.note(b"usage")).last_sequence > last > 0


@pytest.mark.parametrize("content", ["random", "nothing", "zeros", "magic", "heads"])
def test_a_file_of_anything_is_survived(tmp_path: Path, content: str) -> None:
    chance = random.Random(content)
    head = bytes(8) + b"\0\0\2\0" + b"\xf0\x0f\xff\x0f"
    data = {
        "random": chance.randbytes(MIB),
        "nothing": b"",
        "zeros": bytes(MIB),
        "magic": b"\x89KVB\x01\x00\x70\x00" * (MIB // 8),
        "heads": (head + b"\x20\x00" * 2040)[:PAGE] * 256,
    }[content]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / DATA_NAME).write_bytes(data)
    result = salvage(tmp_path / "old", tmp_path / "new")
    assert result.records == 0
    assert list(checked(tmp_path / "new")) == []


def test_a_salvage_says_what_it_needs(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.StorePathError, match="No such file"):
        salvage(tmp_path / "missing", tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(errors.StorePathError, match="not empty"):
        salvage(subject.folder, tmp_path / "full")
    monkeypatch.setattr("kvstore.fsck.salvage.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 4096))
    with pytest.raises(errors.StorePathError, match="are needed, 4096 are free"):
        salvage(subject.folder, tmp_path / "new")


def test_a_newer_version_is_not_salvaged(subject: Subject, tmp_path: Path) -> None:
    shard = subject.copy(tmp_path / "old")
    slot = bytearray(StoreState(bytes(16), bytes(16), True, 0).encode())
    slot[8] = 2
    slot[16:24] = xxh3_64_intdigest(bytes(slot[:16] + slot[24:])).to_bytes(8, "little")
    (shard / STORE_NAME).write_bytes(slot)
    with pytest.raises(errors.UnsupportedFormat):
        salvage(shard, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_records_of_an_unknown_codec_are_kept_by_their_hashes(tmp_path: Path) -> None:
    from dataclasses import replace

    record = record_of(shapes()[1], block_hashes(1)[0])
    with opened(tmp_path / "old") as db:
        put(db, replace(record, header=replace(record.header, codec=77)))
    result = salvage(tmp_path / "old", tmp_path / "new")
    assert result.records == 1
    with opened(tmp_path / "new") as db, db.read() as snapshot:
        entry = snapshot.header(record.header.key)
        assert entry is not None
        assert entry[16] == 77
        assert snapshot.chunk(int.from_bytes(entry[40:48], "little"), 1) == record.chunks[0]


def test_memory_is_bounded_by_records_not_by_the_file(tmp_path: Path) -> None:
    shape = shapes()[2]
    with opened(tmp_path / "old", capacity_bytes=128 * MIB) as db:
        for n, block_hash in enumerate(block_hashes(150)):
            put(db, record_of(shape, block_hash, seed=n % 3))
    size = (tmp_path / "old" / DATA_NAME).stat().st_size
    assert size > 75 * MIB
    tracemalloc.start()
    result = salvage(tmp_path / "old", tmp_path / "new")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.records == 150
    assert peak < 45 * MIB


def test_headers_that_ask_for_the_same_sequence_number_do_not_mix(tmp_path: Path) -> None:
    """Two keys, one number: a store that was restored beside its own copy. One of them comes back whole."""
    shape, hashes = shapes()[1], block_hashes(2)
    with opened(tmp_path / "old") as db:
        put(db, record_of(shape, hashes[0], seed=1))
        record = record_of(shape, hashes[1], seed=1)
        with db.read() as snapshot:
            first = snapshot.header(PREFIX + hashes[0])
        assert first is not None
        sequence = int.from_bytes(first[40:48], "little")
        with db._env.begin(write=True) as txn:
            txn.put(record.header.key, record.header.encode(sequence, 1), db=db._index)
            assert txn.get(chunk_key(sequence, 0), db=db._payload) is not None
    result = salvage(tmp_path / "old", tmp_path / "new")
    assert result.records == 1
    assert list(checked(tmp_path / "new")) == []
