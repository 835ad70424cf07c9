"""Worlds: all blocks that a campaign may store, known beforehand, so that whatever is served can be compared with them;
and the audit that a store's accounting has to stand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lmdb.verify
import numpy as np
import torch

from kvstore import GetResult, KVStore, PagedKVCache, StoreConfig
from kvstore.quarantine import parse_entry
from kvstore.record import Header, parse_header
from kvstore.storefile import DATA_NAME
from kvstore.usage import Usage
from tests.support import IDENTITY, MIB, block_hashes, canonical, layer_tensors, make_cache, shard_of

LARGEST_BYTES = 2**20
"""No record of a campaign has more."""
PREFIX_BYTES = 18
"""Of an index key, before the block hash."""


@dataclass(frozen=True)
class World:
    """Requests of equal length. Block n of the world is block n of `source`, and belongs into block n of `target`; it is
    block n % length of request n // length. What a block holds follows from its number alone, as its hash does."""

    name: str
    requests: int
    length: int
    shape: dict[str, int]

    @property
    def count(self) -> int:
        return self.requests * self.length

    @cached_property
    def source(self) -> PagedKVCache:
        return make_cache(blocks=self.count, seed=11, **self.shape)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return layer_tensors("BHNC", blocks=self.count, seed=12, **self.shape)

    @cached_property
    def target(self) -> PagedKVCache:
        return PagedKVCache.from_tensors(self.tensors, "BHNC")

    @cached_property
    def truth(self) -> np.ndarray[Any, Any]:
        return canonical(self.source, range(self.count))

    @cached_property
    def hashes(self) -> list[bytes]:
        return [h for r in range(self.requests) for h in block_hashes(self.length, f"{self.name}/{r}")]

    @cached_property
    def number_of(self) -> dict[bytes, int]:
        return {block_hash: number for number, block_hash in enumerate(self.hashes)}

    def warm(self) -> World:
        """Make now what forked children would each make for themselves, compiled loops among it.

        torch's threads do not survive a fork: a child that hands them work waits for ever.
        """
        torch.set_num_threads(1)
        _ = self.source, self.target, self.truth, self.number_of
        with tempfile.TemporaryDirectory() as folder, self.open(Path(folder), small_config(self)) as store:
            self.put(store, self.request(0))
            assert self.get(store, self.request(0)).right
        return self

    def request(self, number: int) -> range:
        return range(number * self.length, (number + 1) * self.length)

    def open(self, path: Path, config: StoreConfig, **options: Any) -> KVStore:
        return KVStore(path, self.source, IDENTITY, config, **options)

    def put(self, store: KVStore, numbers: range) -> Any:
        """Put consecutive blocks of one request."""
        start = numbers[0] % self.length
        parent = self.hashes[numbers[0] - 1] if start else None
        return store.put_blocks([self.hashes[n] for n in numbers], numbers, start, parent=parent)

    def get(self, store: KVStore, numbers: range) -> Served:
        """Get consecutive blocks of one request into blocks that hold something else, and compare what is verified."""
        for tensor in self.tensors.values():
            tensor[numbers[0] : numbers[-1] + 1].view(torch.uint8).numpy().fill(0xA5)
        loader = store.attach(self.target)
        got = loader.get_blocks([self.hashes[n] for n in numbers], numbers, numbers[0] % self.length)
        return self._compare(got, numbers)

    def _compare(self, got: GetResult, numbers: range) -> Served:
        landed = canonical(self.target, numbers)
        same = (landed == self.truth[numbers[0] : numbers[-1] + 1]).all(axis=1)
        pick = lambda mask: {numbers[int(i)] for i in np.flatnonzero(mask)}  # noqa: E731
        rejected = {numbers[i]: f"{r.kind}: {r.detail}" for i, r in got.rejected.items()}
        return Served(pick(got.verified & same), pick(got.verified & ~same), pick(got.missing), rejected)

    def get_all(self, store: KVStore) -> Served:
        """Get every block of the world."""
        return sum((self.get(store, self.request(r)) for r in range(self.requests)), Served())

    def present(self, store: KVStore) -> list[int]:
        """The blocks that the index names."""
        keys = shard_of(store).db.keys(b"", 2**30)
        return sorted(self.number_of.get(key[PREFIX_BYTES:], -1) for key in keys)


@dataclass
class Served:
    """What became of the blocks of some gets: numbers of blocks, and why they were rejected."""

    right: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    rejected: dict[int, str] = field(default_factory=dict)

    def __add__(self, other: Served) -> Served:
        return Served(
            self.right | other.right,
            self.wrong | other.wrong,
            self.missing | other.missing,
            self.rejected | other.rejected,
        )


SMALL = World("small", 80, 8, {"layers": 2, "heads": 2, "tokens": 4, "head_size": 16})
"""Blocks of 1 KiB, which lie in leaf pages."""
LARGE = World("large", 12, 8, {"layers": 2, "heads": 2, "tokens": 16, "head_size": 64})
"""Blocks of 16 KiB, which lie on pages of their own."""
HUGE = World("huge", 6, 4, {"layers": 20, "heads": 2, "tokens": 16, "head_size": 128})
"""Blocks of 320 KiB in two chunks."""
WORLDS = {world.name: world for world in (SMALL, LARGE, HUGE)}
CAPACITY = {"small": MIB, "large": MIB, "huge": 6 * MIB}
"""What holds some half of each world, or less."""


