"""The story: an operator has a shard checked. Each kind of damage is found under its right name, at the stage that looks for
it; a clean store, and one that an engine is writing, gives no finding; whatever is in the file, the check goes on behind it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.blockdb import IDENTITY_PREFIX, USAGE_KEY, BlockDB
from kvstore.fsck import checkpoint, scan
from kvstore.fsck.content import torch_sums
from kvstore.fsck.findings import Finding, Progress, Summary
from kvstore.fsck.mark import Mark
from kvstore.fsck.options import Options, Sample, parse_sample
from kvstore.fsck.pagemap import pages_of
from kvstore.fsck.pages import PageFile, leaf_nodes
from kvstore.fsck.reading import Plain, Reading
from kvstore.fsck.scan import check, shards
from kvstore.fsck.scanner import BYTES_AT_ONCE, LOST, PACED_S, Scanner
from kvstore.fsck.stages import Problem
from kvstore.fsck.survey import RANGE_BYTES, Cuts, Survey, TooLong
from kvstore.fsck.team import Child, ready
from kvstore.hostpath import staging_sums
from kvstore.record import chunk_key, parse_header
from kvstore.span import Span
from kvstore.storefile import DATA_NAME, STORE_NAME
from kvstore.usage import FORM
from tests.fsck_damage import (
    FORMS,
    HASHES,
    PAGE,
    SHAPE,
    WIDE,
    break_leaf,
    chunk_of,
    edit_file,
    fill,
    free_a_live_page,
    header_of,
    key_of,
    lose_bit,
    newer,
    no_such_layers,
    one_more,
    place,
    recount,
    rewrite,
    rewrite_chunk,
    rewrite_directory,
    value,
)
from tests.records import change, opened, put, raw_block, record_of
from tests.support import MIB, SMALL, block_hashes, make_cache, open_store

Damage = Callable[[BlockDB], object]


def checked(shard: Path, stage: str = "default", **options: Any) -> tuple[list[Finding], Summary]:
    """All findings of a check, and its summary, whose figures must be those of the findings."""
    items = list(check(shard, Options(stage=stage, **options)))
    findings, summary = [item for item in items if isinstance(item, Finding)], items[-1]
    assert isinstance(summary, Summary)
    assert sum(summary.findings.values()) == len(findings)
    assert any(isinstance(item, Progress) for item in items) or not summary.records
    return findings, summary


def kinds(shard: Path, stage: str = "default", **options: Any) -> set[tuple[str, bytes]]:
    """Kind and key of each finding."""
    return {(finding.kind, finding.key) for finding in checked(shard, stage, **options)[0]}


@cache
def template() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        shard = fill(Path(folder) / "shard")
        return {name: (shard / name).read_bytes() for name in (STORE_NAME, DATA_NAME)}


def copied(tmp_path: Path) -> Path:
    """A shard of one's own, filled as `fill` does."""
    shard = tmp_path / "shard"
    shard.mkdir(mode=0o700)
    for name, data in template().items():
        (shard / name).write_bytes(data)
    return shard


def damaged(tmp_path: Path, damage: Damage) -> Path:
    shard = copied(tmp_path)
    with opened(shard, capacity_bytes=64 * MIB) as db:
        damage(db)
    return shard


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean shard, which tests do not change."""
    return fill(tmp_path_factory.mktemp("clean") / "shard")


# --- clean stores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "jobs"), [("quick", 1), ("default", 1), ("deep", 1), ("deep", 3)])
def test_a_clean_store_gives_no_finding(clean: Path, stage: str, jobs: int) -> None:
    before = {path.name: path.read_bytes() for path in clean.iterdir() if path.name != "lock.mdb"}
    findings, summary = checked(clean, stage, jobs=jobs)
    assert findings == []
    assert summary.total_records == len(FORMS)
    assert summary.records == (0 if stage == "quick" else len(FORMS))
    assert not summary.cancelled
    assert [note for note in summary.unchecked if "identity" not in note] == []
    assert before == {path.name: path.read_bytes() for path in clean.iterdir() if path.name != "lock.mdb"}


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_a_store_that_an_engine_wrote_is_wholly_checked(tmp_path: Path, codec: str) -> None:
    cache = make_cache(layers=3, heads=2)
    with open_store(tmp_path, cache, replace(SMALL, codec=codec)) as store:
        store.put_blocks(HASHES, range(6), num_tokens=4 * 6 - 1)
        folder = store.folder
    findings, summary = checked(folder, "deep")
    assert (findings, summary.unchecked, summary.records) == ([], [], 6)


def test_condemned_records_own_their_chunks(tmp_path: Path) -> None:
    def condemn(db: BlockDB) -> None:
        lose_bit(db, "_payload", chunk_of(db, 2, 1), 5)
        lose_bit(db, "_index", key_of(3), 8 * 30)
        db.condemn([(key_of(n), value(db, "_index", key_of(n)), "storage_hash") for n in (2, 3)])
        recount(db)

    assert checked(damaged(tmp_path, condemn), "deep")[0] == []


def test_an_empty_shard_one_without_data_and_one_cut_short_in_its_making_are_clean(tmp_path: Path) -> None:
    with opened(tmp_path / "shard"):
        pass
    assert checked(tmp_path / "shard", "deep")[0] == []
    (tmp_path / "shard" / DATA_NAME).unlink()
    findings, summary = checked(tmp_path / "shard", "deep")
    assert findings == []
    assert "no data.mdb" in summary.unchecked[0]


def test_a_shard_that_is_none_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(errors.StorePathError):
        shards(tmp_path)


def test_shards_that_lost_their_store_file_are_found(tmp_path: Path, clean: Path) -> None:
    for name in ("tp0of2-pp0of1", "tp1of2-pp0of1"):
        shutil.copytree(clean, tmp_path / name)
    (tmp_path / "tp0of2-pp0of1" / STORE_NAME).unlink()
    assert [path.name for path in shards(tmp_path)] == ["tp0of2-pp0of1", "tp1of2-pp0of1"]
    assert shards(clean) == [clean]


# --- every kind ----------------------------------------------------------------------------------------------------


def swap(db: BlockDB) -> None:
    one, two = (value(db, "_index", key_of(n)) for n in (2, 5))
    place(db, "_index", key_of(2), two)
    place(db, "_index", key_of(5), one)


def longer(db: BlockDB) -> None:
    def edit(directory: Any) -> Any:
        lengths = directory.lengths.copy()
        lengths[1] += 1
        return replace(directory, lengths=lengths)

    rewrite_directory(db, 1, edit)


def same_sequence(db: BlockDB) -> None:
    """Another record's header with the sequence number of the first, under right hashes; its own chunks go."""
    header = header_of(db, 2)
    with db._env.begin(write=True) as txn:
        for chunk in range(2):
            txn.delete(chunk_key(header.sequence, chunk), db=db._payload)
    place(db, "_index", key_of(2), header.encode(header_of(db, 5).sequence, header.written))


