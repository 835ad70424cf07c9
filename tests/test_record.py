"""A record's bytes: what is written parses as itself, and what is not intact is a Rejection, never an exception.

The first half has no store: headers and directories from random values, cut, prolonged, flipped and crafted. The second
puts crafted records into a store: each check of docs/format.md in its order, a newer version, and pickles, which must lie
where they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVStore, PagedKVCache
from kvstore.geometry import MAX_RUNS, RUN, chunk_plan, describe
from kvstore.record import (
    FIXED,
    MAX_HEADER_BYTES,
    SEQUENCE_FIELD,
    VERSION,
    Directory,
    Header,
    check_chunk,
    chunk_key,
    directory_bytes,
    header_hash,
    parse_directory,
    parse_header,
    record_key,
)
from kvstore.results import REJECTION_KINDS, Rejection
from tests.support import Raw, block_hashes, flip, index_key, make_cache, open_store
from tests.test_format import constant, table, take_apart

FEW = settings(max_examples=60, deadline=None, derandomize=True)
MANY = settings(max_examples=300, deadline=None, derandomize=True)
U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
RUNS = st.builds(RUN.pack, U32, U16, U16, U16, U16, U32, U32)
KEYS = st.builds(record_key, st.binary(min_size=16, max_size=16), U16, st.binary(min_size=8, max_size=64))
WIDTHS: dict[str, st.SearchStrategy[int]] = {
    **dict.fromkeys(("codec", "eviction_class"), U8),
    **dict.fromkeys(("block_size", "valid_tokens", "directory_length", "accesses"), U32),
    **dict.fromkeys(("raw_length", "stored_length", "position", "fingerprint"), U64),
    **dict.fromkeys(("tagged_checksum", "directory_hash"), U64),
}
HEADERS: st.SearchStrategy[Header] = st.builds(
    Header,
    key=KEYS,
    parent=st.one_of(st.just(b""), st.binary(min_size=8, max_size=64)),
    geometry=st.lists(RUNS, min_size=1, max_size=MAX_RUNS).map(b"".join),
    **WIDTHS,
)


def sample_header(**changes: Any) -> Header:
    """A header of ordinary values."""
    fields: dict[str, Any] = {name: 7 + i for i, name in enumerate(WIDTHS)}
    fields |= {"key": record_key(b"i" * 16, 3, b"h" * 32), "parent": b"p" * 32, "geometry": b"g" * 20}
    return Header(**fields | changes)


def rehashed(data: bytes) -> bytes:
    """A header's bytes with the hash that they should have."""
    return data[:8] + struct.pack("<Q", header_hash(data)) + data[16:]


def patched(data: bytes, name: str, value: int) -> bytes:
    """A header with one field of the document's table changed, and its hash right again."""
    row = next(row for row in table("Header") if row["name"] == name)
    start, size = int(row["offset"]), int(row["size"])
    return rehashed(data[:start] + value.to_bytes(size, "little") + data[start + size :])


# --- headers -----------------------------------------------------------------------------------------------------


@MANY
@given(HEADERS, U64, U64)
def test_a_header_parses_as_what_was_encoded(header: Header, sequence: int, now: int) -> None:
    written = replace(header, sequence=sequence, written=now, last_touch=now)
    data = header.encode(sequence, now)
    assert parse_header(data) == parse_header(data, header.key) == written


@FEW
@given(HEADERS, U64, U64)
def test_each_field_lies_where_the_document_says(header: Header, sequence: int, now: int) -> None:
    fields = take_apart("Header", header.encode(sequence, now))
    written = replace(header, sequence=sequence, written=now, last_touch=now)
    assert {name: fields[name] for name in dataclasses.asdict(written)} == dataclasses.asdict(written)


def test_the_documents_constants_are_the_codes() -> None:
    constants = {"VERSION": VERSION, "FIXED_BYTES": FIXED.size, "MAX_HEADER_BYTES": MAX_HEADER_BYTES}
    assert {name: constant(name) for name in constants} == constants
    assert sample_header().encode(2**40 + 5, 0)[SEQUENCE_FIELD] == struct.pack("<Q", 2**40 + 5)
    kinds = {row["otherwise"] for row in table("Order of checks")}
    assert kinds == set(REJECTION_KINDS) - {"io"} | {"miss"}