def small_config(world: World, **changes: Any) -> StoreConfig:
    """A capacity that the world does not fit."""
    return replace(StoreConfig(capacity_bytes=CAPACITY[world.name], durability="process"), **changes)


# --- the audit -------------------------------------------------------------------------------------------------------


@dataclass
class Shelf:
    """What the databases of an open shard hold, counted anew."""

    headers: list[Header] = field(default_factory=list)
    unreadable: int = 0
    condemned: list[Header] = field(default_factory=list)
    condemned_unreadable: int = 0
    quarantine_bytes: int = 0
    quarantine_records: int = 0
    chunks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Lengths, by sequence number and chunk number."""
    usage: Usage = field(default_factory=Usage)


def count_shelf(store: KVStore) -> Shelf:
    """Read all databases in one snapshot."""
    db, shelf = shard_of(store).db, Shelf()
    with db._env.begin() as txn:
        shelf.usage = Usage.parse(txn.get(b"usage", db=db._meta))
        for key, value in txn.cursor(db=db._index):
            _shelve(parse_header(value, key), shelf)
        for _, value in txn.cursor(db=db._quarantined):
            _shelve_condemned(value, shelf)
        for key, value in txn.cursor(db=db._payload):
            numbers = shelf.chunks.setdefault(int.from_bytes(key[:8], "big"), {})
            numbers[int.from_bytes(key[8:], "big")] = len(value)
    return shelf


def _shelve(header: object, shelf: Shelf) -> None:
    if isinstance(header, Header):
        shelf.headers.append(header)
    else:
        shelf.unreadable += 1


def _shelve_condemned(value: bytes, shelf: Shelf) -> None:
    entry = parse_entry(value)
    header = parse_header(entry.value) if entry else None
    shelf.quarantine_records += 1
    if isinstance(header, Header):
        shelf.condemned.append(header)
        shelf.quarantine_bytes += header.stored_length
    else:
        shelf.condemned_unreadable += 1
        shelf.quarantine_bytes += len(entry.value) if entry else 0


def audit(store: KVStore, unreadable: int = 0) -> list[str]:
    """What is wrong with the accounting of an open shard. unreadable: how many headers were ever damaged; the bytes of
    such a record stay counted, and nothing names its chunks (docs/format.md, section 16)."""
    shelf = count_shelf(store)
    return [*_audit_chunks(shelf, unreadable), *_audit_usage(shelf, store, unreadable)]


def _audit_chunks(shelf: Shelf, unreadable: int) -> Iterable[str]:
    named = [header.sequence for header in (*shelf.headers, *shelf.condemned)]
    if len(set(named)) != len(named):
        yield f"{len(named) - len(set(named))} sequence numbers name two records"
    if shelf.unreadable + shelf.condemned_unreadable > unreadable:
        yield f"{shelf.unreadable} headers in the index and {shelf.condemned_unreadable} in quarantine are damaged"
    for header in shelf.headers:
        chunks = shelf.chunks.get(header.sequence, {})
        if sorted(chunks) != list(range(len(chunks))) or sum(chunks.values()) != header.stored_length:
            yield f"record {header.sequence}: chunks {chunks} are not its {header.stored_length} bytes"
    stray = set(shelf.chunks) - set(named)
    if len(stray) > unreadable:
        yield f"nothing names the chunks of {len(stray)} records, such as {min(stray)}"
    if shelf.usage.last_sequence < max(shelf.chunks, default=0):
        yield f"last_sequence {shelf.usage.last_sequence} is behind {max(shelf.chunks)}"


def _audit_usage(shelf: Shelf, store: KVStore, unreadable: int) -> Iterable[str]:
    raw, stored = (sum(getattr(h, name) for h in shelf.headers) for name in ("raw_length", "stored_length"))
    largest = LARGEST_BYTES * unreadable
    usage, stats = shelf.usage, store.stats()
    if not raw <= usage.raw_bytes <= raw + largest or not stored <= usage.stored_bytes <= stored + largest:
        yield f"accounted {usage.raw_bytes}, {usage.stored_bytes} bytes: counted {raw}, {stored}"
    counted = (shelf.quarantine_records, shelf.quarantine_bytes)
    if counted != (usage.quarantine_records, usage.quarantine_bytes):
        yield f"quarantine accounted {usage.quarantine_records}, {usage.quarantine_bytes}: counted {counted}"
    if stats["records"] != len(shelf.headers) + shelf.unreadable:
        yield f"{stats['records']} records in stats: counted {len(shelf.headers)} and {shelf.unreadable} unreadable"
    if stats["raw_bytes"] != usage.raw_bytes or stats["stored_bytes"] != usage.stored_bytes:
        yield f"stats {stats} say otherwise than {usage}"
    if stats["file_bytes"] > stats["capacity_bytes"]:
        yield f"the file has {stats['file_bytes']} bytes, beyond {stats['capacity_bytes']}"


def audit_file(folder: Path) -> list[str]:
    """What is wrong with a closed shard's tree and free list: every page of the file must be in exactly one of them, so
    that page counts, and with them `free_bytes`, are right."""
    try:
        problems: Sequence[object] = lmdb.verify.verify(str(folder / DATA_NAME), subdir=False)
    except lmdb.verify.VerifyError as error:
        problems = [error]
    return [f"{DATA_NAME}: {problem}" for problem in problems[:3]]