def says(**fields: int) -> Damage:
    return lambda db: recount(db, **fields)


def newest(db: BlockDB) -> None:
    recount(db, last_sequence=header_of(db, 5).sequence - 1)


RECORDS: dict[str, tuple[Damage, str, str, int]] = {
    "a bit of a header": (lambda db: lose_bit(db, "_index", key_of(1), 8 * 33), "HEADER", "quick", 1),
    "a header cut short": (lambda db: change(db, "_index", key_of(1), lambda v: v[:100]), "HEADER", "quick", 1),
    "a header too long": (lambda db: change(db, "_index", key_of(1), lambda v: v + bytes(9)), "HEADER", "quick", 1),
    "a sequence number": (lambda db: lose_bit(db, "_index", key_of(1), 8 * 41), "HEADER", "quick", 1),
    "valid tokens": (lambda db: rewrite(db, 1, valid_tokens=601), "HEADER", "default", 1),
    "a newer header": (lambda db: change(db, "_index", key_of(3), newer), "UNKNOWN_VERSION", "quick", 3),
    "flags": (lambda db: change(db, "_index", key_of(3), lambda v: newer(v, 18)), "UNKNOWN_VERSION", "quick", 3),
    "a codec": (lambda db: change(db, "_index", key_of(3), lambda v: newer(v, 16, 9)), "UNKNOWN_VERSION", "default", 3),
    "no layer": (lambda db: no_such_layers(db, 2, lambda r: [r[0], 0, *r[2:]]), "GEOMETRY", "default", 2),
    "odd bytes": (lambda db: no_such_layers(db, 2, lambda r: [*r[:5], 33, 31]), "GEOMETRY", "default", 2),
    "a giant": (lambda db: no_such_layers(db, 2, lambda r: [*r[:5], 2**31, 0]), "GEOMETRY", "default", 2),
    "a layer twice": (lambda db: no_such_layers(db, 2, lambda r: [r[0], r[1], 0, *r[3:]]), "GEOMETRY", "default", 2),
    "raw length": (lambda db: rewrite(db, 2, raw_length=8), "LENGTH", "default", 2),
    "stored length": (lambda db: rewrite(db, 2, stored_length=8), "LENGTH", "default", 2),
    "directory length": (lambda db: rewrite(db, 2, directory_length=8), "LENGTH", "default", 2),
    "a directory cut short": (
        lambda db: change(db, "_payload", chunk_of(db, 1, 0), lambda v: v[:-1]),
        "LENGTH",
        "default",
        1,
    ),
    "a chunk cut short": (
        lambda db: change(db, "_payload", chunk_of(db, 1, 3), lambda v: v[:-1]),
        "LENGTH",
        "default",
        1,
    ),
    "a bit of a chunk": (lambda db: lose_bit(db, "_payload", chunk_of(db, 0, 9), -1), "STORAGE_HASH", "default", 0),
    "a bit of a directory": (lambda db: lose_bit(db, "_payload", chunk_of(db, 0, 0), 5), "STORAGE_HASH", "default", 0),
    "the slice table": (
        lambda db: rewrite_directory(db, 4, lambda d: replace(d, slice_sums=one_more(d.slice_sums))),
        "SLICE_TABLE",
        "default",
        4,
    ),
    "the checksum": (lambda db: rewrite(db, 4, tagged_checksum=1), "SLICE_TABLE", "default", 4),
    "a frame": (lambda db: rewrite_chunk(db, 4, 2, lambda v: v[:-3] + b"\xff" * 3), "DECODE", "deep", 4),
    "content": (lambda db: rewrite_chunk(db, 0, 2, lambda v: b"\x7e" + v[1:]), "CONTENT", "deep", 0),
    "a chunk": (lambda db: change(db, "_payload", chunk_of(db, 1, 4), lambda v: None), "MISSING_CHUNK", "quick", 1),
    "the last chunk": (
        lambda db: change(db, "_payload", chunk_of(db, 1, 9), lambda v: None),
        "MISSING_CHUNK",
        "quick",
        1,
    ),
    "a directory": (lambda db: change(db, "_payload", chunk_of(db, 1, 0), lambda v: None), "MISSING_CHUNK", "quick", 1),
}
STAGES = ("quick", "default", "deep")


@pytest.mark.parametrize("name", RECORDS)
def test_damage_of_a_record_is_found_from_its_stage_on(tmp_path: Path, name: str) -> None:
    damage, kind, first, number = RECORDS[name]
    shard = damaged(tmp_path, damage)
    at = STAGES.index(first)
    if at:
        assert kinds(shard, STAGES[at - 1]) == set()
    for stage in dict.fromkeys((first, "deep")):
        findings, _ = checked(shard, stage)
        assert [(finding.kind, finding.key) for finding in findings] == [(kind, key_of(number))]
        assert findings[0].persisted
        assert findings[0].nbytes > 0


