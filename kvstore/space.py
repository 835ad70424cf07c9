"""How much of a shard's file is in use, and who keeps freed pages from being used again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

PAGE_BYTES: Final = 4096
PAGE_HEADER: Final = 16
"""Bytes at the start of a page, or of a run of pages that holds one large value."""
LARGE_VALUE: Final = PAGE_BYTES // 2 - PAGE_HEADER
"""Values of more bytes lie on pages of their own."""
FIXED_PAGES: Final = 64
"""Set aside for the meta pages, the free list, and the inner pages that a transaction copies."""
OVERDRAFT_BYTES: Final = FIXED_PAGES // 2 * PAGE_BYTES
"""What records may take of that where nothing is evicted. The rest stays: to delete is to copy pages, and a file without
a free one could never be emptied."""
SHARE: Final = 256
"""One page of so many is set aside as well."""
READERS_BEHIND: Final = 2
"""A snapshot this many transactions old keeps pages that would be used again by now."""


def used_bytes(txn: Any, databases: Iterable[Any]) -> int:
    """Bytes of the pages that the databases use, without free ones and without the free list itself."""
    stats = [txn.stat(database) for database in databases]
    pages: int = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
    return pages * PAGE_BYTES


def usable_bytes(capacity: int) -> int:
    """What databases can use of a file of this size."""
    return capacity - FIXED_PAGES * PAGE_BYTES - capacity // SHARE // PAGE_BYTES * PAGE_BYTES


def record_bytes(header_bytes: int, chunks: Sequence[int]) -> int:
    """Bytes of the pages that a record takes: an index entry and chunks of these lengths."""
    pages = sum(-(-(length + PAGE_HEADER) // PAGE_BYTES) for length in chunks if length > LARGE_VALUE)
    small = sum(length + PAGE_HEADER for length in chunks if length <= LARGE_VALUE)
    return pages * PAGE_BYTES + 2 * (header_bytes + small)


def estimated_bytes(stored: int) -> int:
    """About what a record of so many stored bytes takes, where its chunks are not known."""
    return stored + (stored // (64 * PAGE_BYTES) + 1) * PAGE_BYTES


def oldest_snapshot(readers: str) -> int | None:
    """The transaction that the oldest active reader sees, None where there is none. readers: py-lmdb's table, lines of
    process, thread and transaction, the last "-" for an idle slot."""
    rows = (line.split() for line in readers.splitlines())
    return min((int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit()), default=None)
