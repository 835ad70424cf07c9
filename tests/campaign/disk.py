"""A disk that keeps of what was not synced whatever it likes: the states that a power loss may leave behind.

What is promised: a synced file has the bytes and the length that it had then; a synced folder has its names. A write
through a descriptor that syncs (O_DSYNC) is on the disk when it returns. Of later writes any 512-byte sectors may be
there, of later lengths any, and of later changes of names any, as long as changes of one name keep their order and a
rename happens as a whole. Sectors that a file grew by and that were never written are zeros, or what lay there before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from tests.campaign.strace import Call

SECTOR: Final = 512
CALLS: Final = (
    *("openat", "creat", "pwrite64", "pwritev", "pwritev2", "write", "writev", "lseek", "ftruncate", "truncate"),
    *("fallocate", "fsync", "fdatasync", "sync_file_range", "msync", "syncfs", "sync", "rename", "renameat"),
    *("renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "link", "linkat", "copy_file_range", "sendfile"),
)
UNKNOWN: Final = {"creat", "truncate", "syncfs", "sync", "link", "linkat", "copy_file_range", "sendfile", "rmdir"}
"""Calls that the model has no meaning for: a trace with one of them on the store's files is refused."""
MARKER: Final = "marker"


@dataclass(frozen=True)
class Event:
    """What one system call did below the traced folder.

    kind: "make", "folder", "rename", "remove" change names; "write", "length" change a file; "sync"; "said" is a
    line that the traced process wrote to the marker. durable: a write that is on the disk when it returns.
    """

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""
    durable: bool = False


class Reader:
    """Turns system calls into events. It follows where each file descriptor stands, and which ones sync."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._at: dict[int, int] = {}
        self._syncs: dict[int, bool] = {}
        self._known: set[str] = set()

    def events(self, calls: Iterable[Call]) -> Iterator[Event]:
        """The events, in order. Raises ValueError for a call that has no meaning here."""
        for call in calls:
            if call.result >= 0:
                yield from self._one(call)

    def _inside(self, path: str) -> str | None:
        path = path.removesuffix(" (deleted)")
        return os.path.relpath(path, self._root) if path == self._root or path.startswith(self._root + "/") else None

    def _one(self, call: Call) -> Iterator[Event]:
        named = call.name in ("openat", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat")
        texts = [text.decode() for text in call.strings] if named else call.paths[:1]
        paths = [inside for text in texts if (inside := self._inside(text)) is not None]
        if not paths or paths[0].endswith("lock.mdb") or (named and paths[0] == MARKER):
            return
        if call.name in UNKNOWN:
            raise ValueError(f"{call.name} of {paths}: a call that the model of a disk has no meaning for")
        if named:
            yield from self._names(call, paths)
        else:
            yield from self._file(call, paths[0])

    def _names(self, call: Call, paths: list[str]) -> Iterator[Event]:
        if call.name == "openat":
            yield from self._opened(call, paths[0])
        elif call.name.startswith("rename"):
            yield Event("rename", *paths)
            self._known = self._known - {paths[0]} | {paths[1]}
        elif call.name.startswith("unlink"):
            yield Event("remove", paths[0])
            self._known.discard(paths[0])
        else:
            yield Event("folder", paths[0])

    def _opened(self, call: Call, path: str) -> Iterator[Event]:
        self._at[call.result], self._syncs[call.result] = 0, "SYNC" in call.arguments
        if "O_CREAT" in call.arguments and path not in self._known:
            self._known.add(path)
            yield Event("make", path)
        if "O_TRUNC" in call.arguments:
            yield Event("length", path)

    def _file(self, call: Call, path: str) -> Iterator[Event]:
        if call.name == "lseek":
            self._at[call.descriptor] = call.result
        elif "write" in call.name:
            yield self._written(call, path)
        elif call.name == "ftruncate":
            yield Event("length", path, offset=call.numbers[-1])
        elif call.name == "fallocate":
            yield Event("length", path, offset=sum(call.numbers[-2:]))
        elif call.name in ("fsync", "fdatasync"):
            yield Event("sync", path)

    def _written(self, call: Call, path: str) -> Event:
        data = b"".join(call.strings)[: call.result]
        if path == MARKER:
            return Event("said", path, data=data)
        if call.name.startswith("pwrite"):
            offset = call.numbers[-1]
        else:
            offset = self._at[call.descriptor]
            self._at[call.descriptor] = offset + len(data)
        return Event("write", path, offset=offset, data=data, durable=self._syncs.get(call.descriptor, False))


@dataclass
class File:
    """One file: what is on the disk, and what was written since the last sync, in order."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)

    def write(self, event: Event) -> None:
        if event.durable:
            put(self.synced, event.offset, event.data)
        else:
            self.pending.append(event)

    def sync(self) -> None:
        for event in self.pending:
            if event.kind == "write":
                put(self.synced, event.offset, event.data)
            else:
                resize(self.synced, event.offset)
        self.pending = []

    def lengths(self) -> list[int]:
        """The length on the disk, and after each write since."""
        found = [len(self.synced)]
        for event in self.pending:
            end = event.offset + len(event.data)
            found.append(max(found[-1], end) if event.kind == "write" else end)
        return found

    def image(self, keep: Callable[[], bool], length: int, stale: Callable[[int], bytes]) -> bytes:
        """What may lie on the disk: of each sector that was written since, what `keep` says. stale: what lies where
        the file grew."""
        made = bytearray(self.synced)
        if length > len(made):
            made += stale(length - len(made))
        for event in self.pending:
            for start, piece in sectors(event):
                if keep() and start < length:
                    made[start : start + len(piece)] = piece[: length - start]
        return bytes(made[:length])