def test_what_is_wrong_with_stored_bytes_says_where_it_lies(tmp_path: Path) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_payload", chunk_of(db, 0, 5), 8 * 100_000))
    (finding,), _ = checked(shard)
    with opened(shard, writable=False) as db:
        chunk = value(db, "_payload", chunk_of(db, 0, 5))
    data = (shard / DATA_NAME).read_bytes()
    assert finding.page is not None
    assert data[finding.page * PAGE + 16 :].startswith(chunk)
    assert finding.pages == -(-(len(chunk) + 16) // PAGE)


def test_an_entry_that_lost_its_sequence_number_names_nothing(tmp_path: Path) -> None:
    shard = damaged(tmp_path, lambda db: change(db, "_index", key_of(1), lambda v: v[:20]))
    assert kinds(shard) == {("HEADER", key_of(1)), ("ORPHAN_CHUNK", b"")}


def test_of_two_entries_of_one_sequence_number_the_one_whose_chunks_are_there_is_right(tmp_path: Path) -> None:
    shard = damaged(tmp_path, same_sequence)
    assert kinds(shard, "quick") == {("HEADER", key_of(2))}
    assert kinds(shard, "deep") == {("HEADER", key_of(2)), ("STORAGE_HASH", key_of(2))}


def test_swapped_entries_are_both_found(tmp_path: Path) -> None:
    shard = damaged(tmp_path, swap)
    for stage in STAGES:
        assert kinds(shard, stage) == {("KEY", key_of(2)), ("KEY", key_of(5))}


def test_several_kinds_of_one_record_and_of_several_are_each_found(tmp_path: Path) -> None:
    def damage(db: BlockDB) -> None:
        change(db, "_payload", chunk_of(db, 0, 2), lambda v: v[1:])
        lose_bit(db, "_payload", chunk_of(db, 0, 3), 1)
        change(db, "_payload", chunk_of(db, 0, 4), lambda v: None)
        rewrite(db, 1, tagged_checksum=1)
        lose_bit(db, "_index", key_of(2), 900)
        recount(db, last_sequence=2**61)

    first = {(kind, key_of(0)) for kind in ("LENGTH", "STORAGE_HASH", "MISSING_CHUNK")}
    others = {("SLICE_TABLE", key_of(1)), ("HEADER", key_of(2)), ("ACCOUNTING", b"")}
    assert kinds(damaged(tmp_path, damage)) == first | others


@pytest.mark.parametrize(
    "damage",
    [
        says(raw_bytes=1),
        says(stored_bytes=2**50),
        says(quarantine_records=3),
        says(quarantine_bytes=1),
        says(last_sequence=2**61),
        newest,
        lambda db: place(db, "_meta", USAGE_KEY, bytes(FORM.size - 1)),
        lambda db: change(db, "_meta", USAGE_KEY, lambda v: None),
    ],
)
def test_wrong_accounting_is_found(tmp_path: Path, damage: Damage) -> None:
    assert kinds(damaged(tmp_path, damage), "quick") == {("ACCOUNTING", b"")}


def test_accounting_beside_a_damaged_entry_is_checked_within_bounds(tmp_path: Path) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_index", key_of(1), 8 * 33))
    findings, summary = checked(shard, "quick")
    assert [finding.kind for finding in findings] == ["HEADER"]
    assert any("within bounds" in note for note in summary.unchecked)
    with opened(shard, capacity_bytes=64 * MIB) as db:
        recount(db, raw_bytes=1)
    assert kinds(shard, "quick") == {("HEADER", key_of(1)), ("ACCOUNTING", b"")}


def test_bytes_that_no_record_names_are_found(tmp_path: Path) -> None:
    def damage(db: BlockDB) -> None:
        sequence = header_of(db, 0).sequence
        place(db, "_payload", chunk_key(5, 0), bytes(5000))
        place(db, "_payload", chunk_key(5, 7), bytes(70))
        place(db, "_payload", chunk_key(sequence, 10), bytes(30))
        place(db, "_payload", b"odd", bytes(3))

    findings, _ = checked(damaged(tmp_path, damage))
    assert {finding.kind for finding in findings} == {"ORPHAN_CHUNK"}
    assert sorted(finding.nbytes for finding in findings) == [3, 30, 5070]
    assert all(finding.key == b"" for finding in findings)
    (largest,) = [finding for finding in findings if finding.nbytes == 5070]
    assert (largest.sequence, largest.pages) == (5, 3)


def test_the_chunks_of_a_damaged_entry_are_orphans_once_it_is_gone(tmp_path: Path) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_index", key_of(1), 8 * 41))
    assert kinds(shard) == {("HEADER", key_of(1))}
    with opened(shard, capacity_bytes=64 * MIB) as db:
        change(db, "_index", key_of(1), lambda v: None)
        recount(db)
    assert kinds(shard) == {("ORPHAN_CHUNK", b"")}


def test_beside_a_newer_version_no_bytes_are_orphans(tmp_path: Path) -> None:
    def damage(db: BlockDB) -> None:
        change(db, "_index", key_of(1), lambda v: newer(v[:40] + bytes(8) + v[48:]))
        place(db, "_payload", chunk_key(5, 0), bytes(500))

    findings, summary = checked(damaged(tmp_path, damage))
    assert [finding.kind for finding in findings] == ["UNKNOWN_VERSION"]
    assert any("newer version may name" in note for note in summary.unchecked)


def test_layers_that_are_not_the_identitys_are_found_deeply(tmp_path: Path) -> None:
    cache = make_cache(layers=2, heads=2)
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES, range(6))
        folder, identity = store.folder, store.identity
    with opened(folder) as db:
        keys = [bytes(key) for key, _ in db.entries()]
        entries = dict.fromkeys(keys)
        for key, fields in zip(keys, ({"fingerprint": 5}, {"parent": b"p" * 8}), strict=False):
            with db.read() as snapshot:
                header = parsed(snapshot.header(key))
            tagged = header.tagged_checksum ^ header.fingerprint ^ fields.get("fingerprint", header.fingerprint)
            made = replace(header, **fields, tagged_checksum=tagged)
            place(db, "_index", key, made.encode(header.sequence, header.written))
    assert kinds(folder) == set()
    assert kinds(folder, "deep") == {("GEOMETRY", keys[0])}
    with opened(folder) as db:
        place(db, "_meta", IDENTITY_PREFIX + identity.digest(), b"{}")
    findings, summary = checked(folder, "deep")
    assert findings == []
    assert f"({len(entries)} times)" in summary.unchecked[0]


def parsed(data: bytes | None) -> Any:
    return parse_header(data or b"")


# --- the files -------------------------------------------------------------------------------------------------------


def test_a_lost_or_damaged_store_file_is_found_and_records_are_checked_all_the_same(tmp_path: Path) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_payload", chunk_of(db, 0, 9), -1))
    expected = {("STORE_FILE", b""), ("STORAGE_HASH", key_of(0))}
    (shard / STORE_NAME).write_bytes(os.urandom(1024))
    assert kinds(shard) == expected
    (shard / STORE_NAME).unlink()
    assert kinds(shard) == expected
    assert not (shard / STORE_NAME).exists()


def test_a_shard_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    shard = copied(tmp_path)
    store = bytearray((shard / STORE_NAME).read_bytes())
    for start in (0, 512):
        store[start + 8] = 9
    (shard / STORE_NAME).write_bytes(store)
    (shard / DATA_NAME).write_bytes(b"of another format")
    findings, summary = checked(shard)
    assert [(finding.kind, finding.damage) for finding in findings] == [("UNKNOWN_VERSION", False)]
    assert summary.unchecked


