"""A record checked from storage alone, without an engine's cache: up to the content checksum of its decoded bytes.

Its header may be crafted: what it makes this allocate or do is bounded by what really is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.blockdb import BlockDB
from kvstore.checksum import weighted_sums
from kvstore.codec import CODECS
from kvstore.errors import UnsupportedCache
from kvstore.geometry import RUN, ChunkPlan, decode_geometry
from kvstore.hostpath import StagingSums
from kvstore.record import MAX_HEADER_BYTES, Directory, Header, check_chunk, parse_directory, parse_header
from kvstore.reports import KINDS, Report, sequence_of
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.snapshot import ReadView
from kvstore.span import MAX_TOKENS, Span
from kvstore.stategeometry import STATES, rows_twice, sound_states, state_extent
from kvstore.statepath import shape_sums

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

PREFIX_BYTES: Final = 18
"""Of an index key: identity id and group; the block hash follows."""
MAX_SLICES: Final = 2**16
MAX_RAW_BYTES: Final = 2**30
"""Of a block that is checked here."""
MAX_HEADS: Final = 2**16
SHAPES: Final = 16
"""Kept for the next record: those of one group follow each other."""


def audit(snapshot: ReadView, key: bytes, value: bytes | memoryview) -> Rejection | None:
    """What is wrong with the record whose index entry is `value`, None where it is intact. Only what is `condemned` blames
    the record: not a codec or version that is unknown here, nor a block of more than MAX_RAW_BYTES or MAX_SLICES, nor
    LMDB's failure to read (kind "io")."""
    try:
        wrong = _audit(snapshot, key, bytes(value[: MAX_HEADER_BYTES + 1]))
    except lmdb.Error as error:
        return Rejection("io", f"LMDB: {error}")
    return None if wrong is None else replace(wrong, condemned=wrong.kind in KINDS)


def follow_reports(db: BlockDB, reports: Iterable[Report]) -> list[tuple[bytes, bytes, str]]:
    """The records among those that readers refused which are to blame: index key, index entry, kind each, for `condemn`.

    Inside a call. Each is read and checked here, twice; a report only says where to look. Raises nothing for what it finds
    in storage; where LMDB cannot read, a record counts as sound.
    """
    found = {}
    for report in dict.fromkeys((report.key, report.sequence) for report in reports):
        first = _blamed(db, *report)
        if first is not None and _blamed(db, *report) is not None:
            found[report[0]] = first
    return list(found.values())


def _blamed(db: BlockDB, key: bytes, sequence: int) -> tuple[bytes, bytes, str] | None:
    """The entry under the key where it has this sequence number and its record is to blame for something."""
    try:
        with db.read() as snapshot:
            value = snapshot.header(key)
            if value is None or sequence_of(value) != sequence:
                return None
            wrong = audit(snapshot, key, value)
    except lmdb.Error as error:
        log.error(
            "%s: block %s, which a reader refused, cannot be read: %s", db.folder, key[PREFIX_BYTES:].hex(), error
        )
        return None
    if wrong is None or not wrong.condemned:
        return None
    log.warning(
        "%s: block %s, which a reader refused: %s: %s", db.folder, key[PREFIX_BYTES:].hex(), wrong.kind, wrong.detail
    )
    return key, value, wrong.kind


def _audit(snapshot: ReadView, key: bytes, value: bytes) -> Rejection | None:
    header = parse_header(value, key)
    if isinstance(header, Rejection):
        return header
    if header.codec not in CODECS:
        return Rejection("version", f"codec {header.codec}, this kvstore knows {sorted(CODECS)}")
    if wrong := unlikely(snapshot, header):
        return wrong
    shape = shape_of(header.block_size, header.geometry, header.fingerprint, key[:PREFIX_BYTES], header.flags)
    try:
        plan = shape.plan
    except UnsupportedCache as error:
        return Rejection("geometry", str(error))
    directory = parse_directory(snapshot.chunk(header.sequence, 0), header, plan)
    if isinstance(directory, Rejection):
        return directory
    block = _decoded(snapshot, header, plan, directory)
    return block if isinstance(block, Rejection) else _content(header, shape, directory, block)


def unlikely(snapshot: ReadView, header: Header) -> Rejection | None:
    """Whether the header's numbers are none of a block's, or ask for more than a directory is there for: before anything is
    made of them. Raises lmdb.Error."""
    geometry, flags = header.geometry, header.flags
    slices, raw = extent(header.block_size, geometry, flags)
    if raw != header.raw_length or not sound_numbers(header) or not sound_runs(geometry, flags):
        return Rejection("header", "its fields contradict each other, under a header hash that is right")
    if slices > MAX_SLICES or raw > MAX_RAW_BYTES:
        return Rejection("geometry", f"{slices} slices of {raw} bytes in all: not checked here")
    directory = snapshot.chunk(header.sequence, 0)
    if directory is None or len(directory) < 8 * slices:
        return Rejection("storage_hash", f"directory: missing, or too short for {slices} slices")
    if slice_twice(geometry, flags):
        return Rejection("header", "its geometry names a slice twice, under a header hash that is right")
    return None


