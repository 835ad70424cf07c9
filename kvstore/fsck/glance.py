"""Whether a record is wholly as it was stored, told fast. What is not is looked at again, by kvstore.fsck.stages."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.audit import PREFIX_BYTES, shape_of
from kvstore.checksum import MASK64, UInt64Array
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


class Form(NamedTuple):
    """What the records of one geometry have in common: raw bytes, length of the directory, factors of the slices, the raw
    length of each chunk, and how the directory has them."""

    raw: int
    directory: int
    factors: UInt64Array
    lengths: tuple[int, ...]
    entries: struct.Struct


@lru_cache(maxsize=FORMS)
def form_of(block_size: int, geometry: bytes, flags: int = 0) -> Form | None:
    """The form of a geometry, None of one that is impossible or not checked."""
    if impossible(block_size, geometry, flags):
        return None
    shape = shape_of(block_size, geometry, 0, b"", flags)
    plan = shape.plan
    entries = struct.Struct("<" + "IQ" * plan.num_chunks)
    return Form(plan.raw_length, directory_bytes(plan), shape.factors, tuple(plan.lengths.tolist()), entries)


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
    length = len(value)
    if not FIXED.size <= length <= MAX_HEADER_BYTES:
        return None
    fields = FIXED.unpack_from(value)
    magic, version, header_length, stored_hash, codec, algorithm, flags, block_size = fields[:8]
    raw, stored, sequence, _, position, valid, directory_length, fingerprint, tagged, directory_hash = fields[8:18]
    key_length, parent_length, runs = fields[21:24]
    tail = FIXED.size + key_length + parent_length
    if (
        magic != MAGIC
        or version != VERSION
        or header_length != length
        or header_hash(value) != stored_hash
        or codec not in CODECS
        or algorithm != CHECKSUM_ALGORITHM
        or flags not in KNOWN_FLAGS
        or key_length not in KEY_BYTES
        or parent_length not in PARENT_BYTES
        or not 1 <= runs <= MAX_RUNS
        or tail + runs * RUN.size != length
        or value[FIXED.size : FIXED.size + key_length] != key
    ):
        return None
    form = form_of(block_size, value[tail:], flags)
    if form is None or raw != form.raw or directory_length != form.directory:
        return None
    if not 1 <= valid <= block_size or (position + 1) * block_size > MAX_TOKENS:
        return None
    tag = int.from_bytes(key[PREFIX_BYTES : PREFIX_BYTES + 8], "little") ^ fingerprint
    return Sketch(sequence, raw, stored, tagged ^ tag, directory_hash, form)


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
    table = np.frombuffer(directory, "<u8", form.factors.size)
    return int(np.dot(table, form.factors)) & MASK64 == expected


def _chunks(view: ReadView, directory: memoryview, form: Form, sequence: int, stored: int) -> bool:
    entries = form.entries.unpack_from(directory, form.factors.size * 8)
    lengths = entries[::2]
    if sum(lengths) + form.directory != stored:
        return False
    for number, raw in enumerate(form.lengths):
        data = view.chunk(sequence, number + 1)
        length, digest = entries[2 * number : 2 * number + 2]
        if length > raw or data is None or len(data) != length or xxh3_64_intdigest(data) != digest:
            return False
    return True