def put(into: bytearray, offset: int, data: bytes) -> None:
    resize(into, max(len(into), offset))
    into[offset : offset + len(data)] = data


def resize(into: bytearray, length: int) -> None:
    del into[length:]
    into.extend(bytes(length - len(into)))


def sectors(event: Event) -> Iterator[tuple[int, bytes]]:
    """A write's parts, each in one sector of the file."""
    at = 0
    while at < len(event.data):
        step = SECTOR - (event.offset + at) % SECTOR
        yield event.offset + at, event.data[at : at + step]
        at += step


class Disk:
    """The files below a folder, by their paths; None is a folder."""

    def __init__(self) -> None:
        self.names: dict[str, File | None] = {".": None}
        self.synced_names: dict[str, File | None] = {".": None}
        self._changes: list[Event] = []
        self._made: dict[int, File | None] = {}

    def apply(self, event: Event) -> None:
        """Do what a call did; "said" is nothing."""
        if event.kind in ("make", "folder", "rename", "remove"):
            made = File() if event.kind == "make" else None
            self._made[id(event)] = made
            change(self.names, event, made)
            self._changes.append(event)
        elif event.kind == "sync" and self.names[event.path] is None:
            self._sync_folder(event.path)
        elif event.kind in ("sync", "write", "length"):
            file = self.names[event.path]
            assert file is not None
            file.sync() if event.kind == "sync" else file.write(event)

    def _sync_folder(self, path: str) -> None:
        inside = [
            event for event in self._changes if os.path.dirname(event.path) in (path, "" if path == "." else path)
        ]
        for event in inside:
            change(self.synced_names, event, self._made.pop(id(event)))
        self._changes = [event for event in self._changes if id(event) in self._made]

    def crash(self, chance: Random) -> dict[str, bytes | None]:
        """What a power loss now may leave: files and folders by their paths, parents first."""
        names = self._names_after(_keeper(chance))
        found: dict[str, bytes | None] = {}
        for path in sorted(names):
            file, parent = names[path], os.path.dirname(path) or "."
            if path != "." and (parent in found or parent == "."):
                found[path] = None if file is None else _image(file, chance)
        return found

    def _names_after(self, keep: Callable[[], bool]) -> dict[str, File | None]:
        names, dropped = dict(self.synced_names), set[str]()
        for event in self._changes:
            touched = {event.path, event.target} - {""}
            if keep() and not touched & dropped:
                change(names, event, self._made[id(event)])
            else:
                dropped |= touched
        return names


def change(names: dict[str, File | None], event: Event, made: File | None) -> None:
    """Apply a change of names."""
    if event.kind == "rename":
        names[event.target] = names.pop(event.path)
    elif event.kind == "remove":
        names.pop(event.path, None)
    else:
        names[event.path] = made


def _keeper(chance: Random) -> Callable[[], bool]:
    """Which of many unsynced things a power loss keeps: all, none, those before a point in time, or any."""
    share = chance.choice([0.0, 1.0, 0.02, 0.1, 0.5, 0.9, 0.98])
    if chance.random() < 0.25:
        left = [chance.randrange(200)]

        def first() -> bool:
            left[0] -= 1
            return left[0] >= 0

        return first
    return lambda: chance.random() < share


def _image(file: File, chance: Random) -> bytes:
    lengths = file.lengths()
    length = chance.choice([lengths[0], lengths[-1], chance.choice(lengths)])
    stale = bytes if chance.random() < 0.75 else chance.randbytes
    return file.image(_keeper(chance), length, stale)


def write_files(root: Path, files: dict[str, bytes | None]) -> None:
    """Make a crash state's files in a folder."""
    for path, data in files.items():
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)
