"""One choice of victims: resident leaves, and new blocks that compete with them, the worst first. Changes nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from kvstore.eviction_entries import ORPHAN, PINNED, RESIDENT
from kvstore.eviction_leaves import Leaves
from kvstore.eviction_table import Ints

ORPHANS: Final = 0
EXPIRED: Final = 1
OLD: Final = 2
CELLS: Final = 3
"""Ranks: the lowest goes first; cell number i in the policy's order has the rank CELLS + i."""
Leaf = tuple[int, int, int]
"""Rank, place, slot: victims go in this order."""


@dataclass(frozen=True)
class Ranking:
    """How leaves compare at one moment. rank: of each class and bucket, from 0; new_rank: of new blocks. Places before
    `expired` are past the age limit, those before `old` go by age alone. Valid until the leaves change."""

    leaves: Leaves
    rank: Ints
    new_rank: Ints
    expired: int
    old: int
    _bounds: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bounds", self.leaves.bounds.tolist())

    def of(self, slot: int, orphan: bool, new: bool) -> Leaf:
        """Rank, place and slot of an entry."""
        place = int(self.leaves.entries.touched[slot])
        if orphan:
            return ORPHANS, place, slot
        if place < self.old or place < self.expired:
            return EXPIRED if place < self.expired else OLD, place, slot
        bucket = len(self._bounds) - bisect_right(self._bounds, place)
        rank = self.new_rank if new else self.rank
        return CELLS + int(rank[self.leaves.entries.kind[slot], bucket]), place, slot

    def worst_first(self) -> Iterator[Leaf]:
        """All leaves."""
        leaves, every, end = self.leaves, slice(0, self.leaves.classes), self.leaves.entries.touches.end
        orphans = slice(leaves.classes, leaves.classes + 1)
        if leaves.entries.orphans:
            yield from self._scan(ORPHANS, orphans, 0, end)
        yield from self._scan(EXPIRED, every, 0, self.expired)
        yield from self._scan(OLD, every, self.expired, self.old)
        held = np.flatnonzero(leaves.cells[:-1].ravel())
        for cell in held[np.argsort(self.rank.ravel()[held])].tolist():
            kind, bucket = divmod(cell, self.rank.shape[1])
            start, end = leaves.range_of(bucket)
            start = max(start, self.expired, self.old)
            yield from self._scan(CELLS + int(self.rank[kind, bucket]), slice(kind, kind + 1), start, end)

    def _scan(self, rank: int, classes: slice, start: int, end: int) -> Iterator[Leaf]:
        if start < end:
            for place, slot in self.leaves.scan(classes, start, end):
                yield rank, place, slot


@dataclass(frozen=True)
class Candidates:
    """New blocks that ask to be admitted, parents before children: their entries (ghosts) and their parents', ROOT or -2
    for one that has none; sizes in bytes. kept: slots that are no victims, whatever they are."""

    slots: list[int]
    parents: list[int]
    sizes: list[int]
    orphan: list[bool]
    kept: list[int]


NO_CANDIDATES: Final = Candidates([], [], [], [], [])


class Choice:
    """The state of one choice: which entries are taken, and how many children the others have left.

    Victims are leaves, the worst first; a block whose last child is taken is a leaf from then on. Belongs to one call.
    """

    def __init__(self, ranking: Ranking, new: Candidates = NO_CANDIDATES) -> None:
        self.entries = ranking.leaves.entries
        self.ranking = ranking
        self.new = dict(zip(new.slots, zip(new.parents, new.sizes, new.orphan, strict=True), strict=True))
        self.taken: dict[int, None] = {}
        self._children: dict[int, int] = {}
        for slot in (*new.parents, *new.kept):
            if slot >= 0:
                self._children[slot] = self._left(slot) + 1
        self._heap = [self._leaf(slot) for slot in new.slots if not self._left(slot)]
        heapify(self._heap)

    def take(self, need: int, worst_rank: int | None = None) -> list[int]:
        """Slots to evict, or not to admit, until their sizes come to `need`, or nothing is left (of that rank)."""
        leaves = self.ranking.worst_first()
        following = next(leaves, None)
        while need > 0:
            if following is not None and (not self._heap or following < self._heap[0]):
                leaf, following = following, next(leaves, None)
                if leaf[2] in self.taken or self._children.get(leaf[2]):
                    continue
            elif self._heap:
                leaf = heappop(self._heap)
            else:
                break
            if worst_rank is not None and leaf[0] > worst_rank:
                break
            need -= self._take(leaf[2])
        return list(self.taken)

    def _take(self, slot: int) -> int:
        self.taken[slot] = None
        new = self.new.get(slot)
        parent, size = (new[0], new[1]) if new else (int(self.entries.parent[slot]), int(self.entries.size[slot]))
        if parent >= 0:
            left = self._children[parent] = self._left(parent) - 1
            if not left and (parent in self.new or self.entries.flags[parent] & (RESIDENT | PINNED) == RESIDENT):
                heappush(self._heap, self._leaf(parent))
        return size

    def _left(self, slot: int) -> int:
        left = self._children.get(slot)
        return int(self.entries.children[slot]) if left is None else left

    def _leaf(self, slot: int) -> Leaf:
        new = self.new.get(slot)
        orphan = new[2] if new else bool(self.entries.flags[slot] & ORPHAN)
        return self.ranking.of(slot, orphan, new is not None)
