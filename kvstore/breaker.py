"""Breaker: loads are switched off for a while where so many blocks are refused that the disk or the memory must be bad."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

WINDOW_S: Final = 60.0
SLICE_S: Final = 1.0
"""Refusals are counted by slices of the window, so that memory is bounded."""


class Breaker:
    """Counts refused blocks, and says whether loads are off. Any thread may call it.

    max_per_minute: more than so many within a minute switch loads off, None: nothing does. off_s: for how many seconds;
    then counting begins anew. clock: seconds, never going back.
    """

    def __init__(self, max_per_minute: int | None, off_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._off_s, self._clock = max_per_minute, off_s, clock
        # A signal handler may call it in the middle of a call.
        self._lock = threading.RLock()
        self._counts: deque[tuple[float, int]] = deque()
        """The end of each slice of the window, and what was refused in it; oldest first."""
        self._total = 0
        self._on_at: float | None = None
        self._trips = 0

    @property
    def trips(self) -> int:
        """How often loads were switched off."""
        return self._trips

    def rejected(self, count: int) -> None:
        """So many blocks were refused. While loads are off this counts nothing: it comes from loads that began before."""
        if self._most is None or count <= 0:
            return
        with self._lock:
            if self.off():
                return
            self._add(self._clock(), count)
            if self._total > self._most:
                self._switch_off()

    def off(self) -> bool:
        """Whether loads are off just now."""
        if self._on_at is None:
            return False
        with self._lock:
            if self._on_at is not None and self._clock() >= self._on_at:
                self._on_at = None
                log.warning("loads are on again after %g seconds", self._off_s)
            return self._on_at is not None

    def _add(self, now: float, count: int) -> None:
        while self._counts and self._counts[0][0] <= now - WINDOW_S:
            self._total -= self._counts.popleft()[1]
        if self._counts and now < self._counts[-1][0]:
            end, before = self._counts.pop()
            self._counts.append((end, before + count))
        else:
            self._counts.append((now + SLICE_S, count))
        self._total += count

    def _switch_off(self) -> None:
        refused, self._total = self._total, 0
        self._counts.clear()
        self._on_at = self._clock() + self._off_s
        self._trips += 1
        log.error(
            "%d blocks were refused within a minute, more than %d: loads are off for %g seconds, and all blocks are misses; "
            "look at the kernel's log and the disk, and check the store with kvstore-fsck",
            *(refused, self._most, self._off_s),
        )
