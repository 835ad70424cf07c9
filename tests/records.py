"""Records of random bytes, written and damaged without a cache: for tests of what only reads and writes files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.blockdb import BlockDB, NewRecord
from kvstore.checksum import reference_block_checksum, reference_slice_checksum
from kvstore.codec import codec_named
from kvstore.geometry import RUN
from kvstore.record import Directory, Header, record_key
from kvstore.shape import GroupShape
from tests.support import MIB

PREFIX = record_key(b"identity of 16 b", 0, b"")


def shape_of(*runs: tuple[int, ...], block_size: int = 4, fingerprint: int = 0x0123456789ABCDEF) -> GroupShape:
    """A group's shape. runs: first layer, count, step, first head, heads - 1, K bytes, V bytes; by default 3 layers of 2
    heads with K and V of 32 bytes."""
    packed = b"".join(RUN.pack(*run) for run in runs or ((0, 3, 1, 0, 1, 32, 32),))
    return GroupShape(block_size, packed, fingerprint, PREFIX)


def raw_block(shape: GroupShape, valid: int, seed: int) -> np.ndarray[Any, Any]:
    """Random bfloat16 numbers around 1 in canonical order, zero past the valid tokens: (block bytes,) uint8."""
    numbers = np.random.default_rng(seed).normal(1, 0.3, shape.plan.raw_length // 2).astype(np.float32)
    block = (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    for start, end in zip(shape.offsets[:-1], shape.offsets[1:], strict=True):
        block[start:end].reshape(shape.block_size, -1)[valid:] = 0
    return block


def record_of(
    shape: GroupShape, block_hash: bytes, position: int = 0, valid: int | None = None, codec: str = "raw", seed: int = 0
) -> NewRecord:
    """A block's record, its sums taken by the plain reference."""
    valid, encode, plan = shape.block_size if valid is None else valid, codec_named(codec), shape.plan
    block = raw_block(shape, valid, seed)
    ends = zip(shape.offsets[:-1], shape.offsets[1:], strict=True)
    slices = [block[a:b].reshape(shape.block_size, -1)[:valid] for a, b in ends]
    sums = [reference_slice_checksum(cells, position * shape.block_size) for cells in slices]
    total = reference_block_checksum((s.layer, s.head, x) for s, x in zip(shape.slices, sums, strict=True))
    chunks = [bytes(encode.encode(block[a:b].copy())) for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]
    hashes = np.array([xxh3_64_intdigest(chunk) for chunk in chunks], np.uint64)
    directory = Directory(np.array(sums, np.uint64), np.array(list(map(len, chunks))), hashes).encode()
    header = Header(
        *(encode.number, shape.block_size, plan.raw_length, sum(map(len, chunks)) + len(directory), position, valid),
        *(shape.fingerprint, total ^ int(shape.tags([block_hash])[0]), len(directory), xxh3_64_intdigest(directory)),
        *(shape.prefix + block_hash, b"", shape.geometry),
    )
    return NewRecord(header, directory, [memoryview(chunk) for chunk in chunks])


@contextmanager
def opened(folder: Path, writable: bool = True, capacity_bytes: int = 16 * MIB) -> Iterator[BlockDB]:
    """A shard's database, inside one call."""
    db = BlockDB(folder, capacity_bytes, False, writable, MIB)
    token = object()
    try:
        db.enter(token)
        yield db
    finally:
        db.calls.discard(token)
        db.close()


def put(db: BlockDB, *records: NewRecord) -> None:
    """Write records, each in the place of what lies under its key."""
    assert all(db.write(records, {}, lambda key, old: False).stored)


def change(db: BlockDB, database: str, key: bytes, edit: Callable[[bytes], bytes | None]) -> None:
    """Replace a value of `_index` or `_payload`, or delete it, below everything that kvstore checks."""
    with db._env.begin(write=True) as txn:
        value = edit(bytes(txn.get(key, db=getattr(db, database))))
        if value is None:
            txn.delete(key, db=getattr(db, database))
        else:
            txn.put(key, value, db=getattr(db, database))
