"""What a reader sees of a shard: one transaction's state, or nothing where there is no shard to see."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from kvstore.record import MAX_HEADER_BYTES, chunk_key

MAX_CONDEMNED_BYTES: Final = 2**12
"""Of a quarantine entry: more than its parts can have."""


class ReadView:
    """A snapshot of the shard. Memoryviews that it gives dangle once the `read()` block ends: copy before."""

    def __init__(self, txn: Any, index: Any, payload: Any, condemned: Any) -> None:
        self._txn, self._index, self._payload, self._condemned = txn, index, payload, condemned

    @property
    def transaction(self) -> int:
        """The number of the last transaction that it sees."""
        number: int = self._txn.id()
        return number

    def header(self, key: bytes) -> bytes | None:
        """A copy of the index entry under the key, None where there is none; of one that is too long for a header, as
        much as shows that."""
        found = self._txn.get(key, db=self._index)
        return None if found is None else bytes(found[: MAX_HEADER_BYTES + 1])

    def headers(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """The index entry under each key, None where there is none, in one call."""
        with self._txn.cursor(db=self._index) as cursor:
            found = cursor.getmulti(keys)
        if len(found) == len(keys):
            return [value for _, value in found]
        there = {bytes(key): value for key, value in found}
        return [there.get(key) for key in keys]

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        """The stored bytes of a chunk, None where it is missing."""
        found: memoryview | None = self._txn.get(chunk_key(sequence, number), db=self._payload)
        return found

    def entries(self, start: bytes, most: int) -> list[tuple[bytes, bytes]]:
        """The index keys from `start` on and their entries, `most` at most; of an entry that is too long for a header, as
        much as shows that. Copies."""
        return self._from(self._index, start, most, MAX_HEADER_BYTES + 1)

    def condemned(self, start: bytes, most: int) -> list[tuple[bytes, bytes]]:
        """The quarantine's keys from `start` on and their values, `most` at most. Copies."""
        return self._from(self._condemned, start, most, MAX_CONDEMNED_BYTES)

    def _from(self, database: Any, start: bytes, most: int, longest: int) -> list[tuple[bytes, bytes]]:
        with self._txn.cursor(db=database) as cursor:
            there = cursor.iternext() if cursor.set_range(start) else ()
            return [(bytes(key), bytes(value[:longest])) for key, value in islice(there, most)]


class Nothing(ReadView):
    """The snapshot of a shard that is not there: no key has a record."""

    def __init__(self) -> None:
        super().__init__(None, None, None, None)

    @property
    def transaction(self) -> int:
        return 0

    def header(self, key: bytes) -> bytes | None:
        return None

    def headers(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        return [None] * len(keys)

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        return None

    def _from(self, database: Any, start: bytes, most: int, longest: int) -> list[tuple[bytes, bytes]]:
        return []


NOTHING: Final = Nothing()