@lru_cache(maxsize=4 * SHAPES)
def extent(block_size: int, geometry: bytes, flags: int = 0) -> tuple[int, int]:
    """How many slices a block has, and how many raw bytes. flags: the header's."""
    if flags & STATES:
        return state_extent(geometry)
    runs = list(RUN.iter_unpack(geometry))
    slices = sum(count * (more + 1) for _, count, _, _, more, _, _ in runs)
    return slices, block_size * sum(count * (more + 1) * (k + v) for _, count, _, _, more, k, v in runs)


def sound_numbers(header: Header) -> bool:
    """Whether a writer could have given this position and these valid tokens."""
    return 1 <= header.valid_tokens <= header.block_size and (header.position + 1) * header.block_size <= MAX_TOKENS


def sound_runs(geometry: bytes, flags: int = 0) -> bool:
    """Whether a writer could have given these runs of a geometry."""
    if flags & STATES:
        return sound_states(geometry)
    return all(
        count and head + more < MAX_HEADS and k + v and not (k | v) % 8
        for _, count, _, head, more, k, v in RUN.iter_unpack(geometry)
    )


@lru_cache(maxsize=4 * SHAPES)
def slice_twice(geometry: bytes, flags: int = 0) -> bool:
    """Whether a geometry names a slice twice. Of one that has at most MAX_SLICES."""
    if flags & STATES:
        return rows_twice(geometry)
    ends: dict[int, int] = {}
    for shape in decode_geometry(geometry):
        if shape.first_head < ends.get(shape.layer, 0):
            return True
        ends[shape.layer] = shape.first_head + shape.heads
    return False


def _decoded(snapshot: ReadView, header: Header, plan: ChunkPlan, directory: Directory) -> Bytes | Rejection:
    """The block's raw bytes. They are at most about twice what is stored, and room is made only after that was seen."""
    lengths, hashes = directory.lengths.tolist(), directory.hashes.tolist()
    if (directory.lengths > plan.lengths).any() or sum(lengths) != header.stored_length - header.directory_length:
        return Rejection("decode", "the directory's stored lengths exceed the raw ones, or are not the header's sum")
    for number, (length, stored_hash) in enumerate(zip(lengths, hashes, strict=True), 1):
        if wrong := check_chunk(snapshot.chunk(header.sequence, number), number, length, stored_hash):
            return wrong
    block = np.empty(plan.raw_length, np.uint8)
    for number, (start, end) in enumerate(zip(plan.bounds, plan.bounds[1:], strict=False), 1):
        chunk, out = snapshot.chunk(header.sequence, number), block[start:end]
        assert chunk is not None
        codec = CODECS[0] if len(chunk) == out.size else CODECS[header.codec]
        if why := codec.decode(chunk, out):
            return Rejection("decode", f"chunk {number}: {why}")
    return block


def _content(header: Header, shape: GroupShape, directory: Directory, block: Bytes) -> Rejection | None:
    """Compare the sums of the block's bytes with the slice table, and their weighted sum with the stored checksum."""
    token = np.array([header.position * shape.block_size], np.int64)
    span = Span(header.position, np.zeros(1, np.int64), token, np.array([header.valid_tokens], np.int64))
    sums = sums_of(shape)(span, block[None])
    astray = np.flatnonzero(sums[0] != directory.slice_sums)
    if astray.size:
        first = shape.slices[int(astray[0])]
        return Rejection("content", f"{astray.size} slices are not those of the slice table, the first {first}")
    total = int(weighted_sums(sums, shape.factors)[0])
    expected = header.tagged_checksum ^ int(shape.tags([header.key[PREFIX_BYTES:]])[0])
    if total != expected:
        return Rejection("content", f"the record's bytes sum to {total:016x}, its header says {expected:016x}")
    return None


@lru_cache(maxsize=SHAPES)
def shape_of(block_size: int, geometry: bytes, fingerprint: int, prefix: bytes, flags: int = 0) -> GroupShape:
    """The shape of the records of a group, of at most MAX_SLICES slices."""
    return GroupShape(block_size, geometry, fingerprint, prefix, flags)


@lru_cache(maxsize=SHAPES)
def sums_of(shape: GroupShape) -> StagingSums:
    """Takes s of each slice of staged blocks of a shape."""
    return shape_sums(shape)
