"""A map of data.mdb for a report: what its pages are used for, and which ones damage concerns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.fsck.pages import P_BRANCH, Meta, Node, PageFile, free_pages, leaf_nodes, page_kind
from kvstore.record import SEQUENCE_FIELD, chunk_key

UNKNOWN, META, FREE, DIRECTORY, INDEX, PAYLOAD, QUARANTINE, NOTES = range(8)
DAMAGED: Final = 8
KINDS: Final = ("unknown", "meta", "free", "main", "index", "payload", "quarantine", "notes", "damaged")
"""What a page is: nothing leads to it; one of the two meta pages; free, the free list itself included; the database of
databases; a page of one of the four databases ("notes" is the database meta); of a record that a finding names."""
DATABASES: Final = {b"index": INDEX, b"payload": PAYLOAD, b"quarantine": QUARANTINE, b"meta": NOTES}
FORMS: Final = ("unknown", "meta", "branch", "leaf", "overflow", "free", "unused")
"""unknown: nothing leads to it; unused: behind the last page that was ever used."""
MAX_BUCKETS: Final = 2**16
WORK: Final = 8
"""Pages that are marked at most, by the file's pages: a file that names its pages over and over is not followed for ever."""


@dataclass(frozen=True)
class PageMap:
    """pages: in the file; page_bytes; counts: pages of each kind in each bucket of equally many pages, (buckets, KINDS)
    int64; whole: whether there was a meta page to begin with, and the file did not name its pages over and over; forms:
    what each page is by its form, numbers of FORMS."""

    pages: int
    page_bytes: int
    counts: npt.NDArray[np.int64]
    whole: bool
    forms: npt.NDArray[np.uint8]

    def total(self, kind: str) -> int:
        """Pages of one of KINDS."""
        return int(self.counts[:, KINDS.index(kind)].sum())


def page_map(path: Path, buckets: int = 1000, damaged: Iterable[tuple[int, int]] = ()) -> PageMap:
    """What the file's pages are used for. damaged: (first page, pages) each, which are shown as that whatever they are.

    Survives anything in the file; memory is three bytes a page. Raises OSError where the disk cannot read.
    """
    with PageFile(path) as file:
        marks = _Marks(file)
        if file.metas:
            marks.database(file.metas[0])
            marks.forms[file.metas[0].last_page + 1 :] = FORMS.index("unused")
        for first, count in damaged:
            marks.run(first, count, DAMAGED)
        buckets = max(1, min(buckets, MAX_BUCKETS, file.pages))
        edges = np.linspace(0, file.pages, buckets + 1).astype(np.int64)
        counts = [np.bincount(marks.kinds[a:b], minlength=len(KINDS)) for a, b in pairwise(edges)]
        whole = bool(file.metas) and marks.left > 0
        return PageMap(file.pages, file.page_bytes, np.array(counts, np.int64), whole, marks.forms)


class _Marks:
    """What is known of each page so far."""

    def __init__(self, file: PageFile) -> None:
        self.file, self.left = file, WORK * file.pages + WORK
        self.kinds = np.zeros(file.pages, np.uint8)
        self.forms = np.zeros(file.pages, np.uint8)
        self.kinds[:2], self.forms[:2] = META, FORMS.index("meta")
        self._seen = bytearray(file.pages)

    def database(self, meta: Meta) -> None:
        """Follow every tree of the file."""
        self._tree(meta.free.root, FREE)
        self._tree(meta.main.root, DIRECTORY)
        for name, tree in self.file.databases(meta).items():
            self._tree(tree.root, DATABASES.get(name, UNKNOWN))

    def _tree(self, root: int, kind: int) -> None:
        for number, data in self.file.walk(root, self._seen):
            self.run(number, 1, kind, "branch" if page_kind(data, number) == P_BRANCH else "leaf")
            for node in leaf_nodes(data):
                if node.run is not None:
                    self.run(node.run, self.file.run_pages(node.size), kind, "overflow")
                if kind == FREE and len(node.key) == 8:
                    self._free(data, node)

    def _free(self, data: bytes, node: Node) -> None:
        """Mark the pages that an entry of the free list names."""
        if self.left > 0 and node.size // 8 <= 2 * len(self.kinds):
            named = free_pages(self.file.value(data, node))
            self.left -= named.size
            here = named[named < len(self.kinds)].astype(np.int64)
            self.kinds[here], self.forms[here] = FREE, FORMS.index("free")

    def run(self, first: int, count: int, kind: int, form: str = "") -> None:
        """Mark pages in a row, those that are in the file."""
        if 0 <= first < len(self.kinds) and self.left > 0:
            end = min(first + max(count, 0), len(self.kinds))
            self.left -= end - first
            self.kinds[first:end] = kind
            if form:
                self.forms[first:end] = FORMS.index(form)


def pages_of(path: Path, keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """(first page, pages) of what records with these index keys lie on: their entry's leaf, then their chunks. Fewer where
    the way to them is broken. Raises OSError where the disk cannot read."""
    found: list[tuple[int, int]] = []
    with PageFile(path) as file:
        databases = file.databases(file.metas[0]) if file.metas else {}
        index, payload = databases.get(b"index"), databases.get(b"payload")
        for key in keys:
            leaf = file.find(index.root, key) if index else None
            node = next((node for node in leaf[2] if node.key == key), None) if leaf else None
            if leaf and node:
                found.append((leaf[0], 1))
                sequence = file.value(leaf[1], node)[SEQUENCE_FIELD]
                found += _chunks(file, payload.root, sequence) if payload and len(sequence) == 8 else []
    return list(dict.fromkeys(found))


def _chunks(file: PageFile, root: int, sequence: bytes) -> list[tuple[int, int]]:
    """Where a record's chunks lie, each leaf asked for the chunk after the last one of the leaf before."""
    found: list[tuple[int, int]] = []
    number = int.from_bytes(sequence, "little")
    wanted = chunk_key(number, 0)
    while leaf := file.find(root, wanted):
        nodes = [node for node in leaf[2] if node.key[:8] == wanted[:8] and wanted <= node.key and len(node.key) == 10]
        if not nodes:
            break
        found += [(leaf[0], 1) if n.run is None else (n.run, file.run_pages(n.size)) for n in nodes]
        after = int.from_bytes(max(node.key for node in nodes)[8:], "big") + 1
        if after >= 2**16:
            break
        wanted = chunk_key(number, after)
    return found
