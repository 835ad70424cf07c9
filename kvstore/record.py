"""One stored block: header, directory, payload; bytes in, bytes out. docs/format.md is the specification.

Everything read here is untrusted: lengths are bounded before they are used, and what does not fit is a
Rejection, never an exception.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvstore.checksum import UInt64Array
from kvstore.geometry import MAX_RUNS, RUN, ChunkPlan
from kvstore.results import Rejection
from kvstore.stategeometry import STATES

MAGIC: Final = b"\x89KVB"
VERSION: Final = 1
CHECKSUM_ALGORITHM: Final = 1
"""The checksum of docs/checksum.md."""
KNOWN_FLAGS: Final = (0, STATES)
"""Of a header: which kind of geometry it has."""
PREFIX: Final = struct.Struct("<4sHHQ")
"""Magic, version, header length, header hash: at these offsets in every version."""
FIXED: Final = struct.Struct("<4sHHQ BBHI QQQQQII QQQ QIBBBB")
"""The fixed part of a header; key, parent and geometry follow."""
MAX_HEADER_BYTES: Final = 1900
SEQUENCE_FIELD: Final = slice(40, 48)
"""Where a header has its sequence number."""
CHUNK_ENTRY: Final = np.dtype([("length", "<u4"), ("hash", "<u8")])
"""A chunk's line in the directory, 12 bytes."""
KEY_BYTES: Final = range(26, 83)
"""Lengths of an index key: identity id, group, and a block hash of 8 to 64 bytes."""
PARENT_BYTES: Final = (0, *range(8, 65))


def record_key(identity_id: bytes, group: int, block_hash: bytes) -> bytes:
    """The index key: identity id (16 bytes), group (2, big-endian), block hash (8 to 64)."""
    return identity_id + group.to_bytes(2, "big") + block_hash


def chunk_key(sequence: int, chunk: int) -> bytes:
    """The payload key: sequence number (8, big-endian), chunk number (2, big-endian); chunk 0 is the directory."""
    return sequence.to_bytes(8, "big") + chunk.to_bytes(2, "big")


