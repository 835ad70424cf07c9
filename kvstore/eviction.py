"""Eviction policies: which blocks a full store gives up, and which new ones are worth writing."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.errors import ConfigError
from kvstore.eviction_base import ArrayPolicy
from kvstore.eviction_hazard import EDGES_S, NUM_CLASSES, Hazard
from kvstore.eviction_table import Ints, Slots
from kvstore.eviction_types import TICKS_PER_S, Policy

MAX_GHOSTS: Final = 2_000_000
"""About 100 MB: with up to 200,000 resident blocks as many ghosts as help, with 4 million as few as still do."""
GHOSTS_PER_BLOCK: Final = 10
POLICIES: Final = ("hazard", "lru")


class Lru(ArrayPolicy):
    """The least recently requested leaf goes first; of one request the tail before the head. Threads as `Policy`."""

    def __init__(self, max_age_s: float | None = None) -> None:
        super().__init__(1, np.empty(0, np.int64), 0, 0, max_age_s)


class HazardPolicy(ArrayPolicy):
    """The leaf goes first whose class, at its age, is least likely to be requested again soon. Threads as `Policy`.

    A block's class says how often it was requested (1, 2, 3, more) and how its last request looked: no prefix known,
    or a known one followed by up to 1, up to 4, or more new blocks.
    """

    def __init__(self, max_age_s: float | None = None, max_ghosts: int = MAX_GHOSTS) -> None:
        edges = np.rint(EDGES_S * TICKS_PER_S).astype(np.int64)
        super().__init__(NUM_CLASSES, edges, GHOSTS_PER_BLOCK, max_ghosts, max_age_s)
        self.hazard = Hazard()

    def _aged(self, classes: Ints, buckets: Ints) -> None:
        if classes.size:
            self.hazard.aged(classes, buckets)

    def _asked(self, slots: Slots) -> None:
        self.hazard.asked(self.entries.kind[slots].astype(np.int64), self.leaves.buckets_of(slots))

    def _classes(self, counts: Ints, known: int, total: int) -> Ints:
        new = total - known
        shape = 0 if known <= 1 else 1 if new <= 1 else 2 if new <= 4 else 3
        return np.minimum(counts - 1, 3) + 4 * shape

    def _loaded_classes(self, counts: Ints, stored: Ints) -> Ints:
        return np.minimum(counts - 1, 3) + 4 * (np.clip(stored, 0, NUM_CLASSES - 1) // 4)

    def _ranks(self) -> tuple[Ints, Ints, int]:
        return self.hazard.rank, self.hazard.new_rank, int(self.leaves.bounds[0])

    def snapshot(self) -> bytes:
        return self.hazard.snapshot()

    def restore(self, data: bytes) -> bool:
        return self.hazard.restore(data)


def policy_named(name: str, max_age_s: float | None = None, max_ghosts: int = MAX_GHOSTS) -> Policy:
    """The policy of this name. Raises ConfigError."""
    if name == "hazard":
        return HazardPolicy(max_age_s, max_ghosts)
    if name == "lru":
        return Lru(max_age_s)
    raise ConfigError(f"eviction {name!r}: expected one of {', '.join(POLICIES)}")
