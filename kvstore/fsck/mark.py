"""Where a scanning process is: written by it before each step, and read by the one that started it once it has ended."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

SIZE: Final = 4096
WALK: Final = 1
RECORD: Final = 2


class Mark:
    """Memory that two processes share: WALK or RECORD, and an index key: from where on the index is read, or whose record
    is."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of another process's mark, taken over; None makes one."""
        self.fd = _memory() if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, SIZE)
        self._memory = mmap.mmap(self.fd, SIZE)

    def set(self, what: int, key: bytes) -> None:
        """Say what comes next."""
        key = key[: SIZE - 4]
        self._memory[: len(key) + 4] = bytes((what, 0, len(key) & 255, len(key) >> 8)) + key

    def get(self) -> tuple[int, bytes]:
        """What was said last; 0 and nothing where nothing was."""
        length = min(int.from_bytes(self._memory[2:4], "little"), SIZE - 4)
        return self._memory[0], self._memory[4 : 4 + length]

    def close(self) -> None:
        """Let the memory go."""
        self._memory.close()
        os.close(self.fd)


def _memory() -> int:
    """A descriptor of memory, of none of the numbers that a new process has its own standard streams under: they are free
    here where this process was started without them."""
    made = os.memfd_create("kvstore-fsck", os.MFD_CLOEXEC)
    try:
        return fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(made)