@dataclass(frozen=True)
class Header:
    """An index entry. Lengths in bytes, times in microseconds since 1970; see docs/format.md for every field."""

    codec: int
    block_size: int
    raw_length: int
    stored_length: int
    position: int
    valid_tokens: int
    fingerprint: int
    tagged_checksum: int
    directory_length: int
    directory_hash: int
    key: bytes
    parent: bytes
    geometry: bytes
    sequence: int = 0
    written: int = 0
    last_touch: int = 0
    accesses: int = 1
    eviction_class: int = 0
    flags: int = 0
    algorithm: int = CHECKSUM_ALGORITHM

    def encode(self, sequence: int, now: int) -> bytes:
        """The header's bytes under the sequence number that the transaction gave it, written at `now`."""
        tail = self.key + self.parent + self.geometry
        length = FIXED.size + len(tail)
        fixed = FIXED.pack(
            *(MAGIC, VERSION, length, 0),
            *(self.codec, self.algorithm, self.flags, self.block_size),
            *(self.raw_length, self.stored_length, sequence, now, self.position),
            *(self.valid_tokens, self.directory_length),
            *(self.fingerprint, self.tagged_checksum, self.directory_hash),
            *(self.last_touch or now, self.accesses, self.eviction_class),
            *(len(self.key), len(self.parent), len(self.geometry) // RUN.size),
        )
        data = bytearray(fixed + tail)
        struct.pack_into("<Q", data, 8, header_hash(data))
        return bytes(data)


def header_hash(data: bytes | bytearray) -> int:
    """XXH3-64 of a header without the 8 bytes that hold the hash."""
    return xxh3_64_intdigest(data[:8] + data[16:])


def parse_header(data: bytes, key: bytes | None = None) -> Header | Rejection:
    """An index entry's header, or why it is none. key: what it must be stored under; None leaves that unchecked."""
    if not FIXED.size <= len(data) <= MAX_HEADER_BYTES:
        return Rejection("header", f"{len(data)} bytes, expected {FIXED.size} to {MAX_HEADER_BYTES}")
    magic, version, length, stored_hash = PREFIX.unpack_from(data)
    if magic != MAGIC or length != len(data) or header_hash(data) != stored_hash:
        return Rejection("header", f"magic {magic!r}, length {length} of {len(data)} bytes, or its hash is wrong")
    if version != VERSION:
        return Rejection("version", f"version {version}, this kvstore reads version {VERSION}")
    header = _unpack(data)
    if isinstance(header, Header) and key is not None and header.key != key:
        return Rejection("key", f"the record of {header.key.hex()} lies under {key.hex()}")
    return header


def _unpack(data: bytes) -> Header | Rejection:
    fields = FIXED.unpack_from(data)
    codec, algorithm, flags, block_size, raw, stored, sequence, written, position = fields[4:13]
    valid, directory_length, fingerprint, tagged, directory_hash, touch, accesses, kind = fields[13:21]
    key_end = FIXED.size + fields[21]
    parent_end = key_end + fields[22]
    bounded = fields[21] in KEY_BYTES and fields[22] in PARENT_BYTES and 1 <= fields[23] <= MAX_RUNS
    if not bounded or parent_end + fields[23] * RUN.size != len(data):
        return Rejection("header", "its key, parent and geometry are no such, or do not fill its length")
    if algorithm != CHECKSUM_ALGORITHM or flags not in KNOWN_FLAGS:
        return Rejection(
            "version",
            f"checksum algorithm {algorithm}, flags {flags}; known are {CHECKSUM_ALGORITHM} and {KNOWN_FLAGS}",
        )
    return Header(
        *(codec, block_size, raw, stored, position, valid, fingerprint, tagged, directory_length, directory_hash),
        key=data[FIXED.size : key_end],
        parent=data[key_end:parent_end],
        geometry=data[parent_end:],
        sequence=sequence,
        written=written,
        last_touch=touch,
        accesses=accesses,
        eviction_class=kind,
        flags=flags,
    )


@dataclass(frozen=True, eq=False)
class Directory:
    """Chunk 0: s of each slice, (slices,) uint64, and per chunk its stored length and XXH3-64."""

    slice_sums: UInt64Array
    lengths: npt.NDArray[np.int64]
    hashes: UInt64Array

    def encode(self) -> bytes:
        """The directory's bytes: the slice table, then 12 bytes a chunk."""
        entries = np.empty(len(self.lengths), CHUNK_ENTRY)
        entries["length"], entries["hash"] = self.lengths, self.hashes
        return self.slice_sums.astype("<u8").tobytes() + entries.tobytes()


def directory_bytes(plan: ChunkPlan) -> int:
    """How long the plan's directory is."""
    return plan.num_slices * 8 + plan.num_chunks * CHUNK_ENTRY.itemsize


def parse_directory(data: memoryview | None, header: Header, plan: ChunkPlan) -> Directory | Rejection:
    """Chunk 0 of a record whose geometry is the plan's, or why it is none."""
    expected = directory_bytes(plan)
    if data is None or len(data) != expected or header.directory_length != expected:
        length = "missing" if data is None else f"{len(data)} bytes"
        return Rejection(
            "storage_hash", f"directory: {length}, its header says {header.directory_length} of {expected}"
        )
    if xxh3_64_intdigest(data) != header.directory_hash:
        return Rejection("storage_hash", "directory: its XXH3-64 is not the header's")
    table = bytes(data)
    entries = np.frombuffer(table, CHUNK_ENTRY, offset=plan.num_slices * 8)
    sums = np.frombuffer(table, "<u8", plan.num_slices).astype(np.uint64)
    return Directory(sums, entries["length"].astype(np.int64), entries["hash"].astype(np.uint64))


def check_chunk(data: memoryview | None, number: int, length: int, stored_hash: int) -> Rejection | None:
    """None where payload chunk `number` has its length and XXH3-64, else what is wrong."""
    if data is None or len(data) != length:
        given = "missing" if data is None else f"{len(data)} bytes"
        return Rejection("storage_hash", f"chunk {number}: {given}, expected {length} bytes")
    if xxh3_64_intdigest(data) != stored_hash:
        return Rejection("storage_hash", f"chunk {number}: its XXH3-64 is not the directory's")
    return None
