"""What a process must have of memory before it opens a shard."""

from __future__ import annotations

import mmap

import numpy as np

from kvstore.errors import ConfigError


def check_mappable(nbytes: int) -> None:
    """Raise ConfigError where this process cannot map so much, before anything on disk is touched."""
    try:
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ).close()
    except OSError as error:
        raise ConfigError(
            f"capacity_bytes {nbytes} cannot be mapped ({error.strerror}): choose a smaller one"
        ) from None


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what LMDB frees after each transaction.

    LMDB allocates its dirty pages anew in each transaction; by default glibc maps and unmaps them, and the kernel
    clears every page again, which takes longer than the copy. Freeing one allocation of just under 32 MiB raises
    both of glibc's thresholds (mallopt(3), M_MMAP_THRESHOLD: the dynamic threshold). Untouched, it costs no memory.
    """
    np.empty(32 * 2**20 - 2**16, np.uint8)
