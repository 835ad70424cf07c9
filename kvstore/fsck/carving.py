"""The raw bytes of a data.mdb searched for records, whatever became of its trees: headers by magic and hash, chunks by the
keys that lie beside them, runs of pages whose owner is to be found by their hash.

Freed pages hold old copies, and payload may hold anything, so what is found here is a candidate and no more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kvstore.blockdb import IDENTITY_PREFIX
from kvstore.fsck.pages import F_BIGDATA, P_LEAF, P_OVERFLOW, PAGE_HEADER, Node, PageFile, leaf_nodes
from kvstore.geometry import RUN
from kvstore.identity import identity_digest
from kvstore.record import MAGIC, MAX_HEADER_BYTES, PREFIX, Header, header_hash, parse_header
from kvstore.results import Rejection
from kvstore.stategeometry import STATES, state_extent
from kvstore.usage import MAX_SEQUENCE

Rows = npt.NDArray[Any]
Scanned = Callable[[int], None]
"""Told the bytes that were read so far."""

WINDOW_BYTES: Final = 2**22
HEADERS: Final = np.dtype(
    [
        *(("key", "<u8"), ("sequence", "<u8"), ("hash", "<u8"), ("at", "<u8"), ("length", "<u2")),
        *(("chunks", "<u4"), ("directory_length", "<u4"), ("directory_hash", "<u8"), ("stored", "<u8")),
    ]
)
"""A header: XXH3-64 of its key, sequence number, its own hash, its offset in the file and length; how many chunks it has;
length and hash of its directory; bytes of directory and chunks."""
PLACES: Final = np.dtype([("sequence", "<u8"), ("number", "<u2"), ("at", "<u8"), ("size", "<u4")])
"""Where a leaf says that a chunk lies: an offset in the file, and its bytes."""
RUNS: Final = np.dtype([("page", "<u8"), ("count", "<u4")])
"""Pages in a row that begin with the head of one large value."""
MAX_ROWS: Final = 2**25
"""Of each kind. More than any store has; a file that was made to name more is not followed."""
SOME_ROWS: Final = 2**16
HEADER_MAGIC: Final = re.compile(re.escape(MAGIC))
EVICTION_PREFIX: Final = b"eviction:"
MAX_NAME_BYTES: Final = 64
MAX_NOTE_BYTES: Final = 2**16
MAX_IDENTITY_BYTES: Final = 2**22
MAX_FOUND: Final = 4096
"""Identities, and notes, that are kept."""
JSON_START: Final = b'{"dtype":'
"""An identity's canonical JSON begins so: its keys are sorted."""


class Table:
    """Rows that grow, each kept once."""

    def __init__(self, form: np.dtype[Any]) -> None:
        self._form, self._new, self.rows = form, list[tuple[int, ...]](), np.empty(0, form)

    def add(self, rows: Iterable[tuple[int, ...]]) -> None:
        """Keep rows, unless there are MAX_ROWS."""
        if len(self.rows) < MAX_ROWS:
            self._new += rows
        if len(self._new) >= max(SOME_ROWS, len(self.rows) // 4):
            self.flush()

    def flush(self) -> Rows:
        """All rows in order, each once."""
        if self._new:
            self.rows = np.unique(np.concatenate([self.rows, np.array(self._new, self._form)]))
            self._new = []
        return self.rows


@dataclass
class Carved:
    """What the raw bytes hold. headers: rows of HEADERS by key, of each the newest first; places, runs: sorted rows of PLACES
    and RUNS; unknown: intact headers of a version that is not known here; texts: runs that may be an identity's JSON,
    (page, pages) each."""

    headers: Rows
    places: Rows
    runs: Rows
    unknown: int = 0
    identities: dict[bytes, bytes] = field(default_factory=dict)
    notes: dict[bytes, bytes] = field(default_factory=dict)
    texts: list[tuple[int, int]] = field(default_factory=list)

    @cached_property
    def sequences(self) -> npt.NDArray[np.uint64]:
        """Of each place."""
        return self.places["sequence"].copy()

    @cached_property
    def first_of_key(self) -> npt.NDArray[np.int64]:
        """The row of each key's newest header."""
        keys = self.headers["key"]
        return np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))[: keys.size]).astype(np.int64)

    @cached_property
    def end_of_key(self) -> npt.NDArray[np.int64]:
        """The row behind each key's oldest header."""
        return np.append(self.first_of_key[1:], self.headers.size)[: self.first_of_key.size].astype(np.int64)

    def sound(self, file: PageFile) -> npt.NDArray[np.bool_]:
        """For each place whether the value lies in the leaf itself, or a run long enough begins there."""
        page, inside = np.divmod(self.places["at"], np.uint64(file.page_bytes))
        if not self.runs.size:
            return np.asarray(inside != PAGE_HEADER)
        starts = self.runs["page"].copy()
        at = np.minimum(np.searchsorted(starts, page), starts.size - 1)
        room = self.runs["count"][at].astype(np.int64) * file.page_bytes - PAGE_HEADER
        return np.asarray((inside != PAGE_HEADER) | ((starts[at] == page) & (room >= self.places["size"])))

    def lacking(self, file: PageFile) -> list[int]:
        """Rows of headers whose record has fewer pieces with a sound place than it should."""
        there = np.unique(self.places[["sequence", "number"]][self.sound(file)])["sequence"].copy()
        named = self.headers["sequence"]
        have = np.searchsorted(there, named, side="right") - np.searchsorted(there, named)
        lacking: list[int] = np.flatnonzero(have < self.headers["chunks"].astype(np.int64) + 1).tolist()
        return lacking


