"""Staging memory: where blocks lie in canonical order between the engine's cache and the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

STAGING_BUFFERS: Final = 2
POLL_SECONDS: Final = 0.001
Bytes = npt.NDArray[np.uint8]


class Buffer(Protocol):
    """Host memory for blocks, and what a device needs beside it."""

    memory: Bytes
    """(nbytes,) uint8."""

    def ready(self) -> None:
        """Wait until no copy engine reads or writes the memory."""


class HostBuffer:
    """A buffer of the host alone."""

    def __init__(self, nbytes: int) -> None:
        self.memory: Bytes = np.empty(nbytes, np.uint8)

    def ready(self) -> None:
        """Nothing but the caller's thread uses it."""


class StagingPool:
    """STAGING_BUFFERS buffers of one size, made when first needed and kept, and lent in turn: a device may still be
    reading the one that was given back last. Any thread may borrow.

    A signal may raise between any two steps of Python, so a borrower writes `try: buffer = pool.borrow(borrower) ...
    finally: pool.borrowed.pop(borrower, None)`: giving all back is one step (see Environment.enter).
    """

    def __init__(self, nbytes: int, make: Callable[[int], Buffer] = HostBuffer) -> None:
        self.nbytes = nbytes
        self.borrowed: dict[object, set[int]] = {}
        self._make = make
        self._lock = threading.Lock()
        self._turn = 0
        self._buffers: list[Buffer | None] = [None] * STAGING_BUFFERS

    def borrow(self, borrower: object) -> Buffer:
        """A buffer of nbytes that no device uses; waits while all are borrowed. Raises what making one raises."""
        while True:
            buffer = self.try_borrow(borrower)
            if buffer is not None:
                return buffer
            time.sleep(POLL_SECONDS)

    def try_borrow(self, borrower: object) -> Buffer | None:
        """A buffer as `borrow` gives it, None where all are borrowed."""
        with self._lock:
            number = self._take(borrower)
            if number is None:
                return None
            buffer = self._buffers[number]
            if buffer is None:
                buffer = self._buffers[number] = self._make(self.nbytes)
        buffer.ready()
        return buffer

    def give_back(self, borrower: object, buffer: Buffer) -> None:
        """Give one of the borrower's buffers back."""
        self.borrowed[borrower].discard(self._buffers.index(buffer))

    def _take(self, borrower: object) -> int | None:
        taken = set().union(*self.borrowed.values())
        order = ((self._turn + step) % STAGING_BUFFERS for step in range(STAGING_BUFFERS))
        number = next((number for number in order if number not in taken), None)
        if number is not None:
            self.borrowed.setdefault(borrower, set()).add(number)
            self._turn = number + 1
        return number
