"""The look-up from a block's 64-bit key to its entry: open addressing in one numpy array, a batch at a time."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Slots = Ints
"""Numbers of entries."""

EMPTY: Final = -1
MIN_CELLS: Final = 1024
SPARE: Final = 64
"""Cells past the last home, so that probing never wraps around."""
CELLS_PER_ENTRY: Final = 2.5
MAX_USED: Final = 0.55
"""A batch takes as many rounds as its unluckiest key: 20 keys take 3 on average at this load, 9 at 0.7."""
MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
HALF: Final = np.uint64(32)


class KeyTable:
    """Linear probing over cells that name entries; the entries' keys lie with their owner. One thread at a time.

    A cell is emptied only when the table is built anew. Where an entry is freed, its cell stays and names an entry with
    another key, or none, which a probe passes by. The last cell is always empty. 4 bytes a cell, 1.8 to 2.5 cells an
    entry; building takes another 40 bytes an entry meanwhile.
    """

    def __init__(self) -> None:
        self._homes = MIN_CELLS
        self._used = 0
        self.cells = np.full(MIN_CELLS + SPARE, EMPTY, np.int32)

    def find(self, keys: UInt64Array, known: UInt64Array) -> Slots:
        """The entry of each key, -1 where there is none. known: the key of each entry."""
        places = self._home(keys)
        slots = self.cells[places].astype(np.int64)
        todo = np.flatnonzero((slots >= 0) & (known[slots] != keys))
        places, wanted = places[todo], keys[todo]
        while todo.size:
            places += 1
            found = self.cells[places]
            slots[todo] = found
            on = (found >= 0) & (known[found] != wanted)
            todo, places, wanted = todo[on], places[on], wanted[on]
        return slots

    def full_with(self, more: int) -> bool:
        """Whether `more` keys need a table that is built anew."""
        return self._used + more > MAX_USED * self._homes

    def insert(self, keys: UInt64Array, slots: Slots) -> None:
        """Add different keys that are not there. Needs room: see `full_with`."""
        self._used += keys.size
        places = self._home(keys)
        while places.size:
            free = self.cells[places] == EMPTY
            self.cells[places[free]] = slots[free]
            on = self.cells[places] != slots
            places, slots = places[on] + 1, slots[on]
            if self.cells[-1] != EMPTY or (places.size and int(places.max()) >= self.cells.size - 1):
                self.cells = np.concatenate((self.cells, np.full(SPARE, EMPTY, np.int32)))

    def build(self, slots: Slots, known: UInt64Array) -> None:
        """Start over with these entries, and room for more."""
        self.cells = np.empty(0, np.int32)
        self._homes = max(MIN_CELLS, int(CELLS_PER_ENTRY * slots.size))
        self._used = slots.size
        homes = self._home(known[slots])
        by_home = np.sort((homes << 32) | slots)
        steps = np.arange(slots.size)
        places = np.maximum.accumulate((by_home >> 32) - steps) + steps
        end = max(self._homes, int(places[-1]) + 1 if places.size else 0)
        self.cells = np.full(end + SPARE, EMPTY, np.int32)
        self.cells[places] = by_home & (2**32 - 1)

    def _home(self, keys: UInt64Array) -> Slots:
        """Where probing starts. The keys may be any numbers: also counters are spread."""
        mixed = ((keys ^ (keys >> HALF)) * MULTIPLIER) >> HALF
        return ((mixed * np.uint64(self._homes)) >> HALF).astype(np.int64)