def largest_header() -> Header:
    """The longest key, parent and geometry that can be."""
    key = record_key(b"\xff" * 16, 2**16 - 1, b"\xff" * 64)
    return sample_header(key=key, parent=b"\xff" * 64, geometry=b"\xff" * RUN.size * MAX_RUNS)


def test_the_largest_header_is_within_the_bound_and_parses() -> None:
    data = largest_header().encode(1, 2)
    assert len(data) <= MAX_HEADER_BYTES
    assert isinstance(parse_header(data), Header)


def test_a_header_of_the_greatest_length_stays_in_a_leaf_page(tmp_path: Path) -> None:
    key = largest_header().key
    with lmdb.open(str(tmp_path), lib_version=0) as env:
        if env.stat()["psize"] != 4096:
            pytest.skip("the bound is for pages of 4,096 bytes")
        for size, overflow in ((MAX_HEADER_BYTES, 0), (2100, 1)):
            with env.begin(write=True) as txn:
                txn.put(key, bytes(size))
                assert txn.stat()["overflow_pages"] == overflow


@MANY
@given(st.binary(max_size=2100))
def test_arbitrary_bytes_are_a_rejection(data: bytes) -> None:
    for given_bytes in (data, sample_header().encode(1, 2)[:16] + data):
        found = parse_header(given_bytes)
        assert isinstance(found, Rejection)
        assert found.kind == "header"


@FEW
@given(HEADERS)
def test_every_truncation_is_a_rejection(header: Header) -> None:
    data = header.encode(1, 2)
    assert {parse_header(data[:length]).kind for length in range(len(data))} == {"header"}  # type: ignore[union-attr]


@MANY
@given(HEADERS, st.binary(min_size=1, max_size=200))
def test_every_extension_is_a_rejection(header: Header, more: bytes) -> None:
    assert isinstance(parse_header(header.encode(1, 2) + more), Rejection)
    assert isinstance(parse_header(header.encode(1, 2) + bytes(len(more))), Rejection)


@pytest.mark.parametrize("header", [sample_header(), sample_header(parent=b""), largest_header()])
def test_every_single_flipped_bit_is_a_rejection_of_the_header(header: Header) -> None:
    data = header.encode(2**50 + 1, 2**50)
    kinds = [getattr(parse_header(flip(data, bit), header.key), "kind", None) for bit in range(len(data) * 8)]
    assert set(kinds) == {"header"}


