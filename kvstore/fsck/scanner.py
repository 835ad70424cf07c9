"""A scanning process: it maps the database, and whatever is in the file ends this process at most.

It is given tasks on its standard input and answers on its standard output, a JSON object a line; kvstore.fsck.team has
the other end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import lmdb

from kvstore.blockdb import IDENTITY_PREFIX
from kvstore.errors import KVStoreError, StoreDamaged
from kvstore.fsck.findings import Finding
from kvstore.fsck.glance import intact
from kvstore.fsck.mark import RECORD, WALK, Mark
from kvstore.fsck.reading import Plain, Reading
from kvstore.fsck.stages import NOT_CHECKED, Problem, problems
from kvstore.fsck.structure import IN_USE, walked
from kvstore.fsck.survey import Survey, TooLong, last_chunk, matches, stored_bytes
from kvstore.record import Header, parse_header
from kvstore.reports import sequence_of
from kvstore.snapshot import ReadView
from kvstore.storefile import DATA_NAME

if TYPE_CHECKING:
    from kvstore.fsck.content import Content

SNAPSHOT_S: Final = 0.5
"""How long a snapshot lasts before it is renewed, and one record more."""
AT_ONCE: Final = 256
BYTES_AT_ONCE: Final = 2**26
PACED_S: Final = 0.25
"""What is read at once under a rate limit."""
STORED_LENGTH: Final = slice(32, 40)
UNREADABLE: Final = (lmdb.Error, MemoryError, SystemError)
"""What reading a damaged tree raises."""
OUTSIDE: Final = (lmdb.ReadersFullError, lmdb.LockError, lmdb.BadRslotError)
"""What of LMDB's errors is not the file's."""
LOST: Final = "records whose index entries are on pages that cannot be read"
Say = Callable[[dict[str, Any]], None]


class Entry(NamedTuple):
    """An index entry that is to be checked: its key, its sequence number and stored bytes as it says them."""

    key: bytes
    sequence: int
    nbytes: int


class Scanner:
    """The tasks of one process. Order: what team.order made."""

    def __init__(self, order: dict[str, Any], mark: Mark, say: Say) -> None:
        self._shard, self._stage = Path(order["shard"]), order["stage"]
        self._prefix, self._rate = bytes.fromhex(order["prefix"]), order["rate"]
        self._content = _content(order["device"]) if self._stage == "deep" else None
        self._mark, self._say = mark, say
        self._open: Reading | None = None
        self._plain: Plain | None = None
        """Where trees do not hold together: asked before LMDB is."""
        self._lost = False
        self._due = 0.0

    def do(self, task: dict[str, Any]) -> None:
        """Do a task, and say what came of it. Raises what reading raises."""
        if task["task"] == "structure":
            self._structure()
        elif not self._reading().databases and not self._reading().open_databases():
            self._say({"done": {}})
        elif task["task"] == "survey":
            self._survey(task)
        else:
            self._range(task)

    def _reading(self) -> Reading:
        if self._open is None:
            self._open = Reading(self._shard)
        return self._open

    def close(self) -> None:
        """Let the shard go."""
        if self._open is not None:
            self._open.close()

    def _found(self, finding: Finding) -> None:
        self._say({"finding": asdict(finding) | {"key": finding.key.hex()}})

    def _structure(self) -> None:
        findings, unchecked = walked(self._shard / DATA_NAME, self._hold)
        for finding in findings:
            self._found(finding)
        if unchecked:
            self._say({"note": unchecked})
        self._say({"done": {}})

    @contextmanager
    def _hold(self) -> Iterator[None]:
        with self._reading().begin():
            yield

    def _survey(self, task: dict[str, Any]) -> None:
        self._mark.set(WALK, b"")
        boundaries = list(map(bytes.fromhex, task["boundaries"]))
        try:
            made = Survey(self._reading(), self._prefix, boundaries, task["every"]).run()
        except TooLong:
            self._say({"note": f"index against payload, and accounting: {IN_USE}, and too large for one snapshot"})
            self._say({"done": {}})
            return
        for finding in made.findings:
            if (still := self._still(finding)) is not None:
                self._found(still)
        for sentence in made.unchecked:
            self._say({"note": sentence})
        ranges = [[r.start.hex(), r.end.hex(), r.records, r.nbytes] for r in made.ranges]
        self._say({"done": {"ranges": ranges}})

    def _still(self, finding: Finding) -> Finding | None:
        """A finding of the survey after a second read, where it is about one record; None where that was replaced or deleted
        meanwhile."""
        if not finding.key:
            return finding
        with self._reading().snapshot() as view:
            value = view.header(finding.key)
            if value is None or sequence_of(value) != finding.sequence:
                return None
            kinds = {problem.kind for problem in problems(view, finding.key, value)}
        return replace(finding, persisted=finding.kind in kinds or (finding.kind == "HEADER" and bool(kinds)))

    # --- records -----------------------------------------------------------------------------------------------------

    def _range(self, task: dict[str, Any]) -> None:
        at, end, skip = bytes.fromhex(task["start"]), bytes.fromhex(task["end"]), set(map(bytes.fromhex, task["skip"]))
        records, nbytes = task["records"], task["nbytes"]
        while records > 0 and nbytes > 0:
            self._mark.set(WALK, at)
            with self._plainly(task["plain"]):
                there = self._entries(at)
                inside = [item for item in there if not end or item[0] < end]
                meant, looked = self._meant(inside, records, nbytes)
                ended = looked == len(inside) and (len(inside) < len(there) or len(there) < AT_ONCE)
                at = end if ended else inside[looked - 1][0] + b"\0"
                done = self._check([entry for entry in meant if entry.key not in skip])
            records, nbytes = records - len(meant), nbytes - done
            self._say({"upto": at.hex(), "end": ended, "records": len(meant), "nbytes": done})
            self._pace(done)
            if ended:
                break
        self._say({"done": {}})

    @contextmanager
    def _plainly(self, wanted: bool) -> Iterator[None]:
        """Look before LMDB is asked, for as long as the block lasts and where that is wanted."""
        if not wanted:
            yield
            return
        with Plain(self._shard) as self._plain:
            try:
                yield
            finally:
                if self._plain.lost and not self._lost:
                    self._lost = True
                    self._say({"note": LOST})
                self._plain = None

    def _entries(self, at: bytes) -> list[tuple[bytes, bytes]]:
        """Index keys from one on and their entries, AT_ONCE at most."""
        if self._plain is not None:
            return self._plain.entries(at, AT_ONCE)
        with self._reading().snapshot() as view:
            return view.entries(at, AT_ONCE)

    def _meant(self, there: list[tuple[bytes, bytes]], records: int, nbytes: int) -> tuple[list[Entry], int]:
        """The entries that are to be checked at once, and how many of these are done with then: one at least."""
        most = min(nbytes, BYTES_AT_ONCE, max(1, int(self._rate * PACED_S)) if self._rate else BYTES_AT_ONCE)
        found: list[Entry] = []
        total = 0
        for looked, (key, value) in enumerate(there):
            if total >= most or len(found) >= records:
                return found, looked
            if matches(key, self._prefix):
                size = int.from_bytes(value[STORED_LENGTH].ljust(8, b"\0"), "little")
                found.append(Entry(key, sequence_of(value), min(size, BYTES_AT_ONCE)))
                total += found[-1].nbytes
        return found, len(there)

    def _check(self, entries: list[Entry]) -> int:
        """Check records in the order in which they were written, and say what is wrong; their stored bytes."""
        if self._content is not None:
            known = self._identities() if self._plain is None else self._plain.identities()
            self._content.identities.update(known)
        suspects: list[tuple[bytes, bytes, list[Finding]]] = []
        pending = sorted(entries, key=lambda entry: entry.sequence)
        while pending:
            pending = pending[self._check_some(pending, suspects) :]
        for suspect in suspects:
            for finding in self._again(*suspect):
                self._found(finding)
        return sum(entry.nbytes for entry in entries)

    def _check_some(self, pending: list[Entry], suspects: list[tuple[bytes, bytes, list[Finding]]]) -> int:
        """Check records in one snapshot; how many. Those that are not there any more are none. A snapshot in which LMDB could
        not read something is of no more use."""
        until = time.monotonic() + SNAPSHOT_S
        with self._reading().snapshot() as view:
            for done, entry in enumerate(pending, 1):
                self._mark.set(RECORD, entry.key)
                value, found = self._looked(view, entry.key)
                for note in (finding for finding in found if finding.kind == NOT_CHECKED):
                    self._say({"note": note.detail})
                if value is not None and (wrong := [finding for finding in found if finding.kind != NOT_CHECKED]):
                    suspects.append((entry.key, value, wrong))
                if time.monotonic() > until or any(finding.kind == "TREE" for finding in found):
                    return done
        return len(pending)

    def _looked(self, view: ReadView, key: bytes) -> tuple[bytes | None, list[Finding]]:
        """A record's index entry, None where there is none, and what is wrong with the record."""
        try:
            value = view.header(key)
        except UNREADABLE as error:
            return b"", [Finding("TREE", f"its index entry cannot be read: {_words(error)}", key)]
        return value, [] if value is None else self._problems(view, key, value)

    def _problems(self, view: ReadView, key: bytes, value: bytes) -> list[Finding]:
        if found := self._obstacle(key, value):
            return [found]
        try:
            if self._content is None and intact(view, key, value):
                return []
            return [self._finding(key, value, problem) for problem in problems(view, key, value, self._content)]
        except UNREADABLE as error:
            return [self._finding(key, value, Problem("TREE", f"it cannot be read: {_words(error)}"))]
        except Exception as error:
            return [self._finding(key, value, Problem(NOT_CHECKED, f"a record whose check failed: {_words(error)}"))]

    def _obstacle(self, key: bytes, value: bytes) -> Finding | None:
        """Why LMDB must not be asked for a record's chunks, None where it may."""
        if self._plain is None or not isinstance(header := parse_header(value, key), Header):
            return None
        found = self._plain.obstacle(header.sequence, max(0, last_chunk(header)) + 1)
        if found is None:
            return None
        page, past = found
        where = "lies past the end of the file" if past else "is none of its tree"
        problem = Problem("FILE_TRUNCATED" if past else "TREE", f"it cannot be read: page {page} {where}")
        return replace(self._finding(key, value, problem), page=page, pages=1)

    def _finding(self, key: bytes, value: bytes, problem: Problem) -> Finding:
        page, pages = self._reading().place(problem.data) if problem.data is not None else (None, 0)
        nbytes = stored_bytes(parse_header(value), value)
        return Finding(problem.kind, problem.detail, key, nbytes, page, pages, None, sequence_of(value))

    def _again(self, key: bytes, entry: bytes, first: list[Finding]) -> Iterator[Finding]:
        """A second read, in a new snapshot. A record that was replaced or deleted meanwhile is no finding."""
        self._mark.set(RECORD, key)
        with self._reading().snapshot() as view:
            value, found = self._looked(view, key)
            if value is None or (entry and value and sequence_of(value) != sequence_of(entry)):
                return
            kinds = {finding.kind for finding in found}
        yield from (replace(finding, persisted=finding.kind in kinds) for finding in first)

    def _identities(self) -> dict[bytes, bytes]:
        reading = self._reading()
        found = {}
        with reading.begin() as txn, txn.cursor(db=reading.databases["meta"]) as cursor:
            there: Iterator[Any] = cursor.iternext() if cursor.set_range(IDENTITY_PREFIX) else iter(())
            for key, value in there:
                if not bytes(key).startswith(IDENTITY_PREFIX):
                    break
                found[bytes(key).removeprefix(IDENTITY_PREFIX)] = bytes(value)
        return found

    def _pace(self, nbytes: int) -> None:
        """Wait until the next bytes may be read. What was not read in time is not made up for."""
        if self._rate:
            now = time.monotonic()
            self._due = max(self._due, now) + nbytes / self._rate
            time.sleep(self._due - now)


