"""Looking into a store without an engine: its shards, their records, and how an operator names one.

Everything is read in short snapshots, a new one for each batch, so that a store can be looked into while an engine
writes it; what is given belongs to different moments then. Nothing that is read is trusted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import lmdb

from kvstore.blockdb import BlockDB
from kvstore.codec import codec_named
from kvstore.config import MIB
from kvstore.errors import AmbiguousKey, ConfigError, StoreDamaged, UnknownRecord
from kvstore.identity import IDENTITY_ID_BYTES
from kvstore.plain import check_plain
from kvstore.quarantine import Entry, parse_entry
from kvstore.record import KEY_BYTES, Header, parse_header
from kvstore.results import Rejection
from kvstore.snapshot import ReadView
from kvstore.storefile import DATA_NAME, check_data_file, path_errors

PREFIX_BYTES: Final = 18
"""Of an index key: identity id and group; the block hash follows."""
NO_BOUND: Final = 2**63
"""Of the quarantine: nothing is added to it here, and what is in it stays."""
BATCH: Final = 1024
"""Index entries that one snapshot reads at most."""
CANDIDATES: Final = 8
"""Blocks that an ambiguous key's error names."""
SEQUENCE_BYTES: Final = 8


@contextmanager
def opened(
    folders: Sequence[Path], writable: bool = False, capacity_bytes: int | None = None
) -> Iterator[list[BlockDB]]:
    """These shards, open for as long as the block lasts; writable ones hold their writer's lock, and sync every
    transaction. capacity_bytes: of each; None takes what the file was made for. Raises what opening a KVStore raises."""
    with ExitStack() as stack:
        shards: list[BlockDB] = []
        for folder in folders:
            shard = BlockDB(folder, capacity_bytes or _capacity(folder), True, writable, NO_BOUND)
            stack.callback(shard.close)
            # One call for as long as the shard is open: nobody else is here to close it.
            token = object()
            stack.callback(shard.calls.discard, token)
            shard.enter(token)
            shards.append(shard)
        yield shards


def _capacity(folder: Path) -> int:
    """The capacity that a shard's file was made for, as far as it says."""
    check_plain(folder)
    data = folder / DATA_NAME
    with path_errors(data, "expected a shard that a writer has made"):
        size = data.stat().st_size if data.exists() else 0
        return max(MIB, size, check_data_file(data))


@contextmanager
def reading(db: BlockDB) -> Iterator[ReadView]:
    """A short snapshot. Raises StoreDamaged where LMDB cannot read."""
    try:
        with db.read() as snapshot:
            yield snapshot
    except lmdb.Error as error:
        raise StoreDamaged(
            f"{db.folder}: LMDB cannot read it: {error}: `kvstore-fsck {db.folder}` tells more"
        ) from None


@dataclass(frozen=True)
class Item:
    """An index entry. shard: its folder's name; value: as it is stored, or as much as shows that it is too long."""

    shard: str
    key: bytes
    value: bytes

    @cached_property
    def header(self) -> Header | Rejection:
        """The entry's header, or why it is none."""
        return parse_header(self.value, self.key)

    @property
    def identity_id(self) -> bytes:
        """Whose KV it is; shorter where the key is none."""
        return self.key[:IDENTITY_ID_BYTES]

    @property
    def group(self) -> int:
        """The KV cache group."""
        return int.from_bytes(self.key[IDENTITY_ID_BYTES:PREFIX_BYTES], "big")

    @property
    def block_hash(self) -> bytes:
        """The block's hash, empty where the key is none."""
        return self.key[PREFIX_BYTES:]


