"""The story: a record is checked where it lies, with no engine and no cache: every kind of damage is found, and an intact
record is not blamed. Headers may be crafted to ask for the moon; looking at them stays cheap. And a writer that was told by
a reader of a damaged record looks for itself, and condemns what it finds and nothing else.
"""

from __future__ import annotations

import logging
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore.audit import audit, follow_reports
from kvstore.blockdb import BlockDB, NewRecord
from kvstore.geometry import RUN
from kvstore.record import FIXED, Directory, Header, chunk_key, parse_directory, parse_header
from kvstore.reports import Report, Reports, sequence_of
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.snapshot import ReadView
from tests.records import change, opened, put, record_of, shape_of
from tests.support import MIB, block_hashes, flip

HASHES = block_hashes(4)
SHAPE = shape_of()
WIDE = shape_of((0, 2, 3, 5, 1, 256, 256), (7, 1, 0, 0, 0, 64, 0), block_size=600)
"""Slices of 307,200 bytes, each in two chunks, and one of 38,400."""


@pytest.fixture
def db(tmp_path: Path) -> Iterator[BlockDB]:
    with opened(tmp_path / "shard", capacity_bytes=64 * MIB) as db:
        yield db


def key_of(block_hash: bytes = HASHES[0]) -> bytes:
    return SHAPE.prefix + block_hash


def look(db: BlockDB, block_hash: bytes = HASHES[0]) -> Rejection | None:
    """What an audit finds under a key."""
    with db.read() as snapshot:
        value = snapshot.header(key_of(block_hash))
        assert value is not None
        return audit(snapshot, key_of(block_hash), value)


def header_of(db: BlockDB, block_hash: bytes = HASHES[0]) -> Header:
    with db.read() as snapshot:
        header = parse_header(snapshot.header(key_of(block_hash)) or b"")
    assert isinstance(header, Header)
    return header


def chunks_of(db: BlockDB) -> list[bytes]:
    """The payload keys of the first record."""
    prefix = chunk_key(header_of(db).sequence, 0)[:8]
    with db._env.begin() as txn, txn.cursor(db=db._payload) as cursor:
        return [bytes(key) for key in cursor.iternext(values=False) if bytes(key).startswith(prefix)]


def rewrite(db: BlockDB, **fields: Any) -> None:
    """Give the first record's header other fields, under a right header hash."""
    header = replace(header_of(db), **fields)
    change(db, "_index", key_of(), lambda _: header.encode(header.sequence, header.written))


def rewrite_directory(db: BlockDB, edit: Callable[[Directory], Directory]) -> None:
    """Change the first record's directory, under right hashes."""
    header = header_of(db)
    with db.read() as snapshot:
        parsed = parse_directory(snapshot.chunk(header.sequence, 0), header, SHAPE.plan)
    assert isinstance(parsed, Directory)
    data = edit(parsed).encode()
    change(db, "_payload", chunk_key(header.sequence, 0), lambda _: data)
    rewrite(db, directory_hash=xxh3_64_intdigest(data))


# --- intact records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize(("position", "valid"), [(0, None), (3, None), (2**40, 1), (7, 3)])
def test_an_intact_record_passes(db: BlockDB, codec: str, shape: GroupShape, position: int, valid: int | None) -> None:
    record = record_of(shape, HASHES[0], position, valid, codec)
    assert (record.header.stored_length < record.header.raw_length) == (codec != "raw")
    put(db, record)
    assert look(db) is None


