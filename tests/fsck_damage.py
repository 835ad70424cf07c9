"""A shard with records of every form, and the ways in which tests damage it below everything that kvstore checks."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.blockdb import USAGE_KEY, BlockDB
from kvstore.fsck.pages import PageFile, leaf_nodes
from kvstore.geometry import RUN
from kvstore.record import Directory, Header, chunk_key, header_hash, parse_directory, parse_header
from kvstore.shape import GroupShape
from kvstore.storefile import DATA_NAME
from kvstore.usage import Usage
from tests.records import change, opened, put, record_of, shape_of
from tests.support import MIB, block_hashes, flip

SHAPE = shape_of()
WIDE = shape_of((0, 2, 3, 5, 1, 256, 256), (7, 1, 0, 0, 0, 64, 0), block_size=600)
"""Slices of 307,200 bytes, each in two chunks, and one of 38,400: nine chunks."""
HASHES = block_hashes(6)
FORMS = (
    (WIDE, "raw"),
    (WIDE, "bf16-planes"),
    (SHAPE, "raw"),
    (SHAPE, "bf16-planes"),
    (WIDE, "bf16-planes"),
    (SHAPE, "raw"),
)
PAGE = 4096


def fill(folder: Path) -> Path:
    """A shard with a record for each hash of HASHES, in the forms of FORMS; its folder."""
    with opened(folder, capacity_bytes=64 * MIB) as db:
        for number, (shape, codec) in enumerate(FORMS):
            put(db, record_of(shape, HASHES[number], position=number, codec=codec, seed=number))
    return folder


def key_of(number: int) -> bytes:
    """The index key of a record."""
    return SHAPE.prefix + HASHES[number]


def header_of(db: BlockDB, number: int) -> Header:
    """A record's header."""
    with db.read() as snapshot:
        header = parse_header(snapshot.header(key_of(number)) or b"")
    assert isinstance(header, Header)
    return header


def chunk_of(db: BlockDB, number: int, chunk: int) -> bytes:
    """A chunk's key."""
    return chunk_key(header_of(db, number).sequence, chunk)


def value(db: BlockDB, database: str, key: bytes) -> bytes:
    """What lies under a key."""
    with db._env.begin() as txn:
        return bytes(txn.get(key, db=getattr(db, database)))


def place(db: BlockDB, database: str, key: bytes, data: bytes) -> None:
    """Lay a value under a key."""
    with db._env.begin(write=True) as txn:
        txn.put(key, data, db=getattr(db, database))


def recount(db: BlockDB, **fields: int) -> None:
    """Make the accounting that of the intact entries, save what is given."""
    usage = Usage.parse(value(db, "_meta", USAGE_KEY))
    usage.raw_bytes = usage.stored_bytes = 0
    for _, entry in db.entries():
        header = parse_header(bytes(entry))
        if isinstance(header, Header):
            usage.add(header)
    place(db, "_meta", USAGE_KEY, replace(usage, **fields).encode())


def rewrite(db: BlockDB, number: int, **fields: Any) -> None:
    """Give a record's header other fields, under a right header hash, and count it so."""
    header = replace(header_of(db, number), **fields)
    place(db, "_index", key_of(number), header.encode(header.sequence, header.written))
    recount(db)


def rewrite_directory(db: BlockDB, number: int, edit: Callable[[Directory], Directory]) -> None:
    """Change a record's directory, under right hashes."""
    header = header_of(db, number)
    with db.read() as snapshot:
        parsed = parse_directory(snapshot.chunk(header.sequence, 0), header, shape_at(number).plan)
    assert isinstance(parsed, Directory)
    data = edit(parsed).encode()
    place(db, "_payload", chunk_of(db, number, 0), data)
    rewrite(db, number, directory_hash=xxh3_64_intdigest(data))


def shape_at(number: int) -> GroupShape:
    """The shape of a record."""
    return FORMS[number][0]


def rewrite_chunk(db: BlockDB, number: int, chunk: int, edit: Callable[[bytes], bytes]) -> None:
    """Change a chunk, under right storage hashes."""
    change(db, "_payload", chunk_of(db, number, chunk), edit)
    data = value(db, "_payload", chunk_of(db, number, chunk))

    def named(directory: Directory) -> Directory:
        hashes = directory.hashes.copy()
        hashes[chunk - 1] = xxh3_64_intdigest(data)
        return replace(directory, hashes=hashes)

    rewrite_directory(db, number, named)


def newer(data: bytes, offset: int = 4, number: int = 2) -> bytes:
    """A header with another version, or another byte at an offset, under a right hash."""
    changed = bytearray(data)
    changed[offset] = number
    struct.pack_into("<Q", changed, 8, header_hash(changed))
    return bytes(changed)


def no_such_layers(db: BlockDB, number: int, edit: Callable[[list[int]], list[int]]) -> None:
    """Change the first run of a record's geometry."""
    geometry = header_of(db, number).geometry
    run = list(RUN.unpack_from(geometry))
    rewrite(db, number, geometry=RUN.pack(*edit(run)) + geometry[RUN.size :])


def one_more(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A table whose first number is another."""
    changed = table.copy()
    changed[0] += 1
    return changed


# --- the file --------------------------------------------------------------------------------------------------------


def edit_file(shard: Path, edit: Callable[[bytearray], None]) -> None:
    """Change data.mdb's bytes."""
    data = bytearray((shard / DATA_NAME).read_bytes())
    edit(data)
    (shard / DATA_NAME).write_bytes(data)


def index_leaf(shard: Path) -> int:
    """The number of a leaf page of the index."""
    with PageFile(shard / DATA_NAME) as file:
        root = file.databases(file.metas[0])[b"index"].root
        return next(number for number, page in file.walk(root) if page[10] == 2)


def break_leaf(shard: Path) -> None:
    """Have a leaf of the index name a node past its end."""

    def edit(data: bytearray) -> None:
        at = index_leaf(shard) * PAGE
        data[at + 16 : at + 18] = b"\xff\x7f"

    edit_file(shard, edit)


def free_a_live_page(shard: Path) -> None:
    """Have the free list name a page in use in the place of a free one."""
    with PageFile(shard / DATA_NAME) as file:
        number, page = next(iter(file.walk(file.metas[0].free.root)))
        node = next(n for n in leaf_nodes(page) if n.run is None)
        root = file.databases(file.metas[0])[b"payload"].root
        pages = sorted({run for run, _ in file.walk(root)})
    at = number * PAGE + node.offset

    def edit(data: bytearray) -> None:
        count = int.from_bytes(data[at : at + 8], "little")
        freed = list(struct.unpack_from(f"<{count}Q", data, at + 8))
        freed[-1] = pages[0]
        struct.pack_into(f"<{count}Q", data, at + 8, *sorted(freed, reverse=True))

    edit_file(shard, edit)


def lose_bit(db: BlockDB, database: str, key: bytes, bit: int) -> None:
    """Flip a bit of a value."""
    change(db, database, key, lambda data: flip(data, bit % (8 * len(data))))


def meanwhile(shard: str, gone: bool) -> None:
    """What an engine does to record 3 while it is checked: delete it, or put it again."""
    with opened(Path(shard), capacity_bytes=64 * MIB) as db:
        if gone:
            db.drop(key_of(3))
        else:
            put(db, record_of(SHAPE, HASHES[3], position=3))
