"""Damage for the demo, done to a closed store below everything that kvstore checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstore.environment import LMDB_ENGINE
from kvstore.record import Header, chunk_key, parse_header
from kvstore.storefile import DATA_NAME

MAP_BYTES: Final = 2**30


def flip_bit(folder: Path, key: bytes, bit: int) -> int:
    """Flip one bit in the middle of a record's first payload chunk, in data.mdb itself; returns the byte's offset.

    folder: the shard's; key: the record's index key; bit: 0 to 7.
    """
    offset = _offset(folder / DATA_NAME, _first_chunk(folder, key))
    descriptor = os.open(folder / DATA_NAME, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset)
    finally:
        os.close(descriptor)
    return offset


def exchange(folder: Path, one: bytes, two: bytes) -> None:
    """Exchange the index entries of two keys, each intact and under the other's key."""
    with _environment(folder) as env:
        index = env.open_db(b"index")
        with env.begin(write=True) as txn:
            first, second = txn.get(one, db=index), txn.get(two, db=index)
            txn.put(one, second, db=index)
            txn.put(two, first, db=index)


def _first_chunk(folder: Path, key: bytes) -> bytes:
    with _environment(folder) as env:
        index, payload = env.open_db(b"index"), env.open_db(b"payload")
        with env.begin() as txn:
            header = parse_header(txn.get(key, db=index), key)
            if not isinstance(header, Header):
                raise RuntimeError(f"the record to damage is damaged already: {header.detail}")
            return bytes(txn.get(chunk_key(header.sequence, 1), db=payload))


def _offset(path: Path, chunk: bytes) -> int:
    """Where the middle of a chunk lies in the file."""
    data = path.read_bytes()
    start = data.find(chunk)
    if start < 0 or data.find(chunk, start + 1) >= 0:
        raise RuntimeError(f"{path.name} does not hold the chunk's {len(chunk)} bytes exactly once")
    return start + len(chunk) // 2


@contextmanager
def _environment(folder: Path) -> Iterator[Any]:
    env = lmdb.open(str(folder), map_size=MAP_BYTES, max_dbs=4, create=False, lib_version=LMDB_ENGINE)
    try:
        yield env
    finally:
        env.close()
