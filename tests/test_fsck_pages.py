"""The story: a data.mdb is read page by page, believing nothing. An intact file is read rightly, LMDB's own figures are the
witness; whatever else is in it, reading ends soon, takes bounded memory and raises nothing.
"""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.fsck.pagemap import FORMS, KINDS, page_map, pages_of
from kvstore.fsck.pages import (
    HEAD,
    NO_ROOT,
    P_BRANCH,
    P_LEAF,
    PAGE_SIZES,
    PageFile,
    children,
    free_pages,
    leaf_nodes,
    page_kind,
    parse_meta,
)
from kvstore.record import chunk_key
from kvstore.storefile import DATA_NAME
from tests.fsck_repairs import PAGE, Subject, filled
from tests.support import MIB

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return filled(tmp_path_factory.mktemp("subject") / "shard", 120)


def everything(path: Path) -> None:
    """Read a file in every way there is."""
    page_map(path, 100, [(0, 3), (2**60, 2**60), (-1, 5)])
    pages_of(path, [b"", b"key", bytes(34), b"\xff" * 511])
    with PageFile(path) as file:
        for meta in file.metas:
            for root in (meta.free.root, meta.main.root):
                for number, data in file.walk(root):
                    assert page_kind(data, number) in (P_BRANCH, P_LEAF)
                    for node in leaf_nodes(data):
                        assert len(file.value(data, node)) <= max(node.size, 0)
                file.find(root, b"key")
        assert file.at(-1, 10) == file.at(file.size, 10) == file.page(2**60) == b""


def test_what_is_found_is_what_lmdb_says(subject: Subject) -> None:
    with lmdb.open(str(subject.folder), max_dbs=4, readonly=True, lock=False, lib_version=0) as env:
        info, names = env.info(), (b"index", b"payload", b"meta", b"quarantine")
        databases = {name: env.open_db(name, create=False) for name in names}
        with env.begin() as txn, PageFile(subject.folder / DATA_NAME) as file:
            meta, found = file.metas[0], file.databases(file.metas[0])
            assert (meta.txn, meta.last_page, meta.map_size) == (info["last_txnid"], info["last_pgno"], 256 * MIB)
            assert found.keys() == databases.keys()
            mapped = page_map(subject.folder / DATA_NAME)
            assert mapped.whole
            assert mapped.page_bytes == PAGE
            assert mapped.counts.sum() == mapped.pages
            for name, database in databases.items():
                stat, tree = txn.stat(database), found[name]
                assert tree.entries == stat["entries"]
                assert tree.depth == stat["depth"]
                pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                assert mapped.total("notes" if name == b"meta" else name.decode()) == pages
                entries = {
                    node.key: file.value(data, node) for _, data in file.walk(tree.root) for node in leaf_nodes(data)
                }
                assert entries == dict(txn.cursor(db=database))
    assert mapped.total("unknown") == 0, "every page is in use or free"
    assert np.bincount(mapped.forms, minlength=len(FORMS))[FORMS.index("overflow")] > 0


def test_the_pages_of_a_record_hold_its_chunks(subject: Subject) -> None:
    key = sorted(subject.records)[7]
    with lmdb.open(str(subject.folder), max_dbs=4, readonly=True, lock=False, lib_version=0) as env:
        index, payload = (env.open_db(name, create=False) for name in (b"index", b"payload"))
        with env.begin() as txn:
            sequence = int.from_bytes(txn.get(key, db=index)[40:48], "little")
            chunks = [txn.get(chunk_key(sequence, number), db=payload) for number in range(9)]
    found = pages_of(subject.folder / DATA_NAME, [key])
    bodies = [subject.data[first * PAGE : (first + count) * PAGE] for first, count in found]
    assert all(any(chunk in body for body in bodies) for chunk in chunks if chunk is not None)
    assert key in bodies[0]
    assert pages_of(subject.folder / DATA_NAME, [b"no such key"]) == []


def test_damage_is_shown_where_it_lies(subject: Subject) -> None:
    found = pages_of(subject.folder / DATA_NAME, sorted(subject.records)[:3])
    mapped = page_map(subject.folder / DATA_NAME, 10, found)
    assert mapped.total("damaged") == len({page for first, n in found for page in range(first, first + n)})
    assert mapped.counts.shape == (10, len(KINDS))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_survived(subject: Subject, tmp_path: Path, seed: int) -> None:
    chance, data = random.Random(seed), bytearray(subject.data)
    with PageFile(subject.folder / DATA_NAME) as file:
        trees = [number for number, _ in file.walk(file.metas[0].main.root)] + list(range(2))
        for tree in file.databases(file.metas[0]).values():
            trees += [number for number, _ in file.walk(tree.root)]
    for _ in range(chance.randint(1, 60)):
        page = chance.choice(trees)
        at = page * PAGE + chance.choice((chance.randrange(PAGE), chance.randrange(40)))
        new = chance.choice((b"\xff" * 8, bytes(8), chance.randbytes(8), chance.choice(trees).to_bytes(8, "little")))
        data[at : at + 8] = new
    (tmp_path / DATA_NAME).write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
    begun = time.monotonic()
    everything(tmp_path / DATA_NAME)
    assert time.monotonic() - begun < DEADLINE_S


