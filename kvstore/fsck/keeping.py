"""Damaged records' bytes in a folder beside the store, on disk before they leave it; and what a killed repair left there.

A record's folder gets its name last, once all of it is synced: one that still ends in `.part` holds no record, since the
store then still has it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kvstore.errors import StorePathError
from kvstore.fsck.findings import Finding
from kvstore.record import Header, parse_header
from kvstore.reports import sequence_of
from kvstore.storefile import DATA_NAME, sync_folder

QUARANTINE: Final = "quarantine-"
DAMAGED: Final = f"{DATA_NAME}.damaged-"
SALVAGE_NAME: Final = f"{DATA_NAME}.salvage"
"""The folder in which a repair makes the new database."""
PART: Final = ".part"
FOLDER: Final = re.compile(rf"{QUARANTINE}\d{{8}}T\d{{6}}Z")
SCHEMA: Final = 1
SPARE_BYTES: Final = 2**24
"""What a disk must have free besides."""


def stamp() -> str:
    """The time as names have it, UTC."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


class Shelf:
    """A quarantine folder of a shard, made with the first record. Belongs to one thread."""

    def __init__(self, shard: Path) -> None:
        self.folder = shard / f"{QUARANTINE}{stamp()}"
        self.records, self.nbytes = 0, 0
        self._new: list[Path] = []
        self._kept, self._last = set[bytes](), 0

    def keep(self, finding: Finding, entry: bytes, chunks: Mapping[int, bytes | memoryview]) -> None:
        """Write a record down, once: its index entry, its directory and chunks by number. Raises StorePathError, OSError."""
        if finding.key in self._kept:
            return
        nbytes = len(entry) + sum(map(len, chunks.values()))
        free = shutil.disk_usage(self.folder.parent).free
        if nbytes + SPARE_BYTES > free:
            raise StorePathError(
                f"{self.folder}: {nbytes} bytes of a damaged record and {SPARE_BYTES} to spare are needed, {free} are free: "
                "make room on the disk and repair again; what was repaired until here stays"
            )
        part = self.folder / f"{self._number()}{PART}"
        part.parent.mkdir(mode=0o700, exist_ok=True)
        part.mkdir(mode=0o700)
        self._new.append(part)
        _write(part / "header.bin", entry)
        for number, chunk in chunks.items():
            _write(part / (f"chunk-{number:05d}.bin" if number else "directory.bin"), chunk)
        _write(part / "record.json", _description(finding, entry, chunks))
        sync_folder(part)
        self.nbytes += nbytes
        self._kept.add(finding.key)

    def seal(self) -> None:
        """Make what was kept durable, under its names. Raises OSError."""
        for part in self._new:
            part.rename(part.with_suffix(""))
        if self._new:
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        self.records += len(self._new)
        self._new = []

    def _number(self) -> int:
        self._last += 1
        while (self.folder / str(self._last)).exists():
            self._last += 1
        return self._last


def _description(finding: Finding, entry: bytes, chunks: Mapping[int, bytes | memoryview]) -> bytes:
    header = parse_header(entry)
    said = {
        "schema": SCHEMA,
        "key": finding.key.hex(),
        "kind": finding.kind,
        "detail": finding.detail,
        "sequence": header.sequence if isinstance(header, Header) else sequence_of(entry),
        "header_bytes": len(entry),
        "chunk_bytes": {str(number): len(chunk) for number, chunk in chunks.items()},
        "time": stamp(),
    }
    return json.dumps(said, indent=1).encode() + b"\n"


def _write(path: Path, data: bytes | memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def tidy(shard: Path) -> None:
    """Remove what a killed repair left half-made: a new database, records' folders without a name, and second names of a
    data.mdb that was not replaced after all. The caller holds the shard alone. Raises OSError."""
    for path in list(leftovers(shard)):
        remove(path)


def leftovers(shard: Path) -> Iterator[Path]:
    """What `tidy` removes. Raises OSError."""
    data = shard / DATA_NAME
    for path in shard.iterdir():
        if path.name == SALVAGE_NAME:
            yield path
        elif FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            parts, others = list(path.glob(f"*{PART}")), any(found.suffix != PART for found in path.iterdir())
            yield from parts if others else [path]
        elif path.name.startswith(DAMAGED) and data.exists() and path.exists() and path.samefile(data):
            yield path


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing where it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
