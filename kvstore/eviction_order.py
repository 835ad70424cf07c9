"""Entries in the order in which they came, in arrays: by their last touch, and ghosts by when they became one."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.eviction_table import Bools, Ints, Slots

MIN_PLACES: Final = 1024
GROWTH: Final = 1.25
"""How much larger than what it must hold an array is made."""
NOWHERE: Final = 2**32 - 1
Places = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.uint8]


class Order:
    """A queue of entries, oldest first. An entry that is appended again, or leaves, has a stale place left behind: a
    place counts where `where` of its entry names it and the entry has one of the flags `bits`. One thread at a time.

    4 bytes a place, at most 1.25 places for each that counts, or MIN_PLACES; making it anew takes as much again, and
    13 bytes a place.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.start = self.end = 0
        self.slots = np.empty(MIN_PLACES, np.int32)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def full_with(self, more: int) -> bool:
        """Whether `more` entries need a queue that is compacted."""
        return self.end + more > self.slots.size

    def append(self, slots: Slots, where: Places) -> None:
        """Put entries at the young end. Needs room: see `full_with`."""
        end = self.end + slots.size
        self.slots[self.end : end] = slots
        where[slots] = np.arange(self.end, end)
        self.end = end

    def counting(self, places: Ints, where: Places, flags: Flags) -> Bools:
        """Which of these places count."""
        slots = self.slots[places]
        counting: Bools = (where[slots] == places) & (flags[slots] & self.bits != 0)
        return counting

    def take(self, count: int, where: Places, flags: Flags) -> Slots:
        """Remove up to `count` entries from the old end; fewer where stale places lie between them."""
        places = np.arange(self.start, min(self.end, self.start + count))
        self.start += places.size
        return self.slots[places[self.counting(places, where, flags)]].astype(np.int64)

    def compact(self, where: Places, flags: Flags, more: int) -> None:
        """Drop stale places, and make room for `more`."""
        places = np.arange(self.start, self.end)
        kept = places[self.counting(places, where, flags)]
        size = max(MIN_PLACES, int(GROWTH * (kept.size + more)))
        self._keep(kept, size)
        self.start, self.end = 0, kept.size
        where[self.slots[: kept.size]] = np.arange(kept.size)

    def _keep(self, kept: Ints, size: int) -> None:
        slots = np.empty(size, np.int32)
        slots[: kept.size] = self.slots[kept]
        self.slots = slots


class TouchOrder(Order):
    """An Order that knows when each place was appended, in ticks that never decrease: 8 bytes a place."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.ticks = np.empty(MIN_PLACES, np.uint32)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.ticks.nbytes

    def stamp(self, ticks: int | npt.NDArray[np.uint32], count: int) -> None:
        """When the newest `count` places were appended."""
        self.ticks[self.end - count : self.end] = ticks

    def until(self, ticks: Ints) -> Ints:
        """For each time the number of places that were appended then or before."""
        bounded = np.clip(ticks, 0, NOWHERE).astype(np.uint32)
        return np.where(ticks < 0, 0, np.searchsorted(self.ticks[: self.end], bounded, side="right"))

    def _keep(self, kept: Ints, size: int) -> None:
        super()._keep(kept, size)
        ticks = np.empty(size, np.uint32)
        ticks[: kept.size] = self.ticks[kept]
        self.ticks = ticks
