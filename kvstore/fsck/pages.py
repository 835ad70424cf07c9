"""The pages of an LMDB 0.9 file, read with plain preads and believed in nothing: never mapped, never handed to LMDB.

Whatever the file holds, a read is bounded by what is asked for and by the file's end, and every page of a tree is visited
once at most.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstore.storefile import LMDB_MAGIC, LMDB_META, MAX_MAP

PAGE_HEADER: Final = 16
"""Page number, pad, flags, and lower and upper bound of the free space or the length of a run of overflow pages."""
HEAD: Final = struct.Struct("<QHHHH")
RUN_HEAD: Final = struct.Struct("<QHHI")
NODE: Final = struct.Struct("<HHHH")
"""Low and high half of the data's length (of a child's number in a branch), flags, length of the key."""
TREE: Final = struct.Struct("<IHHQQQQQ")
"""Pad, flags, depth; branch, leaf and overflow pages; entries; root."""
P_BRANCH, P_LEAF, P_OVERFLOW, P_META, P_DIRTY = 0x01, 0x02, 0x04, 0x08, 0x10
F_BIGDATA, F_SUBDATA = 0x01, 0x02
PAGE_SIZES: Final = (4096, 8192, 16384, 32768)
NO_ROOT: Final = 2**64 - 1
MAX_DEPTH: Final = 32
MAX_VALUE: Final = 2**24
"""Bytes of a value that is read whole."""
SAMPLE_PAGES: Final = 512
"""Looked at where no meta page says how large a page is."""


class Tree(NamedTuple):
    """What a meta page, or a leaf of the main database, says of one database."""

    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes, offset: int = 0) -> Tree:
        """From 48 bytes."""
        return cls(*TREE.unpack_from(data, offset)[2:])


@dataclass(frozen=True)
class Meta:
    """A meta page. page: which of the two; free, main: the free list and the database of databases."""

    page: int
    map_size: int
    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txn: int


class Node(NamedTuple):
    """A leaf's entry. offset: where in the page its data is; size: bytes of its value; run: the page where that begins if
    it is not in the leaf, else None."""

    key: bytes
    flags: int
    offset: int
    size: int
    run: int | None


def parse_meta(data: bytes, page: int) -> Meta | None:
    """A meta page's content, None where it is none or its numbers are none of a kvstore's file."""
    if len(data) < 152 or LMDB_META.unpack_from(data, PAGE_HEADER) != (LMDB_MAGIC, 1):
        return None
    if not HEAD.unpack_from(data)[2] & P_META:
        return None
    map_size, page_bytes = struct.unpack_from("<QI", data, 32)
    last, txn = struct.unpack_from("<QQ", data, 136)
    if page_bytes not in PAGE_SIZES or map_size >= MAX_MAP or last >= MAX_MAP // page_bytes:
        return None
    return Meta(page, map_size, page_bytes, Tree.parse(data, 40), Tree.parse(data, 88), last, txn)


class PageFile:
    """An open data.mdb. Belongs to one thread. Raises OSError where the disk cannot read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._fd).st_size
            self.metas = self._read_metas()
            """Those that are intact, the newest first."""
            self.page_bytes = self.metas[0].page_bytes if self.metas else self._guess()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    @property
    def pages(self) -> int:
        """Whole pages in the file."""
        return self.size // self.page_bytes

    def at(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file; fewer, or none, past its end."""
        if not 0 <= offset < self.size:
            return b""
        return os.pread(self._fd, min(nbytes, self.size - offset), offset)

    def page(self, number: int) -> bytes:
        """A page's bytes, none where it is not wholly in the file."""
        data = self.at(number * self.page_bytes, self.page_bytes)
        return data if len(data) == self.page_bytes else b""

    def value(self, page: bytes, node: Node) -> bytes:
        """A node's value; shorter where the file ends in it."""
        if node.run is None:
            return page[node.offset : node.offset + node.size]
        return self.at(node.run * self.page_bytes + PAGE_HEADER, node.size)

    def run_pages(self, size: int) -> int:
        """Pages of a value of this size that lies on pages of its own."""
        return -(-(size + PAGE_HEADER) // self.page_bytes)

    def walk(self, root: int, seen: bytearray | None = None) -> Iterator[tuple[int, bytes]]:
        """The pages of a tree by number, from its root on, branches and leaves; those that are none are passed over.

        seen: a byte a page, not 0 for pages that are not to be visited any more.
        """
        seen = bytearray(self.pages) if seen is None else seen

        def new(numbers: Iterable[int]) -> Iterator[int]:
            """Those that nothing named before: so what is still to be visited is never more than the file's pages."""
            for number in numbers:
                if 0 <= number < len(seen) and not seen[number]:
                    seen[number] = 1
                    yield number

        stack = [(number, 0) for number in new((root,))]
        while stack:
            number, depth = stack.pop()
            data = self.page(number)
            kind = page_kind(data, number)
            if kind & (P_BRANCH | P_LEAF):
                yield number, data
            if kind == P_BRANCH and depth < MAX_DEPTH:
                stack += [(child, depth + 1) for child in new(child for _, child in reversed(children(data)))]

    def databases(self, meta: Meta) -> dict[bytes, Tree]:
        """The named databases, of those that can be reached."""
        found = {}
        for _, data in self.walk(meta.main.root):
            for node in leaf_nodes(data):
                if node.flags == F_SUBDATA and node.size == TREE.size:
                    found[node.key] = Tree.parse(data, node.offset)
        return found

    def root(self, name: bytes) -> int:
        """The root of a named database, NO_ROOT where it is empty or cannot be reached."""
        found = self.databases(self.metas[0]).get(name) if self.metas else None
        return NO_ROOT if found is None else found.root

    def entries(self, root: int, start: bytes = b"", lost: set[int] | None = None) -> Iterator[tuple[bytes, bytes]]:
        """A tree's keys from `start` on, with at most MAX_VALUE bytes of their values, as far as pages lead to them. A key
        that is not where branches say is passed over: no search finds it. lost: takes the numbers of pages that are none."""
        for data, low, high in self._leaves(root, start, set() if lost is None else lost):
            for node in leaf_nodes(data):
                if max(low, start) <= node.key and (not high or node.key < high):
                    yield node.key, self.value(data, node._replace(size=min(node.size, MAX_VALUE)))

    def _leaves(self, root: int, start: bytes, lost: set[int]) -> Iterator[tuple[bytes, bytes, bytes]]:
        """A tree's leaves in order, each with the first key that may lie in it and the one that lies behind it, empty where
        there is none; without those that end before `start`."""
        seen, stack = {root}, [(root, b"", b"", 0)] if root != NO_ROOT else []
        while stack:
            number, low, high, depth = stack.pop()
            data = self.page(number)
            kind = page_kind(data, number)
            if kind == P_LEAF:
                yield data, low, high
            elif kind == P_BRANCH and depth < MAX_DEPTH:
                below = children(data)
                bounds = [low, *(first for first, _ in below[1:]), high]
                parts = zip(below, bounds, bounds[1:], strict=False)
                new = [(child, first, end, depth + 1) for (_, child), first, end in parts if not end or end > start]
                stack += reversed([part for part in new if part[0] not in seen])
                seen |= {part[0] for part in new}
            else:
                lost.add(number)

    def obstacle(self, root: int, key: bytes) -> int | None:
        """A page without which the value under a key cannot be read, and that is none or is not wholly in the file; None
        where there is no such page."""
        number = root
        for _ in range(MAX_DEPTH if root != NO_ROOT else 0):
            data = self.page(number)
            kind = page_kind(data, number)
            if kind == P_LEAF:
                return self._cut_run(leaf_nodes(data), key)
            below = children(data) if kind == P_BRANCH else []
            if not below:
                return number
            number = _child(below, key)
        return None

    def _cut_run(self, nodes: list[Node], key: bytes) -> int | None:
        """The last page of a value that ends past the end of the file."""
        for node in nodes:
            if node.key == key and node.run is not None:
                last = node.run + self.run_pages(node.size) - 1
                return None if last < self.pages else last
        return None

    def find(self, root: int, key: bytes) -> tuple[int, bytes, list[Node]] | None:
        """The leaf where a key must lie: its number, its bytes and its nodes. None where the way there is broken."""
        number = root
        for _ in range(MAX_DEPTH):
            data = self.page(number)
            kind = page_kind(data, number)
            if kind == P_LEAF:
                return number, data, leaf_nodes(data)
            below = children(data) if kind == P_BRANCH else []
            if not below:
                return None
            number = _child(below, key)
        return None

    def _read_metas(self) -> list[Meta]:
        """The second one lies where the first says, or where a page of some size would end."""
        first = parse_meta(self.at(0, 4096), 0)
        sizes = (first.page_bytes,) if first else PAGE_SIZES
        others = (parse_meta(self.at(size, 4096), 1) for size in sizes)
        second = next((m for m, size in zip(others, sizes, strict=True) if m and m.page_bytes == size), None)
        return sorted((m for m in (first, second) if m), key=lambda m: -m.txn)

    def _guess(self) -> int:
        """The size of a page of which most pages name themselves."""

        def named(size: int) -> int:
            numbers = range(2, min(SAMPLE_PAGES, self.size // size))
            return sum(page_kind(self.at(n * size, PAGE_HEADER), n) != 0 for n in numbers)

        return max(PAGE_SIZES, key=lambda size: (named(size), -size))


def page_kind(data: bytes, number: int) -> int:
    """P_BRANCH, P_LEAF or P_OVERFLOW of a page that names itself and is one of these, else 0."""
    if len(data) < PAGE_HEADER:
        return 0
    named, _, flags, _, _ = HEAD.unpack_from(data)
    kind = flags & ~P_DIRTY
    return kind if named == number and kind in (P_BRANCH, P_LEAF, P_OVERFLOW) else 0


def _places(data: bytes) -> Iterator[int]:
    """Where a page's nodes are, of those that lie in it."""
    lower = HEAD.unpack_from(data)[3]
    count = (min(lower, len(data)) - PAGE_HEADER) // 2
    if count > 0:
        for place in struct.unpack_from(f"<{count}H", data, PAGE_HEADER):
            if PAGE_HEADER <= place <= len(data) - NODE.size:
                yield place


def children(data: bytes) -> list[tuple[bytes, int]]:
    """A branch page's first keys and child pages."""
    found = []
    for place in _places(data):
        low, high, top, key_size = NODE.unpack_from(data, place)
        key = data[place + NODE.size : place + NODE.size + key_size]
        found.append((key, low | high << 16 | top << 32))
    return found


def _child(below: list[tuple[bytes, int]], key: bytes) -> int:
    """The child page under which a key must lie."""
    return next((child for first, child in reversed(below[1:]) if first <= key), below[0][1])


def leaf_nodes(data: bytes) -> list[Node]:
    """A leaf page's entries, without those that do not lie in it."""
    if HEAD.unpack_from(data)[2] & ~P_DIRTY != P_LEAF:
        return []
    return [node for place in _places(data) if (node := node_at(data, place)) is not None]


def node_at(data: bytes, place: int) -> Node | None:
    """The leaf entry at an offset of a page, None where it does not lie in it."""
    low, high, flags, key_size = NODE.unpack_from(data, place)
    size, start = low | high << 16, place + NODE.size
    offset = start + key_size
    large = bool(flags & F_BIGDATA)
    if offset + (8 if large else size) > len(data):
        return None
    run = int.from_bytes(data[offset : offset + 8], "little") if large else None
    return Node(data[start:offset], flags, offset, size, run)


def free_pages(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The page numbers of an entry of the free list, as many as it really has."""
    numbers = np.frombuffer(data, "<u8", len(data) // 8)
    return numbers[1 : 1 + int(min(numbers[0], numbers.size))] if numbers.size else numbers
