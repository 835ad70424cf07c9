"""Records out of a data.mdb whose trees are broken, into a shard of their own. The original is read and nothing else.

Every record is checked wholly before it is written, up to the content checksum of its decoded bytes; its header stays as it
is, and so does its sequence number. Of several records with one key the newest that is intact wins. Memory: about 200 bytes
a record and 30 a chunk, and one record at a time.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import lmdb
import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.audit import audit
from kvstore.blockdb import EVICT_AT_ONCE, IDENTITY_PREFIX
from kvstore.config import MIB
from kvstore.errors import StoreDamaged, StorePathError
from kvstore.fsck.carving import JSON_START, MAX_IDENTITY_BYTES, Carved, carve, match_runs, slices_of
from kvstore.fsck.findings import Progress
from kvstore.fsck.pages import PAGE_HEADER, PageFile
from kvstore.fsck.restoring import Restored, Whole
from kvstore.geometry import CHUNK_BYTES
from kvstore.identity import IDENTITY_ID_BYTES, identity_digest
from kvstore.plain import check_plain
from kvstore.record import CHUNK_ENTRY, Header, parse_header
from kvstore.results import Rejection
from kvstore.snapshot import ReadView
from kvstore.space import estimated_bytes
from kvstore.storefile import DATA_NAME, STORE_NAME, make_folder, parse_store, path_errors, sync_folder

Told = Callable[[Progress], None]
BATCH_BYTES: Final = 16 * MIB
"""Of records that one transaction writes."""
SPARE_BYTES: Final = 64 * MIB
MAX_CAPACITY: Final = 2**44
"""Of a map size that is taken from the damaged file."""
NO_BOUND: Final = 2**63
"""Of the quarantine: nothing is in it."""


@dataclass
class Salvaged:
    """What came back. records, nbytes (stored, directories included); older: of these, whose newest header has lost its
    record; failed: keys of which no record is intact, those of records that were deleted long ago among them, by why the
    newest is not (kinds of results.REJECTION_KINDS); unknown: headers of a version, or records of a codec, that is not known
    here: what could not be checked is not restored; identities, notes: taken over."""

    output: Path
    records: int = 0
    nbytes: int = 0
    older: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unknown: int = 0
    identities: int = 0
    notes: int = 0


def quiet(progress: Progress) -> None:
    """Nobody wants to know how far it is."""


def salvage(shard: Path, output: Path, progress: Told = quiet) -> Salvaged:
    """Put every intact record of a shard's data.mdb into a new shard, the folder `output`, which is empty or not there.

    Raises StorePathError where there is nothing to read, no room or no way to write, UnsupportedFormat for a shard of a newer
    version. What was written until then stays in `output`.
    """
    check_plain(shard)
    _check_version(shard)
    data = shard / DATA_NAME
    with path_errors(data, "expected the folder of a shard"), PageFile(data) as file:
        make_folder(output)
        if any(output.iterdir()):
            raise StorePathError(f"{output}: not empty: expected a folder that is still to be made")
        return _Salvage(file, output, progress).run()


def _check_version(shard: Path) -> None:
    store = shard / STORE_NAME
    try:
        if store.is_file():
            with store.open("rb") as file:
                parse_store(file.read(4096), store)
    except StoreDamaged:
        pass


class Pieces(ReadView):
    """One header's record, put together from where its pieces may lie. A piece is given only with its right hash."""

    def __init__(self, file: PageFile, carved: Carved, matched: dict[tuple[int, int], int], header: Header) -> None:
        super().__init__(None, None, None, None)
        self._file, self._matched, self.header_of = file, matched, header
        first, end = np.searchsorted(carved.sequences, [header.sequence, header.sequence + 1])
        self._places = carved.places[first:end]
        self._known: dict[int, bytes | None] = {}

    def chunk(self, sequence: int, number: int) -> memoryview | None:
        if number not in self._known:
            self._known[number] = self._load(number)
        found = self._known[number]
        return None if found is None or sequence != self.header_of.sequence else memoryview(found)

    def expected(self, number: int) -> tuple[int, int] | None:
        """Length and hash of a piece, by header or directory."""
        if number == 0:
            return self.header_of.directory_length, self.header_of.directory_hash
        directory, start = self.chunk(self.header_of.sequence, 0), 8 * slices_of(self.header_of)
        at = start + (number - 1) * CHUNK_ENTRY.itemsize
        if directory is None or at + CHUNK_ENTRY.itemsize > len(directory):
            return None
        entry = np.frombuffer(directory, CHUNK_ENTRY, 1, at)[0]
        length = int(entry["length"])
        return (length, int(entry["hash"])) if length <= CHUNK_BYTES else None

    def all(self) -> list[bytes] | None:
        """The directory and every chunk, None where one is missing."""
        count = (self.header_of.directory_length - 8 * slices_of(self.header_of)) // CHUNK_ENTRY.itemsize
        pieces = [self.chunk(self.header_of.sequence, number) for number in range(count + 1)]
        return None if None in pieces else [bytes(piece) for piece in pieces if piece is not None]

    def _load(self, number: int) -> bytes | None:
        known = self.expected(number)
        if known is None:
            return None
        length, wanted = known
        here = self._places[(self._places["number"] == number) & (self._places["size"] == length)]["at"].tolist()
        for at in (*here, *([self._matched[known]] if known in self._matched else [])):
            data = self._file.at(at, length)
            if len(data) == length and xxh3_64_intdigest(data) == wanted:
                return data
        return None


