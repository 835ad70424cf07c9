"""What eviction keeps of each block, in arrays: resident blocks, and ghosts of those that are not (or no longer) here."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.eviction_order import GROWTH, NOWHERE, Order, TouchOrder
from kvstore.eviction_table import Bools, KeyTable, Slots, UInt64Array

RESIDENT: Final = 1
GHOST: Final = 2
LISTED: Final = 4
"""Counted among the leaves."""
PINNED: Final = 8
ORPHAN: Final = 16
"""A resident block of which an earlier block is not resident."""
WANTED: Final = 32
"""A ghost that was asked for and has not lost an admission since: it may be on its way."""
ROOT: Final = -1
MIN_ENTRIES: Final = 1024
MAX_COUNT: Final = 255
FIELDS: Final[dict[str, tuple[Any, int]]] = {
    "key": (np.uint64, 0),
    "touched": (np.uint32, NOWHERE),
    "parent": (np.int32, ROOT),
    "children": (np.int32, 0),
    "size": (np.uint32, 0),
    "count": (np.uint8, 0),
    "kind": (np.uint8, 0),
    "flags": (np.uint8, 0),
}


class Entries:
    """The entries of one shard's blocks, by slot: 27 bytes each, and with look-up and orders under 60.

    key: the block's, 0 in a free slot. touched: its place in the order of touches. parent: the slot of the block before
    it, of resident blocks alone; it is an entry as long as it has children. children: how many resident blocks name it
    as parent. size: bytes of a resident block; of a ghost, its place among the ghosts, NOWHERE while it has children.
    count: requests that asked for it, up to 255. kind: its class. flags: RESIDENT, GHOST, ...

    Owned by one policy, used by one thread at a time.
    """

    key: UInt64Array
    touched: npt.NDArray[np.uint32]
    parent: npt.NDArray[np.int32]
    children: npt.NDArray[np.int32]
    size: npt.NDArray[np.uint32]
    count: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]

    def __init__(self) -> None:
        for name, (dtype, fill) in FIELDS.items():
            setattr(self, name, np.full(MIN_ENTRIES, fill, dtype))
        self.table = KeyTable()
        self.touches = TouchOrder(RESIDENT | GHOST)
        self.ghosts = Order(GHOST)
        self.resident = self.queued = self.orphans = 0
        self.used = 0
        self._free = np.empty(MIN_ENTRIES, np.int32)
        self._num_free = 0

    def __len__(self) -> int:
        """Entries, resident and ghosts."""
        return self.used - self._num_free

    @property
    def nbytes(self) -> int:
        """The memory of all arrays."""
        arrays = sum(getattr(self, name).nbytes for name in FIELDS)
        return int(arrays + self.table.cells.nbytes + self.touches.nbytes + self.ghosts.nbytes + self._free.nbytes)

    def find(self, keys: UInt64Array) -> Slots:
        """The slot of each key, -1 where there is none."""
        return self.table.find(keys, self.key)

    def have(self, slots: Slots, flags: int) -> Bools:
        """Whether these slots, or -1, are entries that have one of the flags."""
        found: Bools = (slots >= 0) & (self.flags[slots] & flags != 0)
        return found

    def make(self, keys: UInt64Array) -> Slots:
        """Entries for different keys that have none: ghosts that were never asked for and are in no order yet."""
        slots = self._take_free(keys.size)
        self.key[slots], self.flags[slots] = keys, GHOST
        self.size[slots] = NOWHERE
        if self.table.full_with(keys.size):
            self.table.build(np.flatnonzero(self.flags[: self.used]), self.key)
        else:
            self.table.insert(keys, slots)
        return slots

    def drop(self, slots: Slots) -> None:
        """Forget ghosts without children."""
        for name, (_, fill) in FIELDS.items():
            getattr(self, name)[slots] = fill
        end = self._num_free + slots.size
        if end > self._free.size:
            self._free = _grown(self._free, int(GROWTH * end), 0)
        self._free[self._num_free : end] = slots
        self._num_free = end

    def touch(self, slots: Slots, tick: int) -> bool:
        """Move entries to the young end of the order of touches. Whether all places have changed."""
        compacted = self.touches.full_with(slots.size)
        if compacted:
            self.touched[slots] = NOWHERE
            self.touches.compact(self.touched, self.flags, slots.size)
        self.touches.append(slots, self.touched)
        self.touches.stamp(tick, slots.size)
        return compacted

    def queue_ghosts(self, slots: Slots) -> None:
        """Put ghosts at the young end of theirs, but for those with children, which stay."""
        slots = slots[self.children[slots] == 0]
        self.queued -= int(np.count_nonzero(self.size[slots] != NOWHERE))
        self.size[slots] = NOWHERE
        if self.ghosts.full_with(slots.size):
            self.ghosts.compact(self.size, self.flags, slots.size)
        self.ghosts.append(slots, self.size)
        self.queued += slots.size

    def unqueue_ghosts(self, slots: Slots) -> None:
        """Take ghosts out of their order."""
        self.queued -= int(np.count_nonzero(self.size[slots] != NOWHERE))
        self.size[slots] = NOWHERE

    def expire_ghosts(self, most: int) -> None:
        """Forget the oldest ghosts past `most`."""
        while self.queued > most:
            slots = self.ghosts.take(self.queued - most, self.size, self.flags)
            self.queued -= slots.size
            self.drop(slots)

    def link(self, slots: Slots, parents: Slots) -> None:
        """Make each entry a child of an entry (or ROOT). What would close a circle, which only keys that collide or a
        caller's wrong parents can, is a root."""
        simple = self.children[slots] == 0
        self._link_all(slots[simple], parents[simple])
        for slot, parent in zip(slots[~simple].tolist(), parents[~simple].tolist(), strict=True):
            self._link_all(np.array([slot]), np.array([ROOT if self._descends(parent, slot) else parent]))

    def _link_all(self, slots: Slots, parents: Slots) -> None:
        self.parent[slots] = parents
        named = parents[parents != ROOT]
        ghosts = named[self.flags[named] & GHOST != 0]
        self.unqueue_ghosts(np.unique(ghosts))
        np.add.at(self.children, named, 1)

    def _descends(self, slot: int, ancestor: int) -> bool:
        while slot not in (ROOT, ancestor):
            slot = int(self.parent[slot])
        return slot == ancestor

    def unlink(self, slots: Slots) -> Slots:
        """Make entries children of none; the parents that have no child any more."""
        named = self.parent[slots].astype(np.int64)
        named = named[named != ROOT]
        self.parent[slots] = ROOT
        np.subtract.at(self.children, named, 1)
        freed: Slots = named[np.sort(np.unique(named, return_index=True)[1])]
        childless: Slots = freed[self.children[freed] == 0]
        return childless

    def _take_free(self, count: int) -> Slots:
        reused = min(count, self._num_free)
        self._num_free -= reused
        fresh = np.arange(self.used, self.used + count - reused)
        if self.used + fresh.size > self.key.size:
            self._grow(int(GROWTH * (self.used + fresh.size)))
        self.used += fresh.size
        return np.concatenate((self._free[self._num_free : self._num_free + reused].astype(np.int64), fresh))

    def _grow(self, size: int) -> None:
        """One array after the other, so that at its peak growing takes no more than the largest of them besides."""
        for name, (_, fill) in FIELDS.items():
            setattr(self, name, _grown(getattr(self, name), size, fill))


def _grown(array: npt.NDArray[Any], size: int, fill: int) -> npt.NDArray[Any]:
    made = np.full(size, fill, array.dtype)
    made[: array.size] = array
    return made
