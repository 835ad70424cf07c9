"""A shard that records are put into as they are: with their own headers, under their own sequence numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.blockdb import BlockDB
from kvstore.record import Header, chunk_key
from kvstore.usage import Usage


@dataclass(frozen=True)
class Whole:
    """A record whose every hash was checked. entry: the header's bytes; chunks: the directory, then the chunks as stored."""

    header: Header
    entry: bytes
    chunks: Sequence[bytes]

    @property
    def nbytes(self) -> int:
        return len(self.entry) + sum(map(len, self.chunks))


class Restored(BlockDB):
    """A shard in the making. Threads, forks and close as BlockDB."""

    def restore(self, records: Sequence[Whole], notes: Mapping[bytes, bytes]) -> list[bool]:
        """Write records in one transaction, and what `meta` must say besides; for each record whether it was written: not
        where one with its key, or with its sequence number, is here already. Raises lmdb.Error or OSError; then nothing of
        this call is written."""
        return self._with_room(partial(self._restore_all, records, notes))

    def _restore_all(self, records: Sequence[Whole], notes: Mapping[bytes, bytes]) -> list[bool]:
        with self._accounted() as (txn, usage):
            for name, note in notes.items():
                txn.put(name, note, db=self._meta)
            return [self._restore(txn, usage, record) for record in records]

    def _restore(self, txn: Any, usage: Usage, record: Whole) -> bool:
        header = record.header
        taken = txn.get(chunk_key(header.sequence, 0), db=self._payload) is not None
        if taken or not txn.put(header.key, record.entry, db=self._index, overwrite=False):
            return False
        for number, chunk in enumerate(record.chunks):
            at = chunk_key(header.sequence, number)
            if not txn.put(at, chunk, db=self._payload, append=True):
                txn.put(at, chunk, db=self._payload)
        usage.last_sequence = max(usage.last_sequence, header.sequence)
        usage.add(header)
        return True