def carve(file: PageFile, scanned: Scanned) -> Carved:
    """Search the file once, from its first byte to its last. Raises OSError where the disk cannot read."""
    search = _Search(file)
    window = WINDOW_BYTES // file.page_bytes * file.page_bytes
    for start in range(0, file.size, window):
        search.window(start, file.at(start, window))
        scanned(min(start + window, file.size))
    headers, places, runs = (table.flush() for table in (search.headers, search.places, search.runs))
    newest = np.lexsort((~headers["sequence"], headers["key"]))
    return Carved(headers[newest], places, runs, len(search.unknown), search.identities, search.notes, search.texts)


class _Search:
    """What was found so far."""

    def __init__(self, file: PageFile) -> None:
        self.file, self.page_bytes = file, file.page_bytes
        self.headers, self.places, self.runs = Table(HEADERS), Table(PLACES), Table(RUNS)
        self.unknown = set[int]()
        self.identities, self.notes = dict[bytes, bytes](), dict[bytes, bytes]()
        self.texts: list[tuple[int, int]] = []

    def window(self, start: int, data: bytes) -> None:
        """Search bytes that begin at a page."""
        self.headers.add(row for at in _magics(data) if (row := self.header(data, at, start)) is not None)
        self._pages(start // self.page_bytes, data)

    def header(self, data: bytes, at: int, start: int) -> tuple[int, ...] | None:
        if at + PREFIX.size > len(data):
            return None
        length, stored_hash = PREFIX.unpack_from(data, at)[2:]
        found = data[at : at + length]
        if not PREFIX.size <= length <= MAX_HEADER_BYTES or len(found) < length or header_hash(found) != stored_hash:
            return None
        header = parse_header(found)
        if isinstance(header, Rejection):
            if header.kind == "version" and len(self.unknown) < MAX_FOUND:
                self.unknown.add(stored_hash)
            return None
        return _row(header, stored_hash, start + at, length)

    def _pages(self, first: int, data: bytes) -> None:
        """Chunks that leaves name, and heads of runs. A leaf may have come to lie under another's number."""
        count = len(data) // self.page_bytes
        heads = (
            np.frombuffer(data, np.uint8, count * self.page_bytes)
            .reshape(count, self.page_bytes)[:, :PAGE_HEADER]
            .copy()
        )
        words, halves = heads.view("<u8"), heads.view("<u2")
        flags, lower, upper = halves[:, 5], halves[:, 6], halves[:, 7]
        leaves = (flags == P_LEAF) & (lower > PAGE_HEADER) & (lower <= upper) & (upper <= self.page_bytes)
        for n in np.flatnonzero(leaves).tolist():
            self._leaf(first + n, data[n * self.page_bytes : (n + 1) * self.page_bytes])
        runs = (flags == P_OVERFLOW) & (words[:, 0] == np.arange(first, first + count, dtype=np.uint64))
        for n in np.flatnonzero(runs).tolist():
            pages = int(heads[n].view("<u4")[3])
            if 1 <= pages <= self.file.pages - first - n:
                self.runs.add([(first + n, pages)])
                place = n * self.page_bytes + PAGE_HEADER
                if data[place : place + len(JSON_START)] == JSON_START and len(self.texts) < MAX_FOUND:
                    self.texts.append((first + n, pages))

    def _leaf(self, number: int, page: bytes) -> None:
        rows = []
        for node in leaf_nodes(page):
            if node.flags not in (0, F_BIGDATA):
                continue
            if len(node.key) == 10:
                run = node.run
                at = number * self.page_bytes + node.offset if run is None else run * self.page_bytes + PAGE_HEADER
                sequence, chunk = int.from_bytes(node.key[:8], "big"), int.from_bytes(node.key[8:], "big")
                if sequence < MAX_SEQUENCE and at + node.size <= self.file.size:
                    rows.append((sequence, chunk, at, node.size))
            elif node.key.startswith(IDENTITY_PREFIX):
                self._identity(page, node)
            elif node.key.startswith(EVICTION_PREFIX):
                self._note(page, node)
        self.places.add(rows)

    def _identity(self, page: bytes, node: Node) -> None:
        name = node.key[len(IDENTITY_PREFIX) :]
        if node.size <= MAX_IDENTITY_BYTES and len(self.identities) < MAX_FOUND and name not in self.identities:
            text = self.file.value(page, node)
            if identity_digest(text) == name:
                self.identities[name] = text

    def _note(self, page: bytes, node: Node) -> None:
        """What eviction learned: a hint, and nothing says which copy of it is the latest."""
        if len(node.key) <= MAX_NAME_BYTES and node.size <= MAX_NOTE_BYTES and len(self.notes) < MAX_FOUND:
            value = self.file.value(page, node)
            if len(value) == node.size:
                self.notes.setdefault(node.key, value)


def _magics(data: bytes) -> Iterator[int]:
    """Where headers may begin, at every offset. A pattern is searched for faster than bytes are."""
    return (match.start() for match in HEADER_MAGIC.finditer(data))


def _row(header: Header, own_hash: int, at: int, length: int) -> tuple[int, ...] | None:
    """None where no writer gave these numbers."""
    chunks, rest = divmod(header.directory_length - 8 * slices_of(header), 12)
    if header.sequence >= MAX_SEQUENCE or chunks < 1 or rest or chunks >= 2**16:
        return None
    key, stored = xxh3_64_intdigest(header.key), min(header.stored_length, 2**62)
    numbers = (chunks, header.directory_length, header.directory_hash, stored)
    return (key, header.sequence, own_hash, at, length, *numbers)


def slices_of(header: Header) -> int:
    """How many slices a record has."""
    if header.flags & STATES:
        return state_extent(header.geometry)[0]
    return sum(count * (more + 1) for _, count, _, _, more, _, _ in RUN.iter_unpack(header.geometry))


# --- by their hashes -------------------------------------------------------------------------------------------------

Wanted = set[tuple[int, int]]
"""Length and XXH3-64 of values that no leaf leads to."""


def match_runs(file: PageFile, runs: Rows, wanted: Wanted, scanned: Scanned) -> dict[tuple[int, int], int]:
    """Where in the file those wanted values lie that runs of pages begin with. Each run is read once.

    Raises OSError where the disk cannot read.
    """
    lengths: dict[int, list[int]] = {}
    for length in sorted({length for length, _ in wanted}):
        lengths.setdefault(file.run_pages(length), []).append(length)
    found: dict[tuple[int, int], int] = {}
    for page, count in runs[np.isin(runs["count"], list(lengths))].tolist() if wanted else ():
        at = page * file.page_bytes + PAGE_HEADER
        for known in _digests(file.at(at, lengths[count][-1]), lengths[count]):
            if known in wanted:
                found.setdefault(known, at)
        scanned(count * file.page_bytes)
    return found


def _digests(data: bytes, lengths: list[int]) -> Iterator[tuple[int, int]]:
    """(length, XXH3-64) of each of the data's beginnings; lengths: ascending."""
    state, view, done = xxh3_64(), memoryview(data), 0
    for length in lengths:
        if length <= len(data):
            state.update(view[done:length])
            yield length, state.intdigest()
            done = length


def any_header(file: PageFile) -> bool:
    """Whether any intact header is in the file. Raises OSError where the disk cannot read."""
    search = _Search(file)
    for start in range(0, file.size, WINDOW_BYTES):
        data = file.at(start, WINDOW_BYTES)
        if any(search.header(data, at, start) is not None for at in _magics(data)):
            return True
    return False
