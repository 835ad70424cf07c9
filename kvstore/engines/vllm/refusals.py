"""Blocks that the ranks refused, kept by the scheduler's side of the connector."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

MAX_REFUSED: Final = 2**16
REFUSED_S: Final = 300.0


class Refusals:
    """Keys that are misses although the store may have them: each until it was saved again, for REFUSED_S at most (another
    engine may save it, of which this one hears nothing), and MAX_REFUSED of them. What is forgotten and still bad is refused
    by the ranks once more. Belongs to the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self.changes = 0
        """How often keys came or went."""

    def __len__(self) -> int:
        return len(self._since)

    def add(self, group: int, key: bytes) -> None:
        """A block must not be used."""
        self._since[group, key] = self._clock()
        self._since.move_to_end((group, key))
        self.changes += 1
        if len(self._since) > MAX_REFUSED:
            self._since.popitem(last=False)

    def discard(self, group: int, key: bytes) -> None:
        """A block was saved."""
        if self._since.pop((group, key), None) is not None:
            self.changes += 1

    def before_first(self, group: int, keys: Sequence[bytes]) -> int:
        """How many leading keys are not refused."""
        while self._since and self._clock() - next(iter(self._since.values())) > REFUSED_S:
            self._since.popitem(last=False)
            self.changes += 1
        if not self._since:
            return len(keys)
        return next((i for i, key in enumerate(keys) if (group, key) in self._since), len(keys))