def test_an_entry_longer_than_a_header_is_none(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    with db.read() as snapshot:
        found = audit(snapshot, key_of(), memoryview((snapshot.header(key_of()) or b"") + bytes(2000)))
    assert found is not None
    assert found.kind == "header"


# --- damage --------------------------------------------------------------------------------------------------------


def test_every_bit_of_a_header_counts(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    with db.read() as snapshot:
        value = snapshot.header(key_of()) or b""
        found = [audit(snapshot, key_of(), flip(value, bit)) for bit in range(8 * len(value))]
    assert {(wrong.kind, wrong.condemned) if wrong else None for wrong in found} == {("header", True)}


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_a_flipped_bit_in_any_value_of_payload_is_found(db: BlockDB, codec: str) -> None:
    put(db, record_of(WIDE, HASHES[0], codec=codec))
    assert len(chunks_of(db)) == 1 + 9
    for key in chunks_of(db):
        for bit in (0, 8 * 11 + 3, -1):
            change(db, "_payload", key, lambda data, bit=bit: flip(data, bit % (8 * len(data))))
            found = look(db)
            assert found is not None
            assert (found.kind, found.condemned) == ("storage_hash", True)
            change(db, "_payload", key, lambda data, bit=bit: flip(data, bit % (8 * len(data))))
    assert look(db) is None


def test_missing_short_and_long_values_of_payload_are_found(db: BlockDB) -> None:
    put(db, record_of(WIDE, HASHES[0]))
    for key in chunks_of(db):
        edits: list[Callable[[bytes], bytes]] = [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:1]]
        for edit in edits:
            before: list[bytes] = []
            change(db, "_payload", key, lambda data, b=before, e=edit: b.append(data) or e(data))
            found = look(db)
            assert found is not None
            assert (found.kind, found.condemned) == ("storage_hash", True)
            change(db, "_payload", key, lambda _, b=before: b[0])
    for key in chunks_of(db):
        with db._env.begin(write=True) as txn:
            kept = bytes(txn.get(key, db=db._payload))
            txn.delete(key, db=db._payload)
        found = look(db)
        assert found is not None
        assert (found.kind, found.condemned) == ("storage_hash", True)
        with db._env.begin(write=True) as txn:
            txn.put(key, kept, db=db._payload)
    assert look(db) is None


def test_an_entry_under_another_key_is_found(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]), record_of(SHAPE, HASHES[1], seed=1))
    with db.read() as snapshot:
        found = audit(snapshot, key_of(HASHES[1]), snapshot.header(key_of()) or b"")
    assert found is not None
    assert (found.kind, found.condemned) == ("key", True)


def test_a_chunk_that_does_not_decode_is_found(db: BlockDB) -> None:
    put(db, record_of(WIDE, HASHES[0], codec="bf16-planes"))
    header = header_of(db)
    with db.read() as snapshot:
        parsed = parse_directory(snapshot.chunk(header.sequence, 0), header, WIDE.plan)
    assert isinstance(parsed, Directory)
    change(db, "_payload", chunk_key(header.sequence, 1), lambda data: data[:-20] + bytes(20))
    with db.read() as snapshot:
        parsed.hashes[0] = xxh3_64_intdigest(snapshot.chunk(header.sequence, 1))
    change(db, "_payload", chunk_key(header.sequence, 0), lambda _: parsed.encode())
    rewrite(db, directory_hash=xxh3_64_intdigest(parsed.encode()))
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("decode", True)


