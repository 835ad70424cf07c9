"""What readers tell the writer: which records they refused. docs/format.md is the specification of the file.

A reader cannot take a record out of the store. It says so in a small file, and the writer looks for itself: nothing in
the file is believed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.record import KEY_BYTES, SEQUENCE_FIELD

log = logging.getLogger(__name__)

REPORTS_NAME: Final = "rejected"
REPORT: Final = struct.Struct("<QQBB82s4x")
"""Hash, sequence number, kind, length of the key, the key."""
MAX_BYTES: Final = 2**16
MAX_REPORTS: Final = MAX_BYTES // REPORT.size
KINDS: Final = ("header", "key", "storage_hash", "decode", "content")
"""What is to blame on a record, numbered from 1 in the file."""
LOCK_PATIENCE_S: Final = 0.05
POLL_SECONDS: Final = 0.002


def sequence_of(value: bytes) -> int:
    """What an index entry, damaged or not, has in the place of its sequence number."""
    return int.from_bytes(value[SEQUENCE_FIELD].ljust(8, b"\0"), "little")


@dataclass(frozen=True)
class Report:
    """A record that a reader refused: its index key, what stood in the place of its sequence number, and why."""

    key: bytes
    sequence: int
    kind: str

    def encode(self) -> bytes:
        """The report's bytes. Raises ValueError for a kind that is not one of KINDS, or no index key."""
        if len(self.key) not in KEY_BYTES:
            raise ValueError(f"{len(self.key)} bytes are no index key")
        data = bytearray(REPORT.pack(0, self.sequence, KINDS.index(self.kind) + 1, len(self.key), self.key))
        struct.pack_into("<Q", data, 0, xxh3_64_intdigest(data[8:]))
        return bytes(data)


def parse_report(data: bytes) -> Report | None:
    """The report in these bytes, None where they are none."""
    if len(data) != REPORT.size:
        return None
    stored_hash, sequence, kind, length, key = REPORT.unpack(data)
    if stored_hash != xxh3_64_intdigest(data[8:]) or not 1 <= kind <= len(KINDS) or length not in KEY_BYTES:
        return None
    return Report(key[:length], sequence, KINDS[kind - 1])


class Reports:
    """The reports in one shard's folder. Readers add, the writer takes. Any thread and process may call it.

    Nothing is raised where the file cannot be used, and nobody waits for long: reports are hints.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / REPORTS_NAME
        self._told = False

    def add(self, entries: Sequence[tuple[bytes, bytes, str]]) -> int:
        """Report refused records: index key, index entry, kind each. Returns how many could not be written."""
        try:
            reports = [Report(key, sequence_of(value), kind).encode() for key, value, kind in entries]
        except ValueError:
            return sum(self.add([entry]) for entry in entries) if len(entries) > 1 else len(entries)
        try:
            with self._locked(os.O_CREAT) as fd:
                # What is torn at the end is written over.
                end = os.fstat(fd).st_size // REPORT.size
                room = reports[: max(0, MAX_REPORTS - end)]
                written = os.pwrite(fd, b"".join(room), end * REPORT.size) // REPORT.size
                return len(reports) - written
        except OSError as error:
            self._tell(error)
            return len(reports)

    def take(self, most: int = MAX_REPORTS) -> list[Report]:
        """Remove up to `most` reports from the file, the latest first, and return those that are intact."""
        try:
            if not os.lstat(self._path).st_size:
                return []
            with self._locked(0) as fd:
                return list(self._take(fd, most))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error)
            return []

    def peek(self) -> list[Report]:
        """The intact reports in the file, which stays as it is."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            data = os.pread(fd, MAX_REPORTS * REPORT.size, 0)
        except OSError:
            return []
        finally:
            os.close(fd)
        found = (parse_report(data[at : at + REPORT.size]) for at in range(0, len(data), REPORT.size))
        return [report for report in found if report is not None]

    @staticmethod
    def _take(fd: int, most: int) -> Iterator[Report]:
        end = min(os.fstat(fd).st_size // REPORT.size, MAX_REPORTS)
        start = max(0, end - most) * REPORT.size
        data = os.pread(fd, end * REPORT.size - start, start)
        os.ftruncate(fd, start)
        found = (parse_report(data[at : at + REPORT.size]) for at in range(0, len(data), REPORT.size))
        return (report for report in found if report is not None)

    @contextmanager
    def _locked(self, flags: int) -> Iterator[int]:
        """The file, open and locked. Raises OSError: for what is no plain file of this folder alone, too."""
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError("it is no plain file, or has another name besides")
            self._lock(fd)
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def _lock(fd: int) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            log.warning("%s: readers' reports of damaged records cannot be exchanged: %s", self._path, error)
        self._told = True
