"""One record checked by name: every kind of damage that its index entry and its chunks show, up to a stage.

What is wrong is found as far as it can be told: chunks are not compared with a directory that changed, and nothing is
decoded that is not the bytes that were stored. A header may be crafted: what it makes this allocate is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.audit import MAX_SLICES, PREFIX_BYTES, extent, shape_of, slice_twice, sound_numbers, sound_runs
from kvstore.codec import CODECS
from kvstore.errors import UnsupportedCache
from kvstore.geometry import CHUNK_BYTES, MAX_CHUNKS
from kvstore.record import Directory, Header, directory_bytes, parse_directory, parse_header
from kvstore.results import Rejection
from kvstore.shape import GroupShape
from kvstore.snapshot import ReadView

HEADER_KINDS: Final = {"header": "HEADER", "version": "UNKNOWN_VERSION", "key": "KEY"}
NOT_CHECKED: Final = ""
"""The kind of what is no finding, but a part of a record that was not checked."""
NAMED: Final = 4
"""Chunks that a finding names."""
FORMS: Final = 64
"""Kept for the next record."""


class Problem(NamedTuple):
    """kind: of a finding, or NOT_CHECKED; data: the stored bytes that are wrong, where they are there."""

    kind: str
    detail: str
    data: memoryview | None = None


Deep = Callable[[ReadView, Header, GroupShape, Directory], Iterator[Problem]]
"""What is wrong with a record whose stored bytes are those that were stored."""


def problems(view: ReadView, key: bytes, value: bytes, deep: Deep | None = None) -> list[Problem]:
    """What is wrong with the record whose index entry is `value`, at most one of each kind; empty where it is intact.
    Raises lmdb.Error where LMDB cannot read."""
    header = parse_header(value, key)
    if isinstance(header, Rejection):
        return [Problem(HEADER_KINDS[header.kind], header.detail)]
    if header.codec not in CODECS:
        return [Problem("UNKNOWN_VERSION", f"codec {header.codec}, this kvstore knows {sorted(CODECS)}")]
    if wrong := _numbers(header):
        return [wrong]
    stored = view.chunk(header.sequence, 0)
    if stored is None:
        return [Problem("MISSING_CHUNK", "its directory is missing")]
    return list(_stored(view, header, stored, deep))


@lru_cache(maxsize=FORMS)
def impossible(block_size: int, geometry: bytes, flags: int = 0) -> Problem | None:
    """Why no block has such a geometry, None where one may. flags: the header's."""
    slices, raw = extent(block_size, geometry, flags)
    if not block_size or not sound_runs(geometry, flags):
        return Problem("GEOMETRY", "its geometry is impossible, under a header hash that is right")
    if raw > MAX_CHUNKS * CHUNK_BYTES:
        return Problem("GEOMETRY", f"its geometry has {raw} bytes a block, more than a record can have")
    if slices > MAX_SLICES:
        return Problem(NOT_CHECKED, f"{slices} slices of {raw} bytes in all")
    if slice_twice(geometry, flags):
        return Problem("GEOMETRY", "its geometry names a slice twice, under a header hash that is right")
    try:
        _ = shape_of(block_size, geometry, 0, b"", flags).plan
    except UnsupportedCache as error:
        return Problem("GEOMETRY", str(error))
    return None


def _numbers(header: Header) -> Problem | None:
    if wrong := impossible(header.block_size, header.geometry, header.flags):
        return wrong
    if not sound_numbers(header):
        return Problem("HEADER", f"position {header.position}, {header.valid_tokens} valid tokens: no such block")
    raw = extent(header.block_size, header.geometry, header.flags)[1]
    if raw != header.raw_length:
        return Problem("LENGTH", f"raw_length is {header.raw_length}, of its geometry {raw}")
    return None


def _stored(view: ReadView, header: Header, stored: memoryview, deep: Deep | None) -> Iterator[Problem]:
    shape = _shape(header)
    expected = directory_bytes(shape.plan)
    if not len(stored) == header.directory_length == expected:
        yield Problem(
            "LENGTH",
            f"directory: {len(stored)} bytes, its header says {header.directory_length}, its geometry {expected}",
            stored,
        )
        return
    directory = parse_directory(stored, header, shape.plan)
    if isinstance(directory, Rejection):
        yield Problem("STORAGE_HASH", directory.detail, stored)
        return
    found = [*_lengths(header, shape, directory, stored), *_chunks(view, header, directory)]
    yield from found
    table = _slice_table(header, shape, directory, stored)
    if table:
        yield table
    if deep is not None and not found:
        yield from deep(view, header, shape, directory)


def _shape(header: Header) -> GroupShape:
    own = header.fingerprint, header.key[:PREFIX_BYTES], header.flags
    return shape_of(header.block_size, header.geometry, *own)


def _lengths(header: Header, shape: GroupShape, directory: Directory, stored: memoryview) -> Iterator[Problem]:
    total = int(directory.lengths.sum()) + header.directory_length
    if (directory.lengths > shape.plan.lengths).any() or total != header.stored_length:
        detail = f"the directory's lengths exceed the raw ones, or sum to {total}, not {header.stored_length}"
        yield Problem("LENGTH", detail, stored)


def _chunks(view: ReadView, header: Header, directory: Directory) -> Iterator[Problem]:
    wrong: dict[str, list[tuple[int, memoryview | None]]] = {}
    named = zip(directory.lengths.tolist(), directory.hashes.tolist(), strict=True)
    for number, (length, digest) in enumerate(named, 1):
        data = view.chunk(header.sequence, number)
        if data is None:
            wrong.setdefault("MISSING_CHUNK", []).append((number, None))
        elif len(data) != length:
            wrong.setdefault("LENGTH", []).append((number, data))
        elif xxh3_64_intdigest(data) != digest:
            wrong.setdefault("STORAGE_HASH", []).append((number, data))
    for kind, chunks in wrong.items():
        numbers = ", ".join(str(number) for number, _ in chunks[:NAMED]) + " ..." * (len(chunks) > NAMED)
        yield Problem(kind, f"{REASONS[kind]}: chunk {numbers} of {len(directory.lengths)}", chunks[0][1])


REASONS: Final = {
    "MISSING_CHUNK": "not there",
    "LENGTH": "not as long as the directory says",
    "STORAGE_HASH": "not the directory's XXH3-64",
}


def _slice_table(header: Header, shape: GroupShape, directory: Directory, stored: memoryview) -> Problem | None:
    total = int((directory.slice_sums * shape.factors).sum(dtype=np.uint64))
    expected = untagged(header)
    if total != expected:
        return Problem("SLICE_TABLE", f"the slice table sums to {total:016x}, the header says {expected:016x}", stored)
    return None


def untagged(header: Header) -> int:
    """The content checksum that a header says."""
    first = header.key[PREFIX_BYTES : PREFIX_BYTES + 8]
    return header.tagged_checksum ^ int.from_bytes(first, "little") ^ header.fingerprint
