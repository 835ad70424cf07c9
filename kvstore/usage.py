"""The shard's accounting: one small value in `meta`, written in the transaction that changes what it counts."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from typing import Final

from kvstore.record import Header
from kvstore.results import Rejection

FORM: Final = struct.Struct("<5Q")
MAX_SEQUENCE: Final = 2**62
"""No sequence number that was given reaches this: a larger one was read from damaged bytes."""


@dataclass
class Usage:
    """last_sequence: the newest sequence number given; raw_bytes and stored_bytes: of all records, the latter with
    directories; quarantine_records and quarantine_bytes. Belongs to one transaction."""

    last_sequence: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    quarantine_records: int = 0
    quarantine_bytes: int = 0

    @classmethod
    def parse(cls, data: bytes | memoryview | None) -> Usage:
        """The stored accounting; zeros in a new shard, or where its length is wrong."""
        return cls(*FORM.unpack(data)) if data is not None and len(data) == FORM.size else cls()

    def encode(self) -> bytes:
        """The value that is stored."""
        return FORM.pack(*(min(max(value, 0), 2**64 - 1) for value in astuple(self)))

    def next_sequence(self, now: int) -> int:
        """A sequence number that no record ever had: past the last one, and past a restored backup's by the clock
        (microseconds since 1970)."""
        last = self.last_sequence if self.last_sequence < MAX_SEQUENCE - 2**32 else 0
        self.last_sequence = max(last + 1, now)
        return self.last_sequence

    def add(self, header: Header) -> None:
        """Count a record."""
        self.raw_bytes += header.raw_length
        self.stored_bytes += header.stored_length

    def remove(self, header: Header | Rejection) -> None:
        """Count a record no more; an unreadable header's bytes are unknown and stay counted."""
        if isinstance(header, Header):
            self.raw_bytes -= header.raw_length
            self.stored_bytes -= header.stored_length

    def figures(self) -> dict[str, int]:
        """What `stats()` shows."""
        return {
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "quarantine_records": self.quarantine_records,
            "quarantine_bytes": self.quarantine_bytes,
        }