class _Salvage:
    """One salvage."""

    def __init__(self, file: PageFile, output: Path, progress: Told) -> None:
        self.file, self.output, self.progress = file, output, progress
        self.result = Salvaged(output)
        self.carved: Carved
        self.keys = 0
        """Different keys that headers name."""
        self.matched: dict[tuple[int, int], int] = {}
        self.wanted_ids = set[bytes]()

    def run(self) -> Salvaged:
        self.carved = carve(self.file, partial(self._tell, "search"))
        self.result.unknown, self.keys = self.carved.unknown, len(self.carved.first_of_key)
        self._match()
        with path_errors(self.output, "expected room for what is salvaged"):
            try:
                self._write()
            except lmdb.Error as error:
                raise StorePathError(f"{self.output}: {error}: expected room for what is salvaged") from None
            sync_folder(self.output)
        return self.result

    def _tell(self, stage: str, nbytes: int) -> None:
        self.progress(Progress(stage, self.result.records, nbytes, self.keys, self.file.size))

    # --- what no leaf leads to -------------------------------------------------------------------------------------

    def _match(self) -> None:
        """Find the pieces of records that leaves do not name, directories first: they name the others."""
        lacking = self.carved.lacking(self.file)
        for wanted in (self._directories, self._chunks):
            read = 0

            def scanned(nbytes: int) -> None:
                nonlocal read
                read += nbytes
                self._tell("match", read)

            known = {piece for at in lacking if (pieces := self._pieces(at)) for piece in wanted(pieces)}
            self.matched |= match_runs(self.file, self.carved.runs, known, scanned)

    def _directories(self, pieces: Pieces) -> Iterator[tuple[int, int]]:
        known = pieces.expected(0)
        if known and pieces.chunk(pieces.header_of.sequence, 0) is None:
            yield known

    def _chunks(self, pieces: Pieces) -> Iterator[tuple[int, int]]:
        number = 1
        while number < 2**16 and (known := pieces.expected(number)):
            if pieces.chunk(pieces.header_of.sequence, number) is None:
                yield known
            number += 1

    def _pieces(self, row: int) -> Pieces | None:
        """None where somebody changed the file meanwhile."""
        header = parse_header(self._entry(row))
        return Pieces(self.file, self.carved, self.matched, header) if isinstance(header, Header) else None

    def _entry(self, row: int) -> bytes:
        return self.file.at(int(self.carved.headers["at"][row]), int(self.carved.headers["length"][row]))

    # --- into the new shard ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        need = self._needed()
        free = shutil.disk_usage(self.output).free
        if need > free:
            raise StorePathError(f"{self.output}: up to {need} bytes are needed, {free} are free: make room there")
        old = self.file.metas[0].map_size if self.file.metas else 0
        capacity = max(need + need // 8 + SPARE_BYTES, old if old <= MAX_CAPACITY else 0)
        db, token = Restored(self.output, capacity, False, True, NO_BOUND), object()
        try:
            db.enter(token)
            for batch in self._batches():
                self._put(db, batch)
            notes = self._identities() | self.carved.notes
            db.restore((), notes)
            self.result.notes = len(self.carved.notes)
            self.result.identities = len(notes) - self.result.notes
        finally:
            db.calls.discard(token)
            db.close()

    def _needed(self) -> int:
        """Bytes that the new file takes at most: no two records share pages of this one."""
        newest = self.carved.headers["stored"][self.carved.first_of_key]
        return min(sum(map(estimated_bytes, newest.tolist())) + 4096 * newest.size, self.file.size + MIB)

    def _put(self, db: Restored, batch: list[Whole]) -> None:
        for record, written in zip(batch, db.restore(batch, {}), strict=True):
            if written:
                self.result.records += 1
                self.result.nbytes += record.header.stored_length
                self.wanted_ids.add(record.header.key[:IDENTITY_ID_BYTES])
        self._tell("write", self.result.nbytes)

    def _batches(self) -> Iterator[list[Whole]]:
        batch, nbytes = list[Whole](), 0
        for record in self._records():
            batch.append(record)
            nbytes += record.nbytes
            if nbytes >= BATCH_BYTES or len(batch) >= EVICT_AT_ONCE:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _records(self) -> Iterator[Whole]:
        """Of each key the newest intact record; in each round those of the keys that are still without one, by sequence
        number, so that writing appends."""
        rows, ends = self.carved.first_of_key, self.carved.end_of_key
        why: dict[int, str] = {}
        age = 0
        while rows.size:
            order = np.argsort(self.carved.headers["sequence"][rows], kind="stable")
            left = []
            for group in order.tolist():
                found = self._record(int(rows[group]))
                if isinstance(found, Whole):
                    self.result.older += age > 0
                    why.pop(int(ends[group]), None)
                    yield found
                else:
                    why.setdefault(int(ends[group]), found)
                    left.append(group)
            kept = np.sort(np.array(left, np.int64))
            rows, ends, age = rows[kept] + 1, ends[kept], age + 1
            rows, ends = rows[rows < ends], ends[rows < ends]
        self.result.failed = Counter(why.values())

    def _record(self, row: int) -> Whole | str:
        """A record that is intact, or the kind of what is wrong with it."""
        entry = self._entry(row)
        header = parse_header(entry)
        if isinstance(header, Rejection):
            return header.kind
        pieces = Pieces(self.file, self.carved, self.matched, header)
        wrong = audit(pieces, header.key, entry)
        if wrong is not None and not (wrong.kind == "version" and pieces.all()):
            return wrong.kind
        chunks = pieces.all()
        return "storage_hash" if chunks is None else Whole(header, entry, chunks)

    def _identities(self) -> dict[bytes, bytes]:
        """By its key in `meta`, every identity that was found: by its own key, or for a record as JSON at a run's begin."""
        found = dict(self.carved.identities)
        missing = self.wanted_ids - found.keys()
        for page, count in self.carved.texts if missing else ():
            text = _json(self.file.at(page * self.file.page_bytes + PAGE_HEADER, self._most(count)))
            if (digest := identity_digest(text)) in missing:
                found[digest] = text
        return {IDENTITY_PREFIX + name: text for name, text in found.items()}

    def _most(self, count: int) -> int:
        return min(count * self.file.page_bytes - PAGE_HEADER, MAX_IDENTITY_BYTES)


def _json(data: bytes) -> bytes:
    """The JSON that data begins with, empty where it is none."""
    assert data.startswith(JSON_START)
    text = data.decode("ascii", "replace")
    try:
        return data[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return b""
