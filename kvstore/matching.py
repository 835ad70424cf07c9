"""match_prefix: how many leading blocks of a request are here."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt

from kvstore.record import VERSION, Header, parse_header
from kvstore.shape import GroupShape
from kvstore.shard import Shard

FIRST_KEYS: Final = 16
"""Keys that are looked up at first; then twice as many each time, since most requests end early or late."""
FIT: Final = struct.Struct("<4xH12xHIQ24xQ8xQ")
"""Of a header: version, flags, block size, raw length, position, fingerprint (kvstore.record)."""
POSITION: Final = slice(56, 64)
"""Where FIT has the position."""
FIT_BYTES: Final = np.flatnonzero(np.frombuffer(FIT.pack(0xFFFF, 0xFFFF, 2**32 - 1, 2**64 - 1, 0, 2**64 - 1), np.uint8))
"""Where FIT has anything else."""
FEW: Final = 16
"""Fewer entries are looked at one by one in less time."""
Bytes = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Match:
    """One match_prefix call over one group."""

    shard: Shard
    shape: GroupShape
    keys: list[bytes]
    start: int = 0
    """The position of the first."""

    def run(self) -> int:
        """How many leading keys answer; 0, and counted, where LMDB cannot read."""
        found, step = 0, FIRST_KEYS
        try:
            with self.shard.db.read() as snapshot:
                while found < len(self.keys):
                    asked = self.keys[found : found + step]
                    new = self._leading(self.start + found, asked, snapshot.headers(asked))
                    found += new
                    if new < len(asked):
                        break
                    step *= 2
        except lmdb.Error:
            self.shard.counters.add("match_failed")
            return 0
        return found

    def each(self) -> list[bool]:
        """Whether each key answers; none, and counted, where LMDB cannot read."""
        try:
            with self.shard.db.read() as snapshot:
                entries = snapshot.headers(self.keys)
                return [bool(self._leading(self.start + i, self.keys[i : i + 1], [e])) for i, e in enumerate(entries)]
        except lmdb.Error:
            self.shard.counters.add("match_failed")
            return [False] * len(self.keys)

    def _alike(self, position: int, entries: list[memoryview | None]) -> int:
        """How many leading entries are of one length and fit without doubt, seen all at once; the one behind may fit, too."""
        there = next((i for i, entry in enumerate(entries) if entry is None), len(entries))
        lengths = {len(entry) for entry in entries[:there] if entry is not None}
        if there < FEW or len(lengths) > 1 or self.shard.refused:
            return 0
        [length] = lengths
        wanted, asked = self._wanted(length)
        if wanted is None:
            return 0
        rows = np.frombuffer(b"".join(entries[:there]), np.uint8).reshape(there, length)  # type: ignore[arg-type]
        fits = (rows[:, asked] == wanted[asked]).all(axis=1)
        fits &= rows[:, POSITION].copy().view("<u8")[:, 0] == np.arange(position, position + there, dtype=np.uint64)
        return there if fits.all() else int(fits.argmin())

    def _wanted(self, length: int) -> tuple[Bytes | None, Bytes]:
        """An entry of that length as this shape's are, and at which bytes it must be so; None where none is."""
        shape, asked = self.shape, FIT_BYTES.copy()
        if length <= FIT.size + len(shape.geometry):
            return None, asked
        head = FIT.pack(VERSION, shape.flags, shape.block_size, shape.plan.raw_length, 0, shape.fingerprint)
        wanted = np.zeros(length, np.uint8)
        wanted[: FIT.size] = np.frombuffer(head, np.uint8)
        wanted[length - len(shape.geometry) :] = np.frombuffer(shape.geometry, np.uint8)
        at = np.arange(length - len(shape.geometry), length)
        return wanted, np.concatenate((asked, at))

    def _leading(self, position: int, keys: list[bytes], entries: list[memoryview | None]) -> int:
        """How many leading keys answer, the first of which asks for a position."""
        shape, doubtful = self.shape, bool(self.shard.refused)
        block_size, raw_length, fingerprint = shape.block_size, shape.plan.raw_length, shape.fingerprint
        flags, geometry, unpack, least = shape.flags, shape.geometry, FIT.unpack_from, FIT.size + len(shape.geometry)
        start, alike = -len(geometry), self._alike(position, entries)
        for asked, entry in enumerate(entries[alike:], position + alike):
            if entry is None:
                return asked - position
            # What `misfit` asks for, the header's hash and key unchecked.
            fits = len(entry) > least and unpack(entry) == (VERSION, flags, block_size, raw_length, asked, fingerprint)
            if fits and not doubtful and entry[start:] == geometry:
                continue
            if not self._answers(keys[asked - position], bytes(entry), asked):
                return asked - position
        return len(keys)

    def _answers(self, key: bytes, value: bytes, position: int) -> bool:
        """Whether a get would try this index entry. A damaged one counts: the get refuses it, and says so."""
        if self.shard.refused.holds(key, value):
            return False
        header = parse_header(value, key)
        return not isinstance(header, Header) or self.shape.misfit(header, position) is None
