"""Which chunks are there, by their keys: numbers in arrays, so that a large shard's fit in memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
KEY = np.dtype([("sequence", ">u8"), ("number", ">u2")])
ALL_CHUNKS = 2**16


class Chunks:
    """The chunks of payload. keys: of 10 bytes each, in order, in any number of pieces."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        rows = [np.frombuffer(piece, KEY) for piece in keys]
        sequences = np.concatenate([np.empty(0, np.uint64), *(row["sequence"].astype(np.uint64) for row in rows)])
        self.numbers = np.concatenate([np.empty(0, np.uint16), *(row["number"].astype(np.uint16) for row in rows)])
        found = np.unique(sequences, return_index=True, return_counts=True)
        self.sequences: U64 = found[0]
        """Each once, in order."""
        self._first, self._count = found[1].astype(np.int64), found[2].astype(np.int64)

    def under(self, place: int) -> list[int]:
        """The chunk numbers under sequences[place], in order."""
        numbers: list[int] = self.numbers[self._first[place] : self._first[place] + self._count[place]].tolist()
        return numbers

    def places(self, named: U64) -> Ints:
        """Where these sequence numbers are in `sequences`, -1 where they are not."""
        at = np.searchsorted(self.sequences, named)
        there = at < self.sequences.size
        there[there] = self.sequences[at[there]] == named[there]
        return np.asarray(np.where(there, at, -1), np.int64)

    @cached_property
    def _last(self) -> Ints:
        return np.asarray(self.numbers[self._first + self._count - 1], np.int64)

    def lacking(self, places: Ints, last: Ints) -> Flags:
        """Which records lack chunks: their place, and the number of their last chunk, below 0 where that is not known."""
        lacks = (places < 0) & (last >= 0)
        at = (places >= 0) & (last >= 0)
        enough = self._count[places[at]] > last[at]
        # Numbers are different and in order: none before number n is missing where the n-th after the first is n.
        row = (self._first[places[at]] + last[at])[enough]
        enough[enough] = self.numbers[row] == last[at][enough]
        lacks[at] = ~enough
        return lacks

    def beyond(self, places: Ints, last: Ints) -> list[tuple[int, list[int]]]:
        """Chunks that come after the last one of each record that names their sequence number: place and numbers. last: as
        in lacking, of which any number may be meant where it is not known."""
        most = np.full(self.sequences.size, -1, np.int64)
        named = places >= 0
        np.maximum.at(most, places[named], np.where(last < 0, ALL_CHUNKS, last)[named])
        too_many = np.flatnonzero((most >= 0) & (self._last > most)).tolist() if self.sequences.size else []
        return [(place, [n for n in self.under(place) if n > most[place]]) for place in too_many]

    def unnamed(self, named: U64) -> list[int]:
        """Places of sequence numbers that nobody names."""
        found: list[int] = np.flatnonzero(~np.isin(self.sequences, named)).tolist()
        return found