def test_stored_lengths_that_contradict_each_other_are_found(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    rewrite(db, stored_length=header_of(db).stored_length + 1)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("decode", True)


def test_a_chunk_longer_than_its_raw_bytes_is_not_decoded(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    header = header_of(db)
    change(db, "_payload", chunk_key(header.sequence, 1), lambda data: data + b"\0")
    with db.read() as snapshot:
        longer = xxh3_64_intdigest(snapshot.chunk(header.sequence, 1))
    rewrite_directory(db, lambda d: replace(d, lengths=d.lengths + 1, hashes=np.array([longer], np.uint64)))
    rewrite(db, stored_length=header.stored_length + 1)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("decode", True)
    assert "exceed the raw ones" in found.detail


def test_a_wrong_slice_table_is_found(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    rewrite_directory(db, lambda d: replace(d, slice_sums=d.slice_sums + np.array([0, 0, 1, 0, 0, 0], np.uint64)))
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("content", True)
    assert "layer 2 head 0" in found.detail


@pytest.mark.parametrize("fields", [{"tagged_checksum": 12345}, {"fingerprint": 1}])
def test_a_checksum_that_is_not_the_bytes_is_found(db: BlockDB, fields: dict[str, int]) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    rewrite(db, **fields)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("content", True)


def test_bytes_of_another_position_are_found(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0], position=3))
    rewrite(db, position=4)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("content", True)


def test_another_blocks_chunks_under_its_own_hashes_are_found(db: BlockDB) -> None:
    """Chunks and directory of one record, under the header of another: everything but the checksum is right."""
    put(db, record_of(SHAPE, HASHES[0]), record_of(SHAPE, HASHES[1], seed=1))
    other = header_of(db, HASHES[1])
    rewrite(db, sequence=other.sequence, directory_hash=other.directory_hash)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("content", True)


@pytest.mark.parametrize("fields", [{"codec": 200}, {"flags": 2}, {"algorithm": 2}])
def test_what_is_newer_is_not_blamed(db: BlockDB, fields: dict[str, int]) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    rewrite(db, **fields)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("version", False)


def test_what_lmdb_cannot_read_is_not_blamed(db: BlockDB, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(view: ReadView, sequence: int, number: int) -> memoryview:
        raise lmdb.CorruptedError("a page")

    put(db, record_of(SHAPE, HASHES[0]))
    monkeypatch.setattr(ReadView, "chunk", fail)
    found = look(db)
    assert found is not None
    assert (found.kind, found.condemned) == ("io", False)


# --- crafted headers -----------------------------------------------------------------------------------------------

UNCHECKED, CONTRADICTION, TWICE, NO_DIRECTORY = (
    "not checked here",
    "contradict each other",
    "a slice twice",
    "directory:",
)
ONE = (0, 1, 0, 0, 0, 8, 0)
CRAFTED: dict[str, tuple[list[tuple[int, ...]], int, dict[str, int], str]] = {
    "4 billion slices a run": ([(0, 65535, 1, 0, 65535, 8, 0)] * 81, 1, {}, UNCHECKED),
    "65535 layers a run": ([(n * 65535, 65535, 1, 0, 0, 8, 0) for n in range(81)], 1, {}, UNCHECKED),
    "the largest cells": ([(0, 1, 0, 0, 0, 2**32 - 8, 2**32 - 8)], 2**32 - 1, {}, CONTRADICTION),
    "the largest block": ([ONE], 2**32 - 1, {}, UNCHECKED),
    "as many slices as are looked at": ([(0, 2**15, 1, 0, 1, 8, 0)], 1, {}, NO_DIRECTORY),
    "one more": ([(0, 2**15, 1, 0, 1, 8, 0), (2**16, 1, 0, 0, 0, 8, 0)], 1, {}, UNCHECKED),
    "as many bytes as are looked at": ([(0, 1, 0, 0, 0, 2**26, 0)], 16, {}, NO_DIRECTORY),
    "the last position": ([ONE], 4, {"position": 2**64 - 1}, CONTRADICTION),
    "no token": ([ONE], 4, {"valid_tokens": 0}, CONTRADICTION),
    "too many tokens": ([ONE], 4, {"valid_tokens": 5}, CONTRADICTION),
    "no block": ([ONE], 0, {"valid_tokens": 0}, CONTRADICTION),
    "a run of no layer": ([ONE, (1, 0, 0, 0, 0, 8, 0)], 4, {}, CONTRADICTION),
    "no cell": ([ONE, (1, 1, 0, 0, 0, 0, 0)], 4, {}, CONTRADICTION),
    "half a piece": ([(0, 1, 0, 0, 0, 4, 4)], 4, {}, CONTRADICTION),
    "a slice twice": ([(0, 2, 0, 0, 0, 8, 0)], 4, {}, TWICE),
    "a head past the last": ([(0, 1, 0, 65535, 1, 8, 0)], 4, {}, CONTRADICTION),
    "another raw length": ([ONE], 4, {"raw_length": 2**63}, CONTRADICTION),
}


def crafted(runs: list[tuple[int, ...]], block_size: int, fields: dict[str, int]) -> Header:
    """A header whose lengths follow from its geometry, whatever it names."""
    slices = sum(count * (more + 1) for _, count, _, _, more, _, _ in runs)
    raw = block_size * sum(count * (more + 1) * (k + v) for _, count, _, _, more, k, v in runs)
    made = {"valid_tokens": 1, "position": 0, "raw_length": raw % 2**64} | fields
    return Header(
        codec=0,
        block_size=block_size,
        stored_length=made["raw_length"],
        fingerprint=1,
        tagged_checksum=2,
        directory_length=min(8 * slices + 12, 2**32 - 1),
        directory_hash=0,
        key=key_of(),
        parent=b"",
        geometry=b"".join(RUN.pack(*run) for run in runs),
        **made,
    )


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.parametrize("stored", [0, 12, 8 * 2**16 + 12])
def test_a_crafted_header_takes_neither_much_memory_nor_much_time(db: BlockDB, name: str, stored: int) -> None:
    *geometry, reason = CRAFTED[name]
    put(db, NewRecord(crafted(*geometry), bytes(stored), []))
    if not stored:
        change(db, "_payload", chunk_key(header_of(db).sequence, 0), lambda _: None)
    tracemalloc.start()
    before = time.process_time()
    try:
        found = look(db)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is not None
    assert (NO_DIRECTORY if reason == TWICE and stored < 16 else reason) in found.detail
    assert found.condemned == (reason != UNCHECKED)
    assert peak < (64 * MIB if stored > 12 else MIB)
    assert time.process_time() - before < 10


# --- what readers report -------------------------------------------------------------------------------------------


def damage(db: BlockDB, block_hash: bytes) -> None:
    change(db, "_payload", chunk_key(header_of(db, block_hash).sequence, 1), lambda data: flip(data, 5))


def report(db: BlockDB, block_hash: bytes, kind: str = "storage_hash") -> Report:
    with db.read() as snapshot:
        value = snapshot.header(key_of(block_hash)) or b""
    return Report(key_of(block_hash), sequence_of(value), kind)


def test_the_writer_blames_what_it_finds_to_be_damaged_itself(db: BlockDB) -> None:
    put(db, *(record_of(SHAPE, h, seed=n) for n, h in enumerate(HASHES)))
    damage(db, HASHES[1])
    damage(db, HASHES[3])
    change(db, "_index", key_of(HASHES[2]), lambda value: flip(value, 8 * FIXED.size + 1))
    found = follow_reports(db, [report(db, h, "content") for h in HASHES[:3]] * 2)
    assert [(key, kind) for key, _, kind in found] == [
        (key_of(HASHES[1]), "storage_hash"),
        (key_of(HASHES[2]), "header"),
    ]
    assert db.condemn(found) == 0
    with db.read() as snapshot:
        there = [snapshot.header(key_of(h)) is not None for h in HASHES]
    assert there == [True, False, False, True]
    assert db.usage()["quarantine_records"] == 2


def test_a_report_of_what_was_put_anew_or_is_gone_is_skipped(db: BlockDB, monkeypatch: pytest.MonkeyPatch) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    old = report(db, HASHES[0])
    put(db, record_of(SHAPE, HASHES[0], seed=5))
    damage(db, HASHES[0])
    monkeypatch.setattr("kvstore.audit.audit", lambda *args: pytest.fail("it was read"))
    assert follow_reports(db, [old, Report(key_of(HASHES[2]), 7, "header")]) == []


def test_what_a_second_read_does_not_find_is_not_blamed(db: BlockDB, monkeypatch: pytest.MonkeyPatch) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    verdicts = iter([Rejection("storage_hash", "once", True), None])
    monkeypatch.setattr("kvstore.audit.audit", lambda *args: next(verdicts))
    assert follow_reports(db, [report(db, HASHES[0])]) == []
    assert next(verdicts, "both were used") == "both were used"


def test_an_entry_too_short_for_a_sequence_number_is_found(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    change(db, "_index", key_of(), lambda _: b"short")
    assert follow_reports(db, [report(db, HASHES[0])]) == [(key_of(), b"short", "header")]


def test_where_lmdb_cannot_read_nothing_is_blamed(
    db: BlockDB, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(view: ReadView, key: bytes) -> bytes:
        raise lmdb.CorruptedError("a page")

    put(db, record_of(SHAPE, HASHES[0]))
    told = report(db, HASHES[0])
    monkeypatch.setattr(ReadView, "header", fail)
    with caplog.at_level(logging.ERROR):
        assert follow_reports(db, [told]) == []
    assert "a page" in caplog.text


def test_from_a_readers_report_to_the_writers_quarantine(db: BlockDB) -> None:
    put(db, record_of(SHAPE, HASHES[0]))
    damage(db, HASHES[0])
    with db.read() as snapshot:
        value = snapshot.header(key_of()) or b""
    assert Reports(db.folder).add([(key_of(), value, "storage_hash")]) == 0
    found = follow_reports(db, Reports(db.folder).take())
    assert found == [(key_of(), value, "storage_hash")]
    assert struct.unpack_from("<Q", value, 40)[0] == report(db, HASHES[0]).sequence