@MANY
@given(HEADERS, st.lists(st.tuples(st.integers(16, 2000), U8), max_size=6), U16)
def test_crafted_headers_never_raise_and_never_exceed_their_length(
    header: Header, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(header.encode(1, 2))
    for place, value in changes:
        data[16 + (place - 16) % (len(data) - 16)] = value
    for said in (len(data), length):
        struct.pack_into("<H", data, 6, said)
        found = parse_header(rehashed(bytes(data)))
        if isinstance(found, Header):
            fields = take_apart("Header", bytes(data))
            assert said == len(data) == FIXED.size + len(found.key) + len(found.parent) + len(found.geometry)
            assert len(found.geometry) == fields["num_runs"] * RUN.size <= MAX_RUNS * RUN.size


@pytest.mark.parametrize("name", ["key_length", "parent_length", "num_runs"])
def test_a_header_whose_parts_do_not_fill_it_is_a_rejection_under_a_right_hash(name: str) -> None:
    data = sample_header(geometry=bytes(3 * RUN.size)).encode(1, 2)
    right = take_apart("Header", data)[name]
    for value in {0, right - 1, right + 1, 255} - {right}:
        found = parse_header(patched(data, name, value))
        assert isinstance(found, Rejection)
        assert found.kind == "header"


def test_a_header_of_another_length_than_it_says_is_a_rejection_under_a_right_hash() -> None:
    data = sample_header().encode(1, 2)
    for length in (0, FIXED.size, len(data) - 1, len(data) + 1, 2**16 - 1):
        found = parse_header(patched(data, "header_length", length))
        assert isinstance(found, Rejection)
        assert found.kind == "header"


def test_a_header_under_another_key_is_a_rejection_of_the_key() -> None:
    header = sample_header()
    data = header.encode(1, 2)
    for other in (header.key[:-1] + b"x", header.key + b"h", header.key[:-1], b"", flip(header.key, 16 * 8)):
        found = parse_header(data, other)
        assert isinstance(found, Rejection)
        assert found.kind == "key"


@MANY
@given(HEADERS, st.integers(2, 2**16 - 1), st.binary(max_size=60))
def test_a_newer_version_is_told_from_damage(header: Header, version: int, more: bytes) -> None:
    data = header.encode(1, 2)[: MAX_HEADER_BYTES - len(more)] + more
    newer = rehashed(data[:4] + struct.pack("<HH", version, len(data)) + data[8:])
    for key in (None, header.key, b"another"):
        found = parse_header(newer, key)
        assert isinstance(found, Rejection)
        assert (found.kind, str(version) in found.detail) == ("version", True)


def test_an_unknown_checksum_algorithm_is_a_rejection_of_the_version() -> None:
    found = parse_header(patched(sample_header().encode(1, 2), "algorithm", 2))
    assert isinstance(found, Rejection)
    assert found.kind == "version"


# --- directories and chunks --------------------------------------------------------------------------------------


@st.composite
def directories(draw: st.DrawFn) -> tuple[Any, Directory]:
    """A plan and a directory of it."""
    plan = chunk_plan(draw(st.lists(st.integers(1, 40_000).map(lambda n: n * 16), min_size=1, max_size=20)))
    random = np.random.default_rng(draw(U32))
    sums, hashes = (random.integers(0, 2**64, n, np.uint64) for n in (plan.num_slices, plan.num_chunks))
    return plan, Directory(sums, random.integers(0, 2**32, plan.num_chunks), hashes)


def owner(data: bytes) -> Header:
    """A header that names these bytes as its directory."""
    return sample_header(directory_length=len(data), directory_hash=xxhash.xxh3_64_intdigest(data))


@FEW
@given(directories())
def test_a_directory_parses_as_what_was_encoded(made: tuple[Any, Directory]) -> None:
    plan, directory = made
    data = directory.encode()
    found = parse_directory(memoryview(data), owner(data), plan)
    assert isinstance(found, Directory)
    assert len(data) == directory_bytes(plan)
    assert found.encode() == data
    for name in ("slice_sums", "lengths", "hashes"):
        assert getattr(found, name).tolist() == getattr(directory, name).tolist()


@FEW
@given(directories(), st.data())
def test_a_damaged_directory_is_a_rejection_of_its_hash(made: tuple[Any, Directory], data: st.DataObject) -> None:
    plan, directory = made
    good = directory.encode()
    bit, length = data.draw(st.integers(0, len(good) * 8 - 1)), data.draw(st.integers(0, len(good) - 1))
    damaged = (flip(good, bit), good[:length], good + bytes(1 + length))
    for found in [parse_directory(memoryview(bad), owner(good), plan) for bad in damaged]:
        assert isinstance(found, Rejection)
        assert found.kind == "storage_hash"


@FEW
@given(directories(), st.binary(max_size=300))
def test_a_directory_of_a_length_that_the_plan_has_not_is_refused_under_a_right_hash(
    made: tuple[Any, Directory], other: bytes
) -> None:
    plan, directory = made
    for data in (other, directory.encode() + bytes(12), directory.encode()[:-12]):
        if len(data) != directory_bytes(plan):
            assert isinstance(parse_directory(memoryview(data), owner(data), plan), Rejection)
    assert isinstance(parse_directory(None, owner(directory.encode()), plan), Rejection)


def test_a_chunk_is_accepted_with_its_length_and_hash_alone() -> None:
    data = bytes(range(256))
    digest = xxhash.xxh3_64_intdigest(data)
    assert check_chunk(memoryview(data), 1, 256, digest) is None
    wrong = [check_chunk(memoryview(flip(data, bit)), 1, 256, digest) for bit in range(256 * 8)]
    wrong += [check_chunk(memoryview(data), 1, 255, digest), check_chunk(memoryview(data[:-1]), 1, 256, digest)]
    wrong += [check_chunk(None, 1, 256, digest), check_chunk(memoryview(data), 1, 256, digest ^ 1)]
    assert {getattr(found, "kind", None) for found in wrong} == {"storage_hash"}


# --- crafted records in a store: the order of the checks ---------------------------------------------------------


@dataclass
class Crafted:
    """A stored record taken apart, to be put together again with faults but right hashes."""

    header: Header
    directory: Directory
    chunks: list[bytes]
    patches: dict[str, int] = field(default_factory=dict)
    header_hash_xor: int = 0
    directory_hash_xor: int = 0
    has_directory: bool = True
    cut: int | None = None

    def put(self, raw: Raw, key: bytes) -> bytes:
        """Write it; its index entry."""
        directory = self.directory.encode()
        digest = xxhash.xxh3_64_intdigest(directory) ^ self.directory_hash_xor
        data = replace(self.header, directory_hash=digest).encode(self.header.sequence, self.header.written)
        for name, value in self.patches.items():
            data = patched(data, name, value)
        entry = (data[:8] + bytes([data[8] ^ self.header_hash_xor]) + data[9:])[: self.cut]
        raw.put_entry(key, entry)
        raw.put_chunk(chunk_key(self.header.sequence, 0), directory if self.has_directory else None)
        for number, chunk in enumerate(self.chunks, 1):
            raw.put_chunk(chunk_key(self.header.sequence, number), chunk)
        return entry

    def change(self, **fields: Any) -> None:
        """Change fields of the header."""
        self.header = replace(self.header, **fields)

    def shorten(self) -> None:
        """The first chunk loses a byte, and everything that names it says so."""
        self.chunks[0] = self.chunks[0][:-1]
        self.directory.lengths[0] -= 1
        self.directory.hashes[0] = xxhash.xxh3_64_intdigest(self.chunks[0])
        self.change(stored_length=self.header.stored_length - 1)

    def lengthen(self) -> None:
        """The directory says that the first chunk has a byte more than raw."""
        more = sum(self.header.raw_length - n for n in self.directory.lengths[:1].tolist()) + 1
        self.directory.lengths[0] += more
        self.change(stored_length=self.header.stored_length + more)


def damage_chunk(record: Crafted) -> None:
    record.chunks[0] = flip(record.chunks[0], 99)


FAULTS: dict[int, Callable[[Crafted], None]] = {
    2: lambda r: setattr(r, "cut", FIXED.size - 1),
    3: lambda r: setattr(r, "header_hash_xor", 1),
    4: lambda r: r.patches.update(version=2),
    5: lambda r: r.patches.update(num_runs=2),
    6: lambda r: r.patches.update(algorithm=2),
    7: lambda r: r.change(key=flip(r.header.key, 200)),
    8: lambda r: r.change(fingerprint=r.header.fingerprint ^ 1),
    9: lambda r: r.change(block_size=r.header.block_size + 1),
    10: lambda r: r.change(position=r.header.position + 1),
    11: lambda r: r.change(valid_tokens=r.header.valid_tokens - 1),
    12: lambda r: r.change(codec=99),
    13: lambda r: setattr(r, "has_directory", False),
    14: lambda r: setattr(r, "directory_hash_xor", 1),
    15: Crafted.lengthen,
    16: damage_chunk,
    17: Crafted.shorten,
    18: lambda r: r.change(tagged_checksum=r.header.tagged_checksum ^ 1),
}
ORDER = {int(row["step"]): row["otherwise"] for row in table("Order of checks")}
BLAMED = {"header", "key", "storage_hash", "decode", "content"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, io: str) -> Iterator[KVStore]:
    """One store for all crafted records."""
    with open_store(tmp_path_factory.mktemp("crafted"), make_cache()) as store:
        yield store


HASHES = block_hashes(3)


def craft(store: KVStore) -> tuple[Crafted, Raw, bytes]:
    """A fresh record of the first hash, taken apart."""
    put = store.put_blocks(HASHES[:1], [0])
    assert put.stored.all()
    raw, key = Raw(store), index_key(store, HASHES[0])
    header = parse_header(raw.entry(key) or b"", key)
    assert isinstance(header, Header)
    plan, payload = store._views[0].shape.plan, raw.payload()
    directory = parse_directory(memoryview(payload[chunk_key(header.sequence, 0)]), header, plan)
    assert isinstance(directory, Directory)
    chunks = [payload[chunk_key(header.sequence, n)] for n in range(1, plan.num_chunks + 1)]
    return Crafted(header, directory, chunks), raw, key


def outcome(store: KVStore) -> tuple[str, bool]:
    """What a load of the first hash answers, and whether it blames the record."""
    got = store.get_blocks(HASHES[:1], [5])
    if got.missing[0]:
        return "miss", False
    return (got.rejected[0].kind, got.rejected[0].condemned) if got.rejected else ("verified", False)


def test_every_step_of_the_document_has_a_fault() -> None:
    assert set(FAULTS) == set(ORDER) - {1}


@pytest.mark.both(cases=200)
def test_a_record_put_together_again_without_a_fault_is_verified(shared: KVStore) -> None:
    record, raw, key = craft(shared)
    before = raw.entry(key)
    assert record.put(raw, key) == before
    assert outcome(shared) == ("verified", False)
    raw.put_entry(key, None)


@pytest.mark.both(cases=200)
@pytest.mark.parametrize("step", FAULTS)
def test_each_fault_is_of_the_documents_kind_and_blames_whom_it_says(shared: KVStore, step: int) -> None:
    record, raw, key = craft(shared)
    FAULTS[step](record)
    entry = record.put(raw, key)
    kind = ORDER[step]
    assert outcome(shared) == (kind, kind in BLAMED)
    assert raw.entry(key) == (None if kind in BLAMED else entry)
    assert outcome(shared) == ("miss", False)


@pytest.mark.both(cases=200)
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(FAULTS, 2)))
def test_of_two_faults_the_one_of_the_earlier_step_is_told(shared: KVStore, first: int, second: int) -> None:
    record, raw, key = craft(shared)
    for step in (second, first):
        FAULTS[step](record)
    record.put(raw, key)
    assert outcome(shared)[0] == ORDER[first]