@pytest.mark.parametrize("page", [0, 1])
def test_a_meta_page_that_is_none_is_found_before_anything_is_mapped(tmp_path: Path, page: int) -> None:
    shard = copied(tmp_path)
    edit_file(shard, lambda data: data.__setitem__(slice(page * PAGE + 16, page * PAGE + 24), bytes(8)))
    findings, summary = checked(shard, jobs=2)
    assert {finding.kind for finding in findings} == {"META"}
    assert any("cannot open" in note for note in summary.unchecked)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_cut_short_is_found_and_what_is_there_is_read(tmp_path: Path, jobs: int) -> None:
    """Reading past its end is a SIGBUS: the process that reads ends, and another one goes on behind that record."""
    last = SHAPE.prefix + block_hashes(1, "last")[0]

    def damage(db: BlockDB) -> None:
        lose_bit(db, "_payload", chunk_of(db, 1, 2), 7)
        put(db, record_of(WIDE, last[len(SHAPE.prefix) :]))
        for _ in range(4):
            # Pages that were written after the record's move to free ones before it.
            recount(db)

    shard = damaged(tmp_path, damage)
    end = max(first + count for first, count in pages_of(shard / DATA_NAME, [last]))
    os.truncate(shard / DATA_NAME, (end - 2) * PAGE)
    expected = {("FILE_TRUNCATED", b""), ("FILE_TRUNCATED", last), ("STORAGE_HASH", key_of(1))}
    assert kinds(shard, jobs=jobs) == expected


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The scanning processes that checks start, as they start them."""
    started: list[Child] = []

    class Counted(Child):
        def __init__(self) -> None:
            started.append(self)
            super().__init__()

    monkeypatch.setattr("kvstore.fsck.team.Child", Counted)
    return started


def test_processes_that_are_ready_are_taken_and_the_others_ended(tmp_path: Path, processes: list[Child]) -> None:
    shard = copied(tmp_path)
    with ready(3):
        started = list(processes)
        assert len(started) == 3
        assert checked(shard, jobs=2)[0] == []
        assert processes == started
        assert [child._process.poll() is None for child in started] == [False, False, True]
        assert checked(shard, jobs=2)[0] == [], "one that is ready, one that is not"
    assert len(processes) == 4
    assert all(child._process.poll() is not None for child in processes)


def test_processes_that_cannot_be_ready_are_started_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Child:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    shard = copied(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("kvstore.fsck.team.Child", refused)
        with ready(2), pytest.raises(BlockingIOError):
            checked(shard)
    with ready(0):
        assert checked(shard)[0] == []


def roots(shard: Path) -> dict[str, int]:
    with PageFile(shard / DATA_NAME) as file:
        meta = file.metas[0]
        named = {name.decode(): tree.root for name, tree in file.databases(meta).items()}
        return {"main": meta.main.root, **named}


def crashes(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if "was ended by" in finding.detail]


@pytest.mark.parametrize("stage", ["default", "deep"])
def test_an_index_whose_root_is_past_the_end_is_given_up(tmp_path: Path, processes: list[Child], stage: str) -> None:
    shard = copied(tmp_path)
    os.truncate(shard / DATA_NAME, roots(shard)["index"] * PAGE)
    findings, summary = checked(shard, stage)
    assert {(finding.kind, finding.key) for finding in findings} == {("FILE_TRUNCATED", b"")}
    assert len(crashes(findings)) == 1
    assert LOST in summary.unchecked
    assert len(processes) <= 3


@pytest.mark.parametrize("name", ["past the end", "garbage"])
def test_where_not_even_the_databases_can_be_reached_nothing_is_tried_twice(
    tmp_path: Path, processes: list[Child], name: str
) -> None:
    shard = copied(tmp_path)
    root = roots(shard)["main"]
    if name == "garbage":
        edit_file(shard, lambda data: data.__setitem__(slice(root * PAGE, (root + 1) * PAGE), bytes(PAGE)))
    else:
        os.truncate(shard / DATA_NAME, root * PAGE)
    findings, summary = checked(shard)
    assert {finding.kind for finding in findings} <= {"FILE_TRUNCATED", "TREE"}
    assert scan.NO_INDEX in summary.unchecked
    assert len(crashes(findings)) <= 1
    assert len(processes) <= 3


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard whose index has many leaves, all over the file, and in it what records are damaged: `hurt`. Tests copy it."""
    shard = tmp_path_factory.mktemp("scattered") / "shard"
    hashes = block_hashes(300, "scattered")
    with opened(shard, capacity_bytes=64 * MIB) as db:
        for start in range(0, 300, 20):
            put(db, *(record_of(WIDE if n % 10 == 0 else SHAPE, hashes[n], seed=n) for n in range(start, start + 20)))
        for block_hash in hashes[5::50]:
            header = parsed(value(db, "_index", SHAPE.prefix + block_hash))
            lose_bit(db, "_payload", chunk_key(header.sequence, 1), 9)
    return shard


HURT = {SHAPE.prefix + block_hash for block_hash in block_hashes(300, "scattered")[5::50]}


def leaves(shard: Path, name: str) -> dict[int, set[bytes]]:
    """The keys on each leaf of a tree, by the leaf's page number."""
    with PageFile(shard / DATA_NAME) as file:
        there = file.walk(roots(shard)[name])
        return {number: {node.key for node in leaf_nodes(page)} for number, page in there if page[10] == 2}


def pages_by_key(shard: Path) -> dict[bytes, set[int]]:
    """Every page that a record needs: its leaf of the index, leaves and runs of its chunks."""
    on_leaf = {key: number for number, keys in leaves(shard, "payload").items() for key in keys}
    found: dict[bytes, set[int]] = {}
    for number, keys in leaves(shard, "index").items():
        for key in keys:
            places = pages_of(shard / DATA_NAME, [key])
            found[key] = {number, *(page for first, count in places for page in range(first, first + count))}
    with opened(shard, writable=False) as db:
        for key, entry in [(bytes(k), bytes(v)) for k, v in db.entries()]:
            mine = parsed(entry).sequence.to_bytes(8, "big")
            found[key] |= {page for chunk, page in on_leaf.items() if chunk[:8] == mine}
    return found


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 0.95])
def test_what_is_left_of_a_file_cut_short_is_read_and_named_rightly(
    tmp_path: Path, scattered: Path, processes: list[Child], share: float, jobs: int
) -> None:
    shard = Path(shutil.copytree(scattered, tmp_path / "shard"))
    pages, places = int((shard / DATA_NAME).stat().st_size * share) // PAGE, pages_by_key(shard)
    there = {number for number in leaves(shard, "index") if number < pages}
    os.truncate(shard / DATA_NAME, pages * PAGE)
    findings, summary = checked(shard, jobs=jobs)
    entries = {key for key, needed in places.items() if needed & there}
    whole = {key for key in entries if max(places[key]) < pages}
    by_kind = {kind: {f.key for f in findings if f.kind == kind and f.key} for kind in summary.findings}
    assert whole
    assert entries - whole
    assert by_kind.get("STORAGE_HASH", set()) == HURT & whole
    assert by_kind["FILE_TRUNCATED"] == entries - whole
    assert summary.records == len(entries)
    assert set(by_kind) <= {"STORAGE_HASH", "FILE_TRUNCATED"}
    assert len(crashes(findings)) <= 1
    assert len(processes) <= 1 + jobs


