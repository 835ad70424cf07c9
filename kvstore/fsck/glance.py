"""Whether a record is wholly as it was stored, told fast. What is not is looked at again, by kvstore.fsck.stages."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.audit import PREFIX_BYTES, shape_of
from kvstore.checksum import UInt64Array
from kvstore.codec import CODECS
from kvstore.fsck.stages import impossible
from kvstore.geometry import MAX_RUNS, RUN
from kvstore.record import (
    CHECKSUM_ALGORITHM,
    FIXED,
    KEY_BYTES,
    KNOWN_FLAGS,
    MAGIC,
    MAX_HEADER_BYTES,
    PARENT_BYTES,
    VERSION,
    directory_bytes,
    header_hash,
)
from kvstore.snapshot import ReadView
from kvstore.span import MAX_TOKENS

FORMS: Final = 64
ENTRY: Final = struct.Struct("<8sQ16sQQ8xQI4sQQQ13x3s")
"""The fixed part of a header, with what all records of one form have alike as bytes."""
ALIKE: Final = struct.Struct("<4sHHBBHIQIBBB")
"""Those bytes: magic, version, header length; codec, algorithm, flags, block size, raw length; length of the directory;
lengths of key and parent, geometry's runs."""
WORD: Final = np.dtype("<u8")


class Form(NamedTuple):
    """What the records of one form have in common: tokens of a block, raw bytes, length of the directory, factors of the
    slices, the raw length of each chunk, and how the directory has them."""

    block_size: int
    raw: int
    directory: int
    factors: UInt64Array
    lengths: tuple[int, ...]
    entries: struct.Struct


@lru_cache(maxsize=FORMS)
def form_of(alike: bytes, geometry: bytes) -> Form | None:
    """The form of a header that has these bytes, None where the default stage finds something wrong with them. geometry:
    what follows key and parent, to the header's end."""
    magic, version, length, codec, algorithm, flags, block_size, raw, directory, *counts = ALIKE.unpack(alike)
    key_length, parent_length, runs = counts
    if (
        magic != MAGIC
        or version != VERSION
        or codec not in CODECS
        or algorithm != CHECKSUM_ALGORITHM
        or flags not in KNOWN_FLAGS
        or key_length not in KEY_BYTES
        or parent_length not in PARENT_BYTES
        or not 1 <= runs <= MAX_RUNS
        or len(geometry) != runs * RUN.size
        or length != FIXED.size + key_length + parent_length + len(geometry)
        or impossible(block_size, geometry, flags)
    ):
        return None
    shape = shape_of(block_size, geometry, 0, b"", flags)
    plan = shape.plan
    if raw != plan.raw_length or directory != directory_bytes(plan):
        return None
    entries = struct.Struct("<" + "IQ" * plan.num_chunks)
    return Form(block_size, raw, directory, shape.factors, tuple(plan.lengths.tolist()), entries)


class Sketch(NamedTuple):
    """What an intact index entry says: sequence number, raw and stored bytes; the sum of its slice table; its directory."""

    sequence: int
    raw: int
    stored: int
    table: int
    directory_hash: int
    form: Form


def sketch(key: bytes, value: bytes) -> Sketch | None:
    """What the index entry `value` says, None where the default stage finds something wrong with it: header, key, geometry
    or lengths."""
    if not FIXED.size <= len(value) <= MAX_HEADER_BYTES:
        return None
    start, expected, kind, stored, sequence, position, valid, directory, *sums, counts = ENTRY.unpack_from(value)
    fingerprint, tagged, directory_hash = sums
    key_end = FIXED.size + counts[0]
    if value[FIXED.size : key_end] != key or header_hash(value) != expected:
        return None
    form = form_of(start + kind + directory + counts, value[key_end + counts[1] :])
    if form is None or not 1 <= valid <= form.block_size or (position + 1) * form.block_size > MAX_TOKENS:
        return None
    tag = int.from_bytes(key[PREFIX_BYTES : PREFIX_BYTES + 8], "little") ^ fingerprint
    return Sketch(sequence, form.raw, stored, tagged ^ tag, directory_hash, form)


def intact(view: ReadView, key: bytes, value: bytes) -> bool:
    """Whether the default stage finds nothing wrong with the record whose index entry is `value`: with the entry, the slice
    table and every storage hash. Raises lmdb.Error."""
    said = sketch(key, value)
    if said is None:
        return False
    directory, form = view.chunk(said.sequence, 0), said.form
    if directory is None or len(directory) != form.directory or xxh3_64_intdigest(directory) != said.directory_hash:
        return False
    return _sums_to(directory, form, said.table) and _chunks(view, directory, form, said.sequence, said.stored)


def _sums_to(directory: memoryview, form: Form, expected: int) -> bool:
    factors = form.factors
    return int(factors.dot(np.frombuffer(directory, WORD, factors.size))) == expected


def _chunks(view: ReadView, directory: memoryview, form: Form, sequence: int, stored: int) -> bool:
    entries = form.entries.unpack_from(directory, form.factors.size * 8)
    if sum(entries[::2]) + form.directory != stored:
        return False
    at = 0
    for number, raw in enumerate(form.lengths, 1):
        data, length = view.chunk(sequence, number), entries[at]
        if length > raw or data is None or len(data) != length or xxh3_64_intdigest(data) != entries[at + 1]:
            return False
        at += 2
    return True