def _content(device: str) -> Content:
    # Deep checks alone need it.
    from kvstore.fsck.content import Content

    return Content(device, {})


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main(arguments: list[str]) -> None:
    """Serve the process that started this one, until it closes standard input. arguments: the descriptor of its mark."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    out = sys.stdout

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    # Where nobody listens any more, or the end was asked for, the shard is closed all the same.
    with suppress(BrokenPipeError, SystemExit):
        _serve(Mark(int(arguments[0])), say)
    # Nothing is left to do: Python would try to flush what nobody reads, and take down its modules one by one.
    os._exit(0)


def _serve(mark: Mark, say: Say) -> None:
    order = sys.stdin.readline()
    if not order:
        # It was started early, and is not needed.
        return
    try:
        scanner = Scanner(json.loads(order), mark, say)
    except KVStoreError as error:
        say({"refused": [type(error).__name__, str(error)]})
        return
    try:
        for line in sys.stdin:
            _do(scanner, json.loads(line), say)
    finally:
        scanner.close()


def _do(scanner: Scanner, task: dict[str, Any], say: Say) -> None:
    try:
        scanner.do(task)
    except OUTSIDE as error:
        say({"refused": ["StorePathError", f"LMDB: {error}"]})
    except (*UNREADABLE, StoreDamaged) as error:
        say({"failed": _words(error)})
    except (KVStoreError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        say({"refused": [type(error).__name__, str(error)]})