@pytest.mark.parametrize("stage", ["default", "deep"])
@pytest.mark.parametrize("fill", [0, 0xEE, 0xFF])
def test_what_lies_around_a_broken_leaf_of_the_index_is_read(
    tmp_path: Path, scattered: Path, processes: list[Child], fill: int, stage: str
) -> None:
    shard = Path(shutil.copytree(scattered, tmp_path / "shard"))
    by_leaf = sorted(leaves(shard, "index").items(), key=lambda item: min(item[1]))
    number, gone = by_leaf[len(by_leaf) // 2]
    assert len(by_leaf) > 8
    edit_file(shard, lambda data: data.__setitem__(slice(number * PAGE, (number + 1) * PAGE), bytes([fill]) * PAGE))
    findings, summary = checked(shard, stage)
    assert {(f.kind, f.key) for f in findings if f.key} == {("STORAGE_HASH", key) for key in HURT - gone}
    assert {f.kind for f in findings if not f.key} == {"TREE"}
    assert (summary.records, LOST in summary.unchecked) == (300 - len(gone), True)
    assert len(crashes(findings)) <= 1
    assert len(processes) <= 3


def test_records_whose_payload_is_out_of_reach_are_named_one_by_one(
    tmp_path: Path, scattered: Path, processes: list[Child]
) -> None:
    shard = Path(shutil.copytree(scattered, tmp_path / "shard"))
    root = roots(shard)["payload"]
    edit_file(shard, lambda data: data.__setitem__(slice(root * PAGE, (root + 1) * PAGE), bytes(PAGE)))
    findings, summary = checked(shard)
    assert {(f.kind, f.page) for f in findings if f.key} == {("TREE", root)}
    assert len({f.key for f in findings if f.key}) == summary.records == 300
    assert all(f.persisted for f in findings if f.key)
    assert len(processes) <= 3


def test_a_check_of_broken_trees_calls_no_record_checked(tmp_path: Path, scattered: Path) -> None:
    shard = Path(shutil.copytree(scattered, tmp_path / "shard"))
    number, gone = min(leaves(shard, "index").items())
    edit_file(shard, lambda data: data.__setitem__(slice(number * PAGE, (number + 1) * PAGE), bytes(PAGE)))
    for _ in range(2):
        assert checked(shard, resume=True)[1].records == 300 - len(gone)
        assert checkpoint.load(shard, int(time.time()))[0].parts == ()


def test_a_snapshot_in_which_lmdb_could_not_read_is_given_up(tmp_path: Path, scattered: Path) -> None:
    """LMDB refuses whatever is asked of it in that snapshot: other records would look broken, for the time of one read."""
    shard = Path(shutil.copytree(scattered, tmp_path / "shard"))
    number, chunks = sorted(leaves(shard, "payload").items())[3]
    with opened(shard, writable=False) as db:
        keys = [
            bytes(key)
            for key, entry in db.entries()
            if parsed(bytes(entry)).sequence.to_bytes(8, "big") in {chunk[:8] for chunk in chunks}
        ]
    edit_file(shard, lambda data: data.__setitem__(slice(number * PAGE, (number + 1) * PAGE), bytes(PAGE)))
    found = [message["finding"] for message in scanned(shard) if "finding" in message]
    assert {f["key"] for f in found if f["kind"] == "TREE"} == {key.hex() for key in keys}
    assert all(f["persisted"] for f in found)


@pytest.mark.parametrize("seed", range(8))
def test_keys_that_cannot_be_found_where_they_lie_are_passed_over(tmp_path: Path, scattered: Path, seed: int) -> None:
    """Whatever one leaf holds, plain reads go on behind it, from wherever they begin, and no key comes twice."""
    shard, dice = Path(shutil.copytree(scattered, tmp_path / "shard")), random.Random(seed)
    by_leaf = leaves(shard, "index")
    number = dice.choice(sorted(by_leaf))
    expected = sorted(set().union(*(keys for leaf, keys in by_leaf.items() if leaf != number)))

    def edit(data: bytearray) -> None:
        at = number * PAGE + PAGE - 1
        for _ in range(40):
            data[at - dice.randrange(PAGE - 16)] = dice.randrange(256)

    edit_file(shard, edit)
    with Plain(shard) as plain:
        for start in (b"", expected[0], expected[200], expected[200] + b"\0", b"\xff" * 60):
            found = [key for key, _ in plain.entries(start, 10**6)]
            wanted = [key for key in expected if key >= start]
            assert [key for key in found if key in set(wanted)] == wanted


def test_broken_trees_are_found_and_nothing_that_follows_from_them(tmp_path: Path) -> None:
    shard = copied(tmp_path)
    break_leaf(shard)
    findings, summary = checked(shard, "quick")
    assert {finding.kind for finding in findings} == {"TREE"}
    assert findings[0].page is not None
    assert any("trees do not hold together" in note for note in summary.unchecked)


def test_pages_that_are_free_and_in_use_are_found(tmp_path: Path) -> None:
    shard = copied(tmp_path)
    free_a_live_page(shard)
    assert {kind for kind, _ in kinds(shard)} == {"FREELIST"}


def test_an_emptied_file_is_found(tmp_path: Path) -> None:
    shard = copied(tmp_path)
    os.truncate(shard / DATA_NAME, 0)
    assert kinds(shard) == {("FILE_TRUNCATED", b"")}


@pytest.mark.parametrize("seed", range(6))
def test_no_garbage_in_the_file_ends_the_check(tmp_path: Path, seed: int) -> None:
    shard, dice = copied(tmp_path), random.Random(seed)

    def edit(data: bytearray) -> None:
        for _ in range(30):
            at = dice.randrange(2 * PAGE if seed % 3 else 0, len(data) - 600)
            data[at : at + dice.choice((1, 8, 500))] = dice.randbytes(dice.choice((1, 8, 500)))

    edit_file(shard, edit)
    findings, _ = checked(shard, "deep", jobs=1 + seed % 2)
    assert findings


# --- a second read ---------------------------------------------------------------------------------------------------


def scanned(
    shard: Path, stage: str = "default", prefix: bytes = b"", rate: float = 0, **task: Any
) -> list[dict[str, Any]]:
    """What a scanning process says of all records, or of those of a task, in this process."""
    said: list[dict[str, Any]] = []
    order = {"shard": str(shard), "stage": stage, "prefix": prefix.hex(), "rate": rate, "device": "cpu"}
    whole = {"task": "range", "start": "", "end": "", "records": 2**62, "nbytes": 2**62, "skip": [], "plain": False}
    mark = Mark()
    scanner = Scanner(order, mark, said.append)
    try:
        scanner.do(whole | task)
    finally:
        scanner.close()
        mark.close()
    return said


def test_what_a_second_read_does_not_find_is_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, reads = copied(tmp_path), list[bytes]()

    def first_is_wrong(view: Any, key: bytes, entry: bytes, deep: Any) -> list[Problem]:
        reads.append(key)
        return [Problem("STORAGE_HASH", "a bit fell over")] if key == key_of(3) and reads.count(key) == 1 else []

    monkeypatch.setattr("kvstore.fsck.scanner.intact", lambda *_: False)
    monkeypatch.setattr("kvstore.fsck.scanner.problems", first_is_wrong)
    (finding,) = [message["finding"] for message in scanned(shard) if "finding" in message]
    assert (finding["key"], finding["persisted"]) == (key_of(3).hex(), False)


@pytest.mark.parametrize("gone", [True, False])
def test_a_record_that_was_deleted_or_replaced_meanwhile_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_payload", chunk_of(db, 3, 1), 3))
    assert any("finding" in message for message in scanned(shard))
    again = Scanner._again

    def meanwhile(self: Scanner, key: bytes, *found: Any) -> Any:
        script = "from tests.fsck_damage import meanwhile; import sys; meanwhile(sys.argv[1], sys.argv[2] == 'True')"
        subprocess.run([sys.executable, "-c", script, str(shard), str(gone)], check=True)
        return again(self, key, *found)

    monkeypatch.setattr(Scanner, "_again", meanwhile)
    said = scanned(shard)
    assert [message for message in said if "finding" in message] == []
    assert sum(message.get("records", 0) for message in said) == 6


def keys_found(said: list[dict[str, Any]]) -> set[str]:
    return {message["finding"]["key"] for message in said if "finding" in message}


@pytest.mark.parametrize("plain", [False, True])
def test_records_that_ended_a_process_are_not_touched_again(tmp_path: Path, plain: bool) -> None:
    def damage(db: BlockDB) -> None:
        for number in (1, 3):
            lose_bit(db, "_payload", chunk_of(db, number, 1), 3)

    shard = damaged(tmp_path, damage)
    assert keys_found(scanned(shard, plain=plain)) == {key_of(1).hex(), key_of(3).hex()}
    said = scanned(shard, plain=plain, skip=[key_of(1).hex()])
    assert keys_found(said) == {key_of(3).hex()}
    assert sum(message.get("records", 0) for message in said) == 6, "they were looked at: by the process that ended"


@pytest.mark.parametrize("claim", [2**63, 2**64 - 1])
def test_a_damaged_header_counts_within_bounds(tmp_path: Path, claim: int) -> None:
    """What it says that it has stored may be any number: a sample of bytes, a rate and a range are reckoned with it."""

    def damage(db: BlockDB) -> None:
        for number in (2, 4):
            change(db, "_index", key_of(number), lambda v: v[:32] + claim.to_bytes(8, "little") + v[40:])

    shard = damaged(tmp_path, damage)
    said = scanned(shard, nbytes=2 * BYTES_AT_ONCE + 10**6)
    assert {key_of(2).hex(), key_of(4).hex()} <= keys_found(said)
    assert sum(message.get("records", 0) for message in said) == 6
    assert max(message.get("nbytes", 0) for message in said) < 2 * BYTES_AT_ONCE
    findings, summary = checked(shard)
    assert {(f.kind, f.key) for f in findings} == {("HEADER", key_of(2)), ("HEADER", key_of(4))}
    assert summary.nbytes < 3 * BYTES_AT_ONCE


@pytest.mark.parametrize("plain", [False, True])
def test_a_task_ends_with_its_part_of_a_sample_of_what_begins_so(many: Path, plain: bool) -> None:
    hashes = sorted(block_hashes(400))
    prefix = hashes[200][:1]
    meant = [SHAPE.prefix + h for h in hashes if h.startswith(prefix)]
    assert len(meant) > 1, "by luck alone"
    said = scanned(many, prefix=prefix, plain=plain)
    assert sum(message.get("records", 0) for message in said) == len(meant)
    *_, last = [message for message in scanned(many, prefix=prefix, records=1, plain=plain) if "upto" in message]
    assert (last["records"], last["end"]) == (1, False)
    assert meant[0] < bytes.fromhex(last["upto"]) <= meant[1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sample_of_a_prefix_is_a_part_of_the_records_that_begin_so(ranges: Path, jobs: int) -> None:
    hashes = block_hashes(400)
    prefix = max((h[:1] for h in hashes), key=lambda first: sum(h.startswith(first) for h in hashes))
    meant = sum(h.startswith(prefix) for h in hashes)
    assert checked(ranges, prefix=prefix, jobs=jobs)[1].records == meant
    part = checked(ranges, prefix=prefix, sample=Sample(share=0.5), jobs=jobs)[1]
    assert (part.records, part.total_records) == (-(-meant // 2), meant)


class Clock:
    """Time that passes where somebody sleeps, and when a test says so."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


def test_what_is_read_at_once_and_the_wait_behind_it_are_those_of_the_rate(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rate = Clock(), 200_000.0
    monkeypatch.setattr("kvstore.fsck.scanner.time", clock)
    steps = [message for message in scanned(many, rate=rate) if "upto" in message]
    nbytes, largest = sum(step["nbytes"] for step in steps), max(step["nbytes"] for step in steps)
    assert sum(step["records"] for step in steps) == 400
    assert len(steps) > 2
    assert largest < rate * PACED_S + max(step["nbytes"] / step["records"] for step in steps) + 1
    assert [round(s, 9) for s in clock.slept] == [round(step["nbytes"] / rate, 9) for step in steps]
    assert clock.now - 100 == pytest.approx(nbytes / rate)


def test_time_that_reading_took_counts_and_time_that_was_lost_is_not_made_up_for(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rate, mark = Clock(), 1000.0, Mark()
    monkeypatch.setattr("kvstore.fsck.scanner.time", clock)
    order = {"shard": str(many), "stage": "default", "prefix": "", "rate": rate, "device": "cpu"}
    scanner = Scanner(order, mark, lambda message: None)
    try:
        scanner._pace(500)
        scanner._pace(500)
        clock.now += 100
        scanner._pace(500)
        scanner._pace(0)
    finally:
        scanner.close()
        mark.close()
    assert clock.slept == pytest.approx([0.5, 0.5, 0.5, 0.0])


def test_snapshots_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = damaged(tmp_path, lambda db: lose_bit(db, "_payload", chunk_of(db, 3, 1), 3))
    monkeypatch.setattr("kvstore.fsck.scanner.SNAPSHOT_S", -1)
    begun, snapshot = list[int](), Reading.snapshot
    monkeypatch.setattr(Reading, "snapshot", lambda self: begun.append(1) or snapshot(self))
    said = scanned(shard)
    assert len(begun) == 1 + 6 + 1, "one for the keys, one a record, one for the second read"
    assert [m["finding"]["key"] for m in said if "finding" in m] == [key_of(3).hex()]


def test_a_survey_of_a_store_in_use_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = damaged(tmp_path, lambda db: recount(db, raw_bytes=1))
    reading = Reading(shard)
    try:
        assert reading.open_databases()
        monkeypatch.setattr("kvstore.fsck.survey.PATIENCE_S", -1.0)
        assert [finding.kind for finding in Survey(reading, b"", [], 10).run().findings] == ["ACCOUNTING"]
        monkeypatch.setattr(Reading, "last_transaction", lambda self: 2**40)
        with pytest.raises(TooLong):
            Survey(reading, b"", [], 10).run()
    finally:
        reading.close()


# --- beside an engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_store_that_is_written_meanwhile_gives_no_finding(tmp_path: Path, jobs: int) -> None:
    cache = make_cache(layers=4, blocks=32, tokens=64)
    ends, errors_seen = threading.Event(), list[BaseException]()

    def write() -> None:
        try:
            for turn in range(10**6):
                if ends.is_set():
                    return
                store.put_blocks(block_hashes(32, f"r{turn}"), range(32))
                if turn % 20 == 19:
                    store.clear()
        except BaseException as error:
            errors_seen.append(error)

    with open_store(tmp_path, cache, replace(SMALL, capacity_bytes=8 * MIB)) as store:
        store.put_blocks(block_hashes(32), range(32))
        writer = threading.Thread(target=write)
        writer.start()
        try:
            found = [checked(store.folder, "deep", jobs=jobs) for _ in range(3)]
        finally:
            ends.set()
            writer.join()
    assert errors_seen == []
    assert [findings for findings, _ in found] == [[]] * 3
    assert sum(summary.records for _, summary in found) > 0


def test_a_shard_in_a_folder_that_cannot_be_written_is_read_without_locks_unless_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = copied(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    reading = Reading(shard)
    assert reading.open_databases()
    reading.close()
    assert not (shard / "lock.mdb").exists()
    with opened(shard), pytest.raises(errors.StorePermissionError, match="being written"):
        Reading(shard)


def test_many_small_records_give_no_finding(tmp_path: Path) -> None:
    shard, record = tmp_path / "shard", record_of(SHAPE, HASHES[0])
    old = int(SHAPE.tags([HASHES[0]])[0])
    with opened(shard) as db:
        for request in range(30):
            hashes = block_hashes(100, f"r{request}")
            tags = SHAPE.tags(hashes).tolist()
            put(
                db,
                *(
                    replace(
                        record,
                        header=replace(
                            record.header,
                            key=SHAPE.prefix + block_hash,
                            tagged_checksum=record.header.tagged_checksum ^ old ^ tag,
                        ),
                    )
                    for block_hash, tag in zip(hashes, tags, strict=True)
                ),
            )
    findings, summary = checked(shard, "deep", jobs=2)
    assert (findings, summary.records, summary.total_records) == ([], 3000, 3000)


def test_a_folder_that_is_no_shard_is_misuse(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(errors.StorePathError):
            checked(folder)


# --- scope -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5%", Sample(share=0.05)),
        ("0.5%", Sample(share=0.005)),
        ("100%", Sample(share=1.0)),
        ("1/4", Sample(share=0.25)),
        ("20G", Sample(nbytes=20 * 2**30)),
        ("1.5MiB", Sample(nbytes=3 * 2**19)),
        ("7", Sample(nbytes=7)),
    ],
)
def test_samples_are_parsed(text: str, expected: Sample) -> None:
    assert parse_sample(text) == expected


@pytest.mark.parametrize("text", ["", "0%", "101%", "5/4", "1/0", "0", "-1", "5 %", "1e3", "20X", "1/2/3", "٣%", "nan"])
def test_what_is_no_sample_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigError):
        parse_sample(text)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": "all"},
        {"jobs": 0},
        {"rate_limit": 0.0},
        {"max_duration_s": -1.0},
        {"device": "tpu"},
        {"prefix": bytes(99)},
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        Options(**options)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard of 400 small records. Tests leave nothing but a checkpoint in it."""
    shard = tmp_path_factory.mktemp("many") / "shard"
    with opened(shard) as db:
        put(db, *(record_of(SHAPE, h, seed=n) for n, h in enumerate(block_hashes(400))))
    return shard


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch, many: Path) -> Path:
    """The same, checked in ranges of 20 records, without a checkpoint."""
    monkeypatch.setattr("kvstore.fsck.scan.SMALL_RANGE", 20)
    (many / checkpoint.NAME).unlink(missing_ok=True)
    return many


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (1, [100, 20]),
        (RANGE_BYTES // 30 + 1, [30, 30, 30, 30]),
        (RANGE_BYTES, [25, 25, 25, 25, 20]),
        (2**62, [25] * 4 + [20]),
    ],
)
def test_large_records_make_smaller_ranges_and_not_any_number_of_them(nbytes: int, expected: list[int]) -> None:
    cuts = Cuts([], 100)
    for number in range(120):
        cuts.add(bytes([number]), nbytes)
    assert [r.records for r in cuts.ranges] == expected
    assert sum(r.nbytes for r in cuts.ranges) == 120 * nbytes
    assert [r.start for r in cuts.ranges[1:]] == [r.end for r in cuts.ranges[:-1]]
    assert (cuts.ranges[0].start, cuts.ranges[-1].end) == (b"", b"")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sample_is_a_part_of_the_records(ranges: Path, jobs: int) -> None:
    whole = checked(ranges, jobs=jobs)[1]
    assert whole.records == whole.total_records == 400
    part = checked(ranges, sample=Sample(share=0.1), jobs=jobs)[1]
    assert (part.records, part.total_records, part.cancelled) == (40, 400, False)
    nbytes = whole.nbytes // 10
    part = checked(ranges, sample=Sample(nbytes=nbytes), jobs=jobs)[1]
    assert nbytes <= part.nbytes < nbytes + jobs * whole.nbytes // 100
    assert not (ranges / checkpoint.NAME).exists()


def test_a_prefix_is_of_block_hashes_or_of_index_keys(tmp_path: Path) -> None:
    def damage(db: BlockDB) -> None:
        for number in (1, 2):
            lose_bit(db, "_payload", chunk_of(db, number, 1), 3)
        change(db, "_payload", chunk_of(db, 4, 1), lambda v: None)

    shard = damaged(tmp_path, damage)
    findings, summary = checked(shard, prefix=HASHES[2][:4])
    assert ([(f.kind, f.key) for f in findings], summary.records) == ([("STORAGE_HASH", key_of(2))], 1)
    assert kinds(shard, prefix=key_of(4)[:30]) == {("MISSING_CHUNK", key_of(4))}
    assert checked(shard, prefix=SHAPE.prefix)[1].records == 6
    assert checked(shard, prefix=b"nothing")[1].records == 0


def test_a_pass_goes_on_where_it_was_cancelled(ranges: Path) -> None:
    seen, first = threading.Event(), list[Any]()
    for item in check(ranges, Options(rate_limit=400_000.0), seen):
        first.append(item)
        if isinstance(item, Progress) and item.records:
            seen.set()
    done = first[-1]
    assert isinstance(done, Summary)
    assert done.cancelled
    assert 0 < done.records < 400
    assert (ranges / checkpoint.NAME).stat().st_mode & 0o777 == 0o600
    rest = checked(ranges, resume=True)[1]
    assert rest.records == 400 - done.records
    assert not rest.cancelled
    assert checked(ranges, resume=True)[1].records == 400, "the pass was through, and another one began"


def test_closing_a_check_leaves_a_checkpoint_and_no_process(ranges: Path) -> None:
    going = check(ranges, Options(rate_limit=400_000.0, jobs=2))
    for item in going:
        if isinstance(item, Progress) and item.records:
            break
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    assert len(children.read_text().split()) >= 2
    going.close()  # type: ignore[attr-defined]
    assert children.read_text().split() == []
    assert checkpoint.load(ranges, int(time.time()))[0].parts
    assert 0 < checked(ranges, resume=True)[1].records < 400


def test_a_duration_ends_a_check_and_the_next_one_goes_on(ranges: Path) -> None:
    part = checked(ranges, rate_limit=100_000.0, max_duration_s=1.5)[1]
    assert part.cancelled
    assert part.seconds < 6
    assert scan.TIME_IS_OVER in part.unchecked
    assert part.records + checked(ranges, resume=True)[1].records == 400


def test_the_least_recently_checked_come_first(ranges: Path) -> None:
    keys = sorted(SHAPE.prefix + h for h in block_hashes(400))
    old, new = int(time.time()) - 1000, int(time.time()) - 10
    parts = (checkpoint.Part(b"", keys[100], new, 1), checkpoint.Part(keys[100], keys[160], old, 1))
    assert checkpoint.save(ranges, checkpoint.Checkpoint(parts, 0, 1)) == ""
    assert checked(ranges, resume=True, sample=Sample(nbytes=10**6), jobs=2)[1].records == 400
    (ranges / checkpoint.NAME).unlink()
    every = (*parts, checkpoint.Part(keys[160], b"", new - 5, 1))
    checkpoint.save(ranges, checkpoint.Checkpoint(every, 0, 1))
    assert checked(ranges, resume=True, sample=Sample(share=0.15))[1].records == 60
    found = checkpoint.load(ranges, int(time.time()))[0]
    assert found.checked(keys[100], keys[160], 1) >= new + 10
    assert found.checked(keys[0], keys[100], 1) == new
    assert found.checked(keys[160], b"", 1) == new - 5


def test_a_damaged_record_stays_unchecked(ranges: Path, tmp_path: Path) -> None:
    shard = tmp_path / "shard"
    with opened(shard) as db:
        put(db, *(record_of(SHAPE, h, seed=n) for n, h in enumerate(block_hashes(60))))
        key = sorted(bytes(k) for k, _ in db.entries())[30]
        header = parsed(value(db, "_index", key))
        lose_bit(db, "_payload", chunk_key(header.sequence, 1), 9)
    for _ in range(2):
        assert kinds(shard, resume=True) == {("STORAGE_HASH", key)}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"{}",
        b"[" * 10**5,
        b'{"schema":1,"stage":"default","begun":1,"prefix":"","parts":[["zz","",1,"default"]]}',
        b'{"schema":1,"stage":"default","begun":1,"prefix":"","parts":[["","",99999999999999,"default"]]}',
        b'{"schema":1,"stage":"default","begun":true,"prefix":"","parts":[]}',
        b'{"schema":1,"stage":"default","begun":1,"prefix":"","parts":[["","",1,"default"],["00","",1,"default"]]}',
        b'{"schema":2,"stage":"default","begun":1,"prefix":"","parts":[]}',
        b" " * (checkpoint.MAX_BYTES + 1),
    ],
)
def test_a_checkpoint_that_is_none_is_ignored_and_told(ranges: Path, text: bytes) -> None:
    (ranges / checkpoint.NAME).write_bytes(text)
    summary = checked(ranges, resume=True)[1]
    assert summary.records == 400
    assert "checkpoint" in summary.unchecked[0]


