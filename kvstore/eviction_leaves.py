"""Which resident blocks are leaves, counted by class and age, so that the oldest of a cell is found without a search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from kvstore.eviction_entries import LISTED, ORPHAN, PINNED, RESIDENT, Entries
from kvstore.eviction_table import Ints, Slots

SEGMENT: Final = 256
"""Places of the order of touches whose leaves are counted together."""


class Leaves:
    """The leaves among an Entries' resident blocks: those without a resident child that are not pinned.

    A cell is a class and a bucket of age; bucket k holds what was touched edges[k - 1] ticks ago or more, but less than
    edges[k]. Orphans have a class of their own, the last. What makes a block a leaf, its class and its place change
    only between `unlist` and `list`. Owned by one policy, used by one thread at a time; 0.2 bytes an entry.
    """

    def __init__(self, entries: Entries, classes: int, edges: Ints) -> None:
        self.entries = entries
        self.classes = classes
        self.edges = edges
        self.cells = np.zeros((classes + 1, edges.size + 1), np.int64)
        self.counts = np.zeros((classes + 1, self._segments()), np.uint16)
        self.bounds = np.zeros(edges.size, np.int64)
        """How many places are as old as each edge, the largest edge first: ascending."""
        self.tick = 0

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.cells.nbytes

    def classes_of(self, slots: Slots) -> Ints:
        """The class under which entries are listed."""
        orphan = self.entries.flags[slots] & ORPHAN != 0
        return np.where(orphan, self.classes, self.entries.kind[slots])

    def buckets_of(self, slots: Slots) -> Ints:
        """The bucket of each entry's age."""
        return self.edges.size - np.searchsorted(self.bounds, self.entries.touched[slots], side="right")

    def advance(self, tick: int) -> tuple[Ints, Ints]:
        """Let time pass: class and bucket for each time that an entry, resident or ghost, left a bucket."""
        self.tick = tick
        old, self.bounds = self.bounds, self._bounds()
        lengths = self.bounds - old
        if not lengths.any():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        left = np.repeat(np.arange(self.edges.size - 1, -1, -1), lengths)
        places = np.arange(left.size) + np.repeat(old - np.cumsum(lengths) + lengths, lengths)
        counting = self.entries.touches.counting(places, self.entries.touched, self.entries.flags)
        slots, left = self.entries.touches.slots[places[counting]], left[counting]
        listed = self.entries.flags[slots] & LISTED != 0
        classes, buckets = self.classes_of(slots[listed]), left[listed]
        np.subtract.at(self.cells, (classes, buckets), 1)
        np.add.at(self.cells, (classes, buckets + 1), 1)
        return self.entries.kind[slots].astype(np.int64), left

    def until(self, tick: int) -> int:
        """How many places are as old as a time, or older."""
        return int(self.entries.touches.until(np.array([tick]))[0])

    def _bounds(self) -> Ints:
        return self.entries.touches.until(self.tick - self.edges[::-1])

    def unlist(self, slots: Slots) -> None:
        """Before entries change: count them no more."""
        flags = self.entries.flags
        listed = slots[flags[slots] & LISTED != 0]
        if listed.size:
            self._count(listed, np.subtract)
            flags[listed] &= ~np.uint8(LISTED)

    def list(self, slots: Slots) -> None:
        """After different entries have changed: count those that are leaves."""
        flags = self.entries.flags
        able = flags[slots] & (RESIDENT | PINNED | LISTED) == RESIDENT
        leaves = slots[able & (self.entries.children[slots] == 0)]
        if leaves.size:
            flags[leaves] |= LISTED
            self._count(leaves, np.add)

    def moved(self) -> None:
        """All places have changed, not their times."""
        self.bounds = self._bounds()
        self.counts = np.zeros((self.classes + 1, self._segments()), np.uint16)
        listed = np.flatnonzero(self.entries.flags & LISTED)
        np.add.at(self.counts, (self.classes_of(listed), self.entries.touched[listed] // SEGMENT), 1)

    def _segments(self) -> int:
        return self.entries.touches.slots.size // SEGMENT + 1

    def _count(self, slots: Slots, change: np.ufunc) -> None:
        classes = self.classes_of(slots)
        change.at(self.counts, (classes, self.entries.touched[slots] // SEGMENT), 1)
        change.at(self.cells, (classes, self.buckets_of(slots)), 1)

    def range_of(self, bucket: int) -> tuple[int, int]:
        """The places, from and to, that are in a bucket."""
        last = self.edges.size
        start = int(self.bounds[last - 1 - bucket]) if bucket < last else 0
        return start, int(self.bounds[last - bucket]) if bucket else self.entries.touches.end

    def scan(self, classes: slice, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Place and slot of the leaves of some classes in a range of places, oldest first."""
        first = start // SEGMENT
        some = self.counts[classes, first : -(-end // SEGMENT)].any(axis=0)
        for segment in (np.flatnonzero(some) + first).tolist():
            places = np.arange(max(start, segment * SEGMENT), min(end, (segment + 1) * SEGMENT))
            slots = self.entries.touches.slots[places].astype(np.int64)
            fits = (self.entries.touched[slots] == places) & (self.entries.flags[slots] & LISTED != 0)
            own = self.classes_of(slots)
            fits &= (own >= classes.start) & (own < classes.stop)
            yield from zip(places[fits].tolist(), slots[fits].tolist(), strict=True)
