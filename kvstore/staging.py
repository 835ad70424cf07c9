"""Staging memory: where blocks lie in canonical order between the engine's cache and the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

STAGING_BUFFERS: Final = 2
POLL_SECONDS: Final = 0.001
PATIENCE_S: Final = 30.0
Bytes = npt.NDArray[np.uint8]


class BuffersBusy(Exception):
    """No buffer came free in time. Never leaves the store: gets miss, puts fail."""


class Buffer(Protocol):
    """Host memory for blocks, and what a device needs beside it."""

    memory: Bytes
    """(nbytes,) uint8."""

    def ready(self) -> None:
        """Wait until no copy engine reads or writes the memory."""


class HostBuffer:
    """A buffer of the host alone. memory: where it shall lie."""

    def __init__(self, nbytes: int, memory: Bytes | None = None) -> None:
        self.memory: Bytes = np.empty(nbytes, np.uint8) if memory is None else memory

    def ready(self) -> None:
        """Nothing but the caller's thread uses it."""


class StagingPool:
    """STAGING_BUFFERS buffers of one size, made when first needed and kept, and lent in turn: a device may still be
    reading the one that was given back last. Any thread may borrow.

    A signal may raise between any two steps of Python, so a borrower writes `try: buffer = pool.borrow(borrower) ...
    finally: pool.borrowed.pop(borrower, None)`: giving all back is one step (see Environment.enter).
    """

    def __init__(
        self, nbytes: int, make: Callable[[int], Buffer] = HostBuffer, waiting: Callable[[], None] = lambda: None
    ) -> None:
        self.nbytes, self._waiting = nbytes, waiting
        self.borrowed: dict[object, set[int]] = {}
        self._make = make
        self._lock = threading.Lock()
        self._turn = 0
        self._buffers: list[Buffer | None] = [None] * STAGING_BUFFERS

    def borrow(self, borrower: object, patience_s: float = PATIENCE_S) -> Buffer:
        """A buffer of nbytes that no device uses; waits while all are borrowed. Raises BuffersBusy where that takes longer
        than patience_s, and what making one raises."""
        deadline = time.monotonic() + patience_s
        while (buffer := self.try_borrow(borrower)) is None:
            if time.monotonic() > deadline:
                raise BuffersBusy(f"all {STAGING_BUFFERS} staging buffers were in use for {patience_s:g} seconds")
            self._waiting()
            time.sleep(POLL_SECONDS)
        return buffer

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


class Buffers:
    """Pools of staging memory, by what tells buffers apart, all of one kind of memory. Any thread may use it.

    memory: where buffers shall lie, by their bytes; None: wherever their routes put them. waiting: called while somebody
    waits for a buffer, which may give some back.
    """

    def __init__(
        self, memory: Callable[[int], Bytes] | None = None, waiting: Callable[[], None] = lambda: None
    ) -> None:
        self.pools: dict[Hashable, StagingPool] = {}
        self._memory, self._waiting = memory, waiting

    def pool(self, key: Hashable, nbytes: int, make: Callable[[int, Bytes | None], Buffer]) -> StagingPool:
        """The pool of a key, made where there is none yet. make: a buffer of so many bytes, in given memory."""
        pool = self.pools.get(key)
        return pool if pool is not None else self.pools.setdefault(key, self._new_pool(nbytes, make))

    def _new_pool(self, nbytes: int, make: Callable[[int, Bytes | None], Buffer]) -> StagingPool:
        return StagingPool(nbytes, partial(_new_buffer, make, self._memory), self._waiting)


def _new_buffer(
    make: Callable[[int, Bytes | None], Buffer], memory: Callable[[int], Bytes] | None, nbytes: int
) -> Buffer:
    return make(nbytes, None if memory is None else memory(nbytes))


NO_BUFFERS: Final = Buffers()
"""A call's before it has begun."""