def test_a_checkpoint_is_not_followed_elsewhere(ranges: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (ranges / checkpoint.NAME).symlink_to(tmp_path / "other")
    summary = checked(ranges, resume=True)[1]
    assert "checkpoint" in summary.unchecked[0]
    assert (tmp_path / "other").read_text() == "mine"


def test_parts_replace_what_they_cover() -> None:
    part = checkpoint.Part
    old = (part(b"", b"m", 5, 1), part(b"m", b"", 7, 1))
    new = checkpoint.added(old, [part(b"c", b"e", 9, 1), part(b"e", b"f", 9, 1), part(b"x", b"", 9, 2)])
    assert new == (
        part(b"", b"c", 5, 1),
        part(b"c", b"f", 9, 1),
        part(b"f", b"m", 5, 1),
        part(b"m", b"x", 7, 1),
        part(b"x", b"", 9, 2),
    )
    assert checkpoint.Checkpoint(new).checked(b"a", b"z", 1) == 5
    assert checkpoint.Checkpoint(new).checked(b"c", b"e", 1) == 9
    assert checkpoint.Checkpoint(new).checked(b"c", b"e", 2) == 0


def test_a_rate_limit_holds(ranges: Path) -> None:
    whole = checked(ranges)[1]
    slow = checked(ranges, rate_limit=whole.nbytes / 2)[1]
    assert slow.records == 400
    assert 1.0 < slow.seconds < 2 * whole.seconds + 6


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["small", "wide"])
def test_sums_by_torch_are_those_of_the_loops(shape: Any) -> None:
    record = record_of(shape, HASHES[0], position=5, valid=3)
    block = raw_block(shape, 3, 0)
    first = np.array([5 * shape.block_size], np.int64)
    span = Span(5, np.zeros(1, np.int64), first, np.array([3], np.int64))
    assert (torch_sums("cpu", record.header, shape, block) == staging_sums(shape)(span, block[None])[0]).all()


def test_a_device_that_is_not_there_is_misuse(clean: Path) -> None:
    import torch

    if torch.cuda.is_available():
        assert kinds(clean, "deep", device="cuda") == set()
    else:
        with pytest.raises(errors.ConfigError, match="cuda"):
            checked(clean, "deep", device="cuda")
