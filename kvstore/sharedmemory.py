"""Staging memory that an engine and its I/O process both map."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvstore.errors import StagingMemoryError

Bytes = npt.NDArray[np.uint8]


class SharedMemory:
    """A memfd and its mapping; it goes away with the last process that maps it. It cannot be made smaller: reading a file
    that somebody truncated would end the reader. Any thread may use it.

    Raises StagingMemoryError where there is no room.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Pages that are there already cannot be missing later, when a copy engine or a loop writes to them.
            os.posix_fallocate(self.descriptor, 0, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.memory = mapped(self.descriptor, nbytes)
        except OSError as error:
            os.close(self.descriptor)
            raise StagingMemoryError(
                f"{nbytes} bytes of memory for staging blocks: {error.strerror}: give the process more, or lower "
                "StoreConfig(batch_bytes=...)"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self.descriptor)


def mapped(descriptor: int, nbytes: int) -> Bytes:
    """A descriptor's memory: (nbytes,) uint8. Raises OSError or ValueError where it has less."""
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