@pytest.mark.parametrize("size", [0, 1, 15, 16, 151, 4095, 4096, 8191, 8192, 100_000])
def test_random_bytes_are_survived(tmp_path: Path, size: int) -> None:
    (tmp_path / DATA_NAME).write_bytes(random.Random(size).randbytes(size))
    everything(tmp_path / DATA_NAME)


def crafted(subject: Subject, tmp_path: Path, fill: bytes) -> Path:
    """A file whose meta pages are intact and name page 2 as every root, and whose other pages are all made by `fill`."""
    data = bytearray(subject.data[: 2 * PAGE])
    for meta in range(2):
        for place in (80, 128):
            struct.pack_into("<Q", data, meta * PAGE + place, 2)
    pages = 2048
    body = b"".join(number.to_bytes(8, "little") + fill[8:PAGE] for number in range(2, pages))
    (tmp_path / DATA_NAME).write_bytes(bytes(data) + body)
    return tmp_path / DATA_NAME


def leaf_page(node: bytes, count: int) -> bytes:
    """A leaf of so many times the same node."""
    place = PAGE - len(node)
    head = HEAD.pack(0, 0, P_LEAF, 16 + 2 * count, place)
    return (head + struct.pack("<H", place) * count).ljust(place, b"\0") + node


def branch_page(child: int, count: int) -> bytes:
    place = PAGE - 8
    head = HEAD.pack(0, 0, P_BRANCH, 16 + 2 * count, place)
    node = struct.pack("<HHHH", child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, 0)
    return (head + struct.pack("<H", place) * count).ljust(place, b"\0") + node


@pytest.mark.parametrize(
    "fill",
    [
        branch_page(2, 2000),
        branch_page(2**48 - 1, 2000),
        leaf_page(struct.pack("<HHHH", 0xFFFF, 0xFFFF, 1, 8) + bytes(8) + (3).to_bytes(8, "little"), 2000),
        leaf_page(struct.pack("<HHHH", 0xFFFF, 0xFFFF, 1, 8) + bytes(8) + b"\xff" * 8, 2000),
        leaf_page(
            struct.pack("<HHHH", 48, 0, 2, 5) + b"index" + struct.pack("<IHHQQQQQ", 0, 0, 9, 1, 1, 1, 1, 2), 2000
        ),
    ],
    ids=["loop", "far child", "huge value", "far value", "databases in databases"],
)
def test_loops_and_huge_counts_end_soon(subject: Subject, tmp_path: Path, fill: bytes) -> None:
    path = crafted(subject, tmp_path, fill)
    with PageFile(path) as file:
        assert file.metas
        assert file.metas[0].main.root == 2
    tracemalloc.start()
    begun = time.monotonic()
    mapped = page_map(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - begun < DEADLINE_S
    assert peak < 8 * MIB
    assert mapped.counts.sum() == mapped.pages
    everything(path)


def test_every_page_leads_to_every_other(subject: Subject, tmp_path: Path) -> None:
    """A walk visits each page once, though each branch names two hundred, and remembers no more than the file has."""
    chance = random.Random(1)
    place = PAGE - 8 * 200
    pointers = struct.pack("<200H", *range(place, PAGE, 8))
    head = (HEAD.pack(0, 0, P_BRANCH, 16 + 400, place) + pointers).ljust(place, b"\0")
    path = crafted(subject, tmp_path, bytes(PAGE))
    data = bytearray(path.read_bytes())
    for number in range(2, 2048):
        nodes = b"".join(struct.pack("<HHHH", chance.randrange(2, 2048), 0, 0, 0) for _ in range(200))
        data[number * PAGE : (number + 1) * PAGE] = number.to_bytes(8, "little") + head[8:] + nodes
    path.write_bytes(data)
    with PageFile(path) as file:
        walked = [number for number, _ in file.walk(2)]
        assert len(walked) == len(set(walked)) > 1000
        assert len(children(file.page(2))) == 200


def test_metas_and_page_sizes(subject: Subject, tmp_path: Path) -> None:
    first, second = (parse_meta(subject.data[at : at + PAGE], n) for n, at in enumerate((0, PAGE)))
    assert first
    assert second
    assert abs(first.txn - second.txn) == 1
    assert PAGE_SIZES[0] == first.page_bytes
    assert NO_ROOT == 2**64 - 1
    for gone in range(2):
        data = bytearray(subject.data)
        data[gone * PAGE : (gone + 1) * PAGE] = b"\xee" * PAGE
        (tmp_path / DATA_NAME).write_bytes(data)
        with PageFile(tmp_path / DATA_NAME) as file:
            assert [meta.page for meta in file.metas] == [1 - gone]
            assert file.page_bytes == PAGE
    (tmp_path / DATA_NAME).write_bytes(b"\xee" * 2 * PAGE + subject.data[2 * PAGE :])
    with PageFile(tmp_path / DATA_NAME) as file:
        assert (file.metas, file.page_bytes) == ([], PAGE)
    assert not page_map(tmp_path / DATA_NAME).whole


def test_an_entry_of_the_free_list_has_no_more_than_it_has() -> None:
    assert free_pages(struct.pack("<3Q", 2, 9, 7)).tolist() == [9, 7]
    assert free_pages(struct.pack("<3Q", 2**64 - 1, 9, 7)).tolist() == [9, 7]
    assert free_pages(b"").size == free_pages(b"1234567").size == 0