# --- crafted records that would do harm --------------------------------------------------------------------------


@pytest.mark.both
@pytest.mark.parametrize("flags", [2, 3, 0x8000, 0xFFFF])
def test_a_flag_that_is_not_known_must_be_understood(store: KVStore, flags: int) -> None:
    record, raw, key = craft(store)
    record.change(flags=flags)
    record.put(raw, key)
    assert outcome(store) == ("version", False)


@pytest.mark.both
def test_an_index_entry_of_any_length_is_a_rejection_of_the_header(store: KVStore) -> None:
    for length in (0, 1, 15, 16, FIXED.size, MAX_HEADER_BYTES + 1, 2**16, 2**20):
        store.put_blocks(HASHES[:1], [0])
        Raw(store).put_entry(index_key(store, HASHES[0]), b"\x89KVB" * (length // 4) + b"x" * (length % 4))
        assert outcome(store) == ("header", True)
        assert store.put_blocks(HASHES[:1], [0]).stored.all()
        assert store.get_blocks(HASHES[:1], [5]).verified.all()


@pytest.mark.both
@pytest.mark.parametrize("key_length", [0, 1, 25])
def test_a_header_with_a_short_key_can_be_put_over(store: KVStore, key_length: int) -> None:
    record, raw, key = craft(store)
    record.change(key=record.header.key[:key_length])
    record.put(raw, key)
    assert store.put_blocks(HASHES[:1], [0]).stored.all()
    assert store.get_blocks(HASHES[:1], [5]).verified.all()


def test_a_crafted_geometry_of_very_many_layers_is_described_in_little_memory() -> None:
    bomb = RUN.pack(0, 2**16 - 1, 1, 0, 0, 32, 32) * 6
    tracemalloc.start()
    assert len(describe(16, bomb)) < 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


# --- a newer record ----------------------------------------------------------------------------------------------


@pytest.mark.both
def test_a_newer_record_is_refused_and_left_alone(store: KVStore) -> None:
    record, raw, key = craft(store)
    record.patches["version"] = 2
    entry, payload = record.put(raw, key), raw.payload()
    assert outcome(store) == ("version", False)
    assert store.match_prefix(HASHES[:1]) == 0, "a miss in this store object from now on"
    assert outcome(store) == ("miss", False)
    assert (raw.entry(key), raw.payload(), raw.quarantined()) == (entry, payload, [])


@pytest.mark.both
def test_a_put_over_a_newer_record_takes_its_place_and_frees_nothing_of_it(store: KVStore) -> None:
    record, raw, key = craft(store)
    record.patches["version"] = 2
    record.put(raw, key)
    before = raw.payload()
    assert store.put_blocks(HASHES[:1], [0]).stored.all()
    assert store.get_blocks(HASHES[:1], [5]).verified.all()
    assert before.items() <= raw.payload().items()


# --- pickles -----------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def bomb_places(store: KVStore) -> dict[str, Callable[[bytes], None]]:
    """Where bytes can be put under a block's key."""
    raw, key = Raw(store), index_key(store, HASHES[0])

    def chunk(number: int, value: bytes) -> None:
        header = parse_header(raw.entry(key) or b"", key)
        assert isinstance(header, Header)
        raw.put_chunk(chunk_key(header.sequence, number), value)

    return {
        "index": lambda value: raw.put_entry(key, value),
        "directory": lambda value: chunk(0, value),
        "chunk": lambda value: chunk(1, value),
        "usage": lambda value: raw.replace("meta", b"usage", value),
    }


@pytest.mark.both
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    ("place", "kind"),
    [("index", "header"), ("directory", "storage_hash"), ("chunk", "storage_hash"), ("usage", "verified")],
)
def test_a_pickle_is_never_deserialised(store: KVStore, tmp_path: Path, place: str, kind: str, protocol: int) -> None:
    armed = tmp_path / "exploded"
    value = pickle.dumps(Bomb(armed), protocol)
    store.put_blocks(HASHES[:1], [0])
    bomb_places(store)[place](value)
    assert store.match_prefix(HASHES[:1]) == 1
    assert outcome(store)[0] == kind
    store.stats()
    store.put_blocks(HASHES, [0, 1, 2])
    assert not armed.exists()
    pickle.loads(value)
    assert armed.exists(), "the pickle does explode where something unpickles it"


@pytest.mark.both
def test_a_pickle_of_a_records_exact_length_in_each_place_runs_nothing(store: KVStore, tmp_path: Path) -> None:
    armed = tmp_path / "exploded"
    value = pickle.dumps(Bomb(armed))
    store.put_blocks(HASHES[:1], [0])
    raw, key = Raw(store), index_key(store, HASHES[0])
    for chunk, data in raw.payload().items():
        raw.put_chunk(chunk, value.ljust(len(data), b".")[: len(data)])
    raw.put_entry(key, value.ljust(len(raw.entry(key) or b""), b"."))
    assert outcome(store) == ("header", True)
    assert raw.quarantined()[0].endswith(b".")
    assert not armed.exists()


# --- what a reader opens -----------------------------------------------------------------------------------------


@pytest.mark.both
def test_a_damaged_identity_in_meta_does_not_keep_the_store_from_opening(tmp_path: Path, cache: PagedKVCache) -> None:
    with open_store(tmp_path, cache) as store:
        store.put_blocks(HASHES, [0, 1, 2])
        raw, name = Raw(store), b"identity:" + store.identity.digest()
        raw.replace("meta", name, flip(raw.value("meta", name) or b"", 99))
    with open_store(tmp_path, cache) as store:
        assert store.get_blocks(HASHES, [3, 4, 5]).verified.all()


def test_the_document_names_every_kind_of_rejection() -> None:
    text = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
    assert set(REJECTION_KINDS) <= set(re.findall(r"`(\w+)`", text)) | set(ORDER.values())
