"""Damage to the records of a shard, below everything that kvstore checks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.record import Directory, Header, chunk_key, parse_directory, parse_header
from kvstore.shape import GroupShape
from tests.support import Raw, flip

KEY_PREFIX = 18
"""An index key's bytes before the block hash: identity id and group."""
SHARD = "tp0of1-pp0of1"
KINDS = ("bit", "content", "header", "exchange", "exchange chunks", "lose chunk")


class Records(Raw):
    """A shard's records. Whoever has it open elsewhere goes on: LMDB's locks keep the two apart."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._own = folder, None

    def headers(self, group: int = 0) -> list[Header]:
        """The records of a group by their positions; among those of one position, the oldest first."""
        found = [parse_header(value) for key, value in self.entries().items() if group_of(key) == group]
        headers = [header for header in found if isinstance(header, Header)]
        return sorted(headers, key=lambda header: (header.position, header.sequence))

    def requests(self, group: int = 0) -> list[list[Header]]:
        """The records of requests that have nothing in common, each from its first block on."""
        headers = self.headers(group)
        chains = {header.key[KEY_PREFIX:]: [header] for header in headers if not header.parent}
        for header in headers:
            if header.parent in chains:
                chain = chains[header.key[KEY_PREFIX:]] = chains.pop(header.parent)
                chain.append(header)
        return list(chains.values())

    def flip_bit(self, header: Header, bit: int) -> None:
        """Flip a bit of a record's payload."""
        chunks = self._chunks(header)
        lengths = [8 * len(self.chunk(key)) for key in chunks]
        bit %= sum(lengths)
        for key, length in zip(chunks, lengths, strict=True):
            if bit < length:
                return self.put_chunk(key, flip(self.chunk(key), bit))
            bit -= length
        raise AssertionError("no such bit")

    def flip_content(self, header: Header, bit: int) -> None:
        """Flip a bit of a record's payload and give it right storage hashes: only its content's checksum tells."""
        self.flip_bit(header, bit)
        directory_key, chunks = chunk_key(header.sequence, 0), self._chunks(header)
        shape = GroupShape(
            header.block_size, header.geometry, header.fingerprint, header.key[:KEY_PREFIX], header.flags
        )
        directory = parse_directory(memoryview(self.chunk(directory_key)), header, shape.plan)
        assert isinstance(directory, Directory)
        hashes = np.array([xxh3_64_intdigest(self.chunk(key)) for key in chunks], np.uint64)
        data = replace(directory, hashes=hashes).encode()
        self.put_chunk(directory_key, data)
        changed = replace(header, directory_hash=xxh3_64_intdigest(data))
        self.put_entry(header.key, changed.encode(header.sequence, header.written))

    def flip_header(self, header: Header, bit: int) -> None:
        """Flip a bit of a record's index entry."""
        entry = self.entry(header.key)
        assert entry is not None
        self.put_entry(header.key, flip(entry, bit % (8 * len(entry))))

    def exchange(self, one: Header, other: Header) -> None:
        """Put each of two records under the other's key."""
        entries = self.entry(one.key), self.entry(other.key)
        self.put_entry(one.key, entries[1])
        self.put_entry(other.key, entries[0])

    def exchange_chunks(self, one: Header, other: Header) -> None:
        """Give each of two records of one size the other's payload, directory and all."""
        keys = [[chunk_key(h.sequence, 0), *self._chunks(h)] for h in (one, other)]
        values = [[self.chunk(key) for key in own] for own in keys]
        for own, taken in zip(keys, reversed(values), strict=True):
            for key, value in zip(own, taken, strict=True):
                self.put_chunk(key, value)

    def lose_chunk(self, header: Header) -> None:
        """Delete a record's first chunk of payload."""
        self.put_chunk(chunk_key(header.sequence, 1), None)

    def damage(self, kind: str, one: Header, other: Header, bit: int) -> None:
        """Damage a record, or two, in a way of KINDS."""
        {
            "bit": lambda: self.flip_bit(one, bit),
            "content": lambda: self.flip_content(one, bit),
            "header": lambda: self.flip_header(one, bit),
            "exchange": lambda: self.exchange(one, other),
            "exchange chunks": lambda: self.exchange_chunks(one, other),
            "lose chunk": lambda: self.lose_chunk(one),
        }[kind]()

    def whole(self, header: Header) -> bool:
        """Whether a record lies under its own key and has all of its chunks and the directory that its header names, so that
        it can be damaged further."""
        directory, entry = self.value("payload", chunk_key(header.sequence, 0)), self.entry(header.key)
        return (
            entry is not None
            and parse_header(entry) == header
            and directory is not None
            and xxh3_64_intdigest(directory) == header.directory_hash
            and bool(self._chunks(header))
        )

    def _chunks(self, header: Header) -> list[bytes]:
        """The keys of a record's payload, without its directory."""
        prefix = chunk_key(header.sequence, 0)[:8]
        return [key for key in self.payload() if key[:8] == prefix and key != chunk_key(header.sequence, 0)]


def group_of(key: bytes) -> int:
    """The KV cache group of an index key."""
    return int.from_bytes(key[16:18], "big")


def damage_some(folder: Path, chance: random.Random, count: int, kinds: Sequence[str] = KINDS) -> list[str]:
    """Damage so many records, or pairs of them, each in a way of its own; what was done. Fewer where there are fewer."""
    records = Records(folder)
    groups = sorted({group_of(key) for key in records.entries()})
    done = []
    for _ in range(count):
        headers = records.headers(chance.choice(groups))
        if len(headers) < 2:
            break
        kind, (one, other) = chance.choice(kinds), chance.sample(headers, 2)
        if records.whole(one) and records.whole(other):
            records.damage(kind, one, other, chance.randrange(2**24))
            done.append(kind)
    return done
