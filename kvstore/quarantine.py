"""Condemned index entries, kept within a bound so that an operator can look at them. Their chunks stay in payload."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.record import Header, parse_header
from kvstore.usage import Usage

ENTRY: Final = struct.Struct("<QBBH")
"""Time (microseconds since 1970), length of the kind, length of the key, length of the index entry; they follow."""
MAX_RECORDS: Final = 1024


@dataclass(frozen=True)
class Entry:
    """A condemned index entry: when, why (a kind of results.REJECTION_KINDS), its key, its bytes."""

    time: int
    kind: str
    key: bytes
    value: bytes

    def encode(self) -> bytes:
        """The value that is stored."""
        kind = self.kind.encode("ascii")
        return ENTRY.pack(self.time, len(kind), len(self.key), len(self.value)) + kind + self.key + self.value


def parse_entry(data: bytes | memoryview) -> Entry | None:
    """A quarantine value taken apart, None where its lengths do not fit."""
    data = bytes(data)
    if len(data) < ENTRY.size:
        return None
    when, kind, key, value = ENTRY.unpack_from(data)
    ends = (ENTRY.size + kind, ENTRY.size + kind + key, ENTRY.size + kind + key + value)
    if ends[2] != len(data):
        return None
    name = data[ENTRY.size : ends[0]].decode("ascii", "replace")
    return Entry(when, name, data[ends[0] : ends[1]], data[ends[1] :])


class Quarantine:
    """The `quarantine` database of a shard, oldest first. Used inside its BlockDB's write transactions alone."""

    def __init__(self, database: Any, max_bytes: int) -> None:
        self.database, self._max_bytes = database, max_bytes

    def add(self, txn: Any, usage: Usage, key: bytes, value: bytes, kind: str) -> list[bytes]:
        """Keep a condemned entry; returns the index entries that had to go to stay within the bound, the new one too
        where it alone is larger. Their chunks are the caller's to free."""
        now = time.time_ns() // 1000
        name = usage.next_sequence(now).to_bytes(8, "big")
        txn.put(name, Entry(now, kind, key, value).encode(), db=self.database)
        usage.quarantine_records += 1
        usage.quarantine_bytes += self._cost(value)
        return self.trim(txn, usage)

    def trim(self, txn: Any, usage: Usage) -> list[bytes]:
        """Let the oldest go until the bound holds; returns their index entries."""
        dropped = []
        with txn.cursor(db=self.database) as cursor:
            while self._over(usage) and cursor.first():
                dropped.append(self._take(cursor, usage))
        return dropped

    def remove(self, names: Sequence[bytes], txn: Any, usage: Usage) -> list[bytes]:
        """Let the entries under these quarantine keys go; returns their index entries."""
        with txn.cursor(db=self.database) as cursor:
            return [self._take(cursor, usage) for name in names if cursor.set_key(name)]

    def _take(self, cursor: Any, usage: Usage) -> bytes:
        """Delete the entry at the cursor; its index entry, empty where that cannot be told."""
        entry = parse_entry(cursor.value())
        cursor.delete()
        usage.quarantine_records -= 1
        if entry is None:
            return b""
        usage.quarantine_bytes -= self._cost(entry.value)
        return entry.value

    def _over(self, usage: Usage) -> bool:
        return usage.quarantine_records > MAX_RECORDS or usage.quarantine_bytes > self._max_bytes

    @staticmethod
    def _cost(value: bytes) -> int:
        header = parse_header(value)
        return header.stored_length if isinstance(header, Header) else len(value)