@dataclass(frozen=True)
class Filter:
    """Which records are meant: all that every given condition holds for.

    identity and prefix: the first hexadecimal digits of the identity id and of the block hash; group: the KV cache group;
    older and newer: written before and after, microseconds since 1970; min_bytes: at least so many stored bytes; codec:
    its name. An entry that is damaged has none of the last four. Raises ConfigError.
    """

    identity: str = ""
    group: int | None = None
    prefix: str = ""
    older: int | None = None
    newer: int | None = None
    min_bytes: int = 0
    codec: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", digits(self.identity, "an identity id", 2 * IDENTITY_ID_BYTES))
        object.__setattr__(self, "prefix", digits(self.prefix, "a block hash", 128))
        if self.codec is not None:
            codec_named(self.codec)

    @property
    def start(self) -> bytes:
        """What every index key that is meant begins with."""
        return bytes.fromhex(self.identity[: len(self.identity) // 2 * 2])

    def accepts(self, item: Item) -> bool:
        """Whether the record is meant."""
        named = item.identity_id.hex().startswith(self.identity) and item.block_hash.hex().startswith(self.prefix)
        return named and self.group in (None, item.group) and self._fits(item.header)

    def _fits(self, header: Header | Rejection) -> bool:
        if isinstance(header, Rejection):
            return (self.older, self.newer, self.min_bytes, self.codec) == (None, None, 0, None)
        return (
            header.stored_length >= self.min_bytes
            and (self.older is None or header.written < self.older)
            and (self.newer is None or header.written > self.newer)
            and (self.codec is None or header.codec == codec_named(self.codec).number)
        )


def digits(text: str, what: str, most: int) -> str:
    """Hexadecimal digits in lower case. Raises ConfigError."""
    if not re.fullmatch(f"[0-9a-fA-F]{{0,{most}}}", text):
        raise ConfigError(f"{text[: most + 1]!r}: expected the first hexadecimal digits of {what}, {most} at most")
    return text.lower()


def items(db: BlockDB, chosen: Filter = Filter()) -> Iterator[Item]:  # noqa: B008: it cannot be changed
    """The index entries of a shard that are meant, in the order of their keys. Raises StoreDamaged."""
    for key, value in _from(db, chosen.start, BATCH):
        if not key.startswith(chosen.start):
            return
        item = Item(db.folder.name, key, value)
        if chosen.accepts(item):
            yield item


def _from(db: BlockDB, start: bytes, most: int) -> Iterator[tuple[bytes, bytes]]:
    """Index entries from `start` on, so many a snapshot; none is open while one is given."""
    while True:
        with reading(db) as snapshot:
            found = snapshot.entries(start, most)
        for key, value in found:
            if key < start:
                raise StoreDamaged(f"{db.folder}: its index is not in order: `kvstore-fsck {db.folder}` tells more")
            start = key + b"\0"
            yield key, value
        if len(found) < most:
            return


def find(shards: Sequence[BlockDB], text: str) -> list[Item]:
    """The records of the block that an operator names: by an index key, a block hash, or the first digits of one, in
    hexadecimal. A block has a record in each group, identity and shard that stores it. Raises ConfigError, UnknownRecord,
    AmbiguousKey, StoreDamaged."""
    wanted = digits(text, "an index key or a block hash", 2 * KEY_BYTES[-1])
    if not wanted:
        raise ConfigError("an empty key: expected an index key, a block hash or its first digits, in hexadecimal")
    whole = [item for db in shards for item in _under(db, wanted)]
    if whole:
        return whole
    begin = [item for db in shards for item in _with_hash(db, wanted)]
    exact = [item for item in begin if item.block_hash.hex() == wanted]
    hashes = sorted({item.block_hash.hex() for item in begin})
    if not begin:
        raise UnknownRecord(f"{text}: no record has this key, or a block hash that begins so: `kvstore ls` lists them")
    if not exact and len(hashes) > 1:
        more = ", ..." if len(hashes) > CANDIDATES else ""
        raise AmbiguousKey(
            f"{text}: several blocks' hashes begin so: {', '.join(hashes[:CANDIDATES])}{more}: give more digits"
        )
    return exact or begin


def _under(db: BlockDB, wanted: str) -> Iterator[Item]:
    """The record under a whole index key."""
    if len(wanted) % 2 == 0 and len(wanted) // 2 in KEY_BYTES:
        with reading(db) as snapshot:
            value = snapshot.header(key := bytes.fromhex(wanted))
        if value is not None:
            yield Item(db.folder.name, key, value)


def _with_hash(db: BlockDB, wanted: str) -> Iterator[Item]:
    """The first records of each identity and group whose block hash begins with these digits; a hash of just these
    comes first."""
    lowest = bytes.fromhex(wanted + "0" * (len(wanted) % 2))
    for prefix in _prefixes(db):
        with reading(db) as snapshot:
            found = snapshot.entries(prefix + lowest, CANDIDATES + 1)
        for key, value in found:
            if key[:PREFIX_BYTES] == prefix and key[PREFIX_BYTES:].hex().startswith(wanted):
                yield Item(db.folder.name, key, value)


def _prefixes(db: BlockDB) -> Iterator[bytes]:
    """What the index keys begin with, identity id and group, without a look at every key."""
    start = b""
    while True:
        with reading(db) as snapshot:
            found = snapshot.entries(start, 1)
        if not found or found[0][0] < start:
            return
        key, start = found[0][0], found[0][0] + b"\0"
        if len(key) >= PREFIX_BYTES:
            yield key[:PREFIX_BYTES]
            after = int.from_bytes(key[:PREFIX_BYTES], "big") + 1
            if after >> 8 * PREFIX_BYTES:
                return
            start = after.to_bytes(PREFIX_BYTES, "big")


@dataclass(frozen=True)
class Condemned:
    """A record in quarantine. shard: its folder's name; name: its quarantine key; entry: what is kept, None where that is
    damaged."""

    shard: str
    name: bytes
    entry: Entry | None

    @property
    def number(self) -> int:
        """Its number in the shard's quarantine."""
        return int.from_bytes(self.name[:SEQUENCE_BYTES], "big")

    @cached_property
    def header(self) -> Header | Rejection:
        """The condemned entry's header, or why it is none."""
        return (
            parse_header(self.entry.value) if self.entry else Rejection("header", "the quarantine's entry is damaged")
        )

    @property
    def item(self) -> Item:
        """The index entry as it lay in the index."""
        return Item(self.shard, self.entry.key, self.entry.value) if self.entry else Item(self.shard, b"", b"")


def condemned(db: BlockDB) -> Iterator[Condemned]:
    """What is in a shard's quarantine, oldest first. Raises StoreDamaged."""
    start = b""
    while True:
        with reading(db) as snapshot:
            found = snapshot.condemned(start, BATCH)
        for name, value in found:
            if name < start:
                raise StoreDamaged(
                    f"{db.folder}: its quarantine is not in order: `kvstore-fsck {db.folder}` tells more"
                )
            start = name + b"\0"
            yield Condemned(db.folder.name, name, parse_entry(value))
        if len(found) < BATCH:
            return


def find_condemned(shards: Sequence[BlockDB], text: str) -> list[Condemned]:
    """What is in quarantine under a number, an index key, a block hash or the first digits of one. Raises ConfigError,
    UnknownRecord, AmbiguousKey, StoreDamaged."""
    everything = [one for db in shards for one in condemned(db)]
    numbered = [one for one in everything if str(one.number) == text]
    if len(numbered) > 1:
        where = ", ".join(one.shard for one in numbered)
        raise AmbiguousKey(f"{text}: the shards {where} have this number each: give one shard's folder")
    wanted = digits(text, "an index key or a block hash", 2 * KEY_BYTES[-1])
    named = [one for one in everything if wanted and _named(one, wanted)]
    hashes = sorted({one.item.block_hash.hex() for one in named})
    if not numbered and wanted not in hashes and len(hashes) > 1:
        raise AmbiguousKey(
            f"{text}: several blocks' hashes begin so: {', '.join(hashes[:CANDIDATES])}: give more digits"
        )
    if not numbered and not named:
        raise UnknownRecord(f"{text}: not in quarantine: `kvstore quarantine list` shows what is")
    return numbered or [one for one in named if wanted not in hashes or one.item.block_hash.hex() == wanted]


def _named(one: Condemned, wanted: str) -> bool:
    return one.item.key.hex() == wanted or one.item.block_hash.hex().startswith(wanted)


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000
