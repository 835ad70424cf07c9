"""Which parts of the index were checked, and when: a small file in the shard's folder, so that a later check goes on there.

It is untrusted when it is read: what is not as it was written is ignored. Records that have damage count as not checked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.fsck.options import STAGES
from kvstore.storefile import sync_folder

NAME: Final = "fsck.json"
NEW: Final = "fsck.json.new"
SCHEMA: Final = 1
MAX_BYTES: Final = 2**20
MAX_PARTS: Final = 2048
MAX_KEY_DIGITS: Final = 2 * 512
"""Of an LMDB key, and one byte."""


class Part(NamedTuple):
    """Index keys from start on, below end, which is empty where there is none; when they were checked, seconds since 1970;
    by which stage, a number of STAGES."""

    start: bytes
    end: bytes
    time: int
    stage: int


@dataclass(frozen=True)
class Checkpoint:
    """parts: in order, none overlaps another; begun: when the pass that goes on began, 0 where there is none; stage: the
    pass's, a number of STAGES; prefix: of the records that it is about."""

    parts: tuple[Part, ...] = ()
    begun: int = 0
    stage: int = 0
    prefix: bytes = b""

    def boundaries(self) -> list[bytes]:
        """The keys at which parts begin and end, in order."""
        return sorted({key for part in self.parts for key in (part.start, part.end)} - {b""})

    def checked(self, start: bytes, end: bytes, stage: int) -> int:
        """When all index keys from start on and below end had last been checked by this stage or a deeper one, 0 where one
        never was."""
        oldest, at = 2**63, start
        for part in (part for part in self.parts if part.stage >= stage):
            if part.start <= at and (not part.end or part.end > at):
                oldest, at = min(oldest, part.time), part.end
                if not at or (end and at >= end):
                    return oldest
        return 0


def load(shard: Path, now: int) -> tuple[Checkpoint, str]:
    """The shard's checkpoint, and why it is not used, empty where it is or there is none. now: seconds since 1970."""
    try:
        data = _read(shard / NAME)
    except FileNotFoundError:
        return Checkpoint(), ""
    except OSError as error:
        return Checkpoint(), f"the checkpoint {NAME} was not used: {error.strerror or error}"
    try:
        return _parse(data, now), ""
    except (ValueError, TypeError, KeyError, LookupError, RecursionError):
        return Checkpoint(), f"the checkpoint {NAME} was not used: it is none, or damaged"


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is no plain file")
        data = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES:
        raise OSError("it is too large")
    return data


def _parse(data: bytes, now: int) -> Checkpoint:
    said = json.loads(data)
    if said["schema"] != SCHEMA or len(said["parts"]) > MAX_PARTS:
        raise ValueError("another schema, or too many parts")
    parts = tuple(sorted(_part(row, now) for row in said["parts"]))
    if any(not one.end or one.end > two.start for one, two in pairwise(parts)):
        raise ValueError("parts overlap")
    stage = STAGES.index(said["stage"])
    return Checkpoint(parts, _time(said["begun"], now), stage, _key(said["prefix"]))


def _part(row: Any, now: int) -> Part:
    start, end, time, stage = row
    part = Part(_key(start), _key(end), _time(time, now), STAGES.index(stage))
    if part.end and part.end <= part.start:
        raise ValueError("a part ends before it begins")
    return part


def _time(value: Any, now: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= now:
        raise ValueError("no time")
    return value


def _key(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > MAX_KEY_DIGITS:
        raise ValueError("no key")
    return bytes.fromhex(text)


def save(shard: Path, checkpoint: Checkpoint) -> str:
    """Write the checkpoint; why it could not be written, empty where it was."""
    parts = [[part.start.hex(), part.end.hex(), part.time, STAGES[part.stage]] for part in checkpoint.parts]
    said = {"schema": SCHEMA, "stage": STAGES[checkpoint.stage], "begun": checkpoint.begun}
    text = json.dumps(said | {"prefix": checkpoint.prefix.hex(), "parts": parts}).encode()
    try:
        _write(shard, text)
    except OSError as error:
        return f"the checkpoint {NAME} could not be written: {error.strerror or error}"
    return ""


def _write(shard: Path, text: bytes) -> None:
    new = shard / NEW
    with suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, shard / NAME)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
    sync_folder(shard)


def added(parts: Iterable[Part], done: Iterable[Part]) -> tuple[Part, ...]:
    """Parts with what was done since in the place of what was there; the oldest go where there are too many."""
    fresh = _joined(done)
    kept = [piece for part in parts for piece in _outside(part, fresh)]
    every = sorted(_joined([*kept, *fresh]), key=lambda part: part.time, reverse=True)[:MAX_PARTS]
    return tuple(sorted(every))


def _joined(parts: Iterable[Part]) -> list[Part]:
    """The same with neighbours that were checked at one time as one."""
    joined: list[Part] = []
    for part in sorted(parts):
        last = joined[-1] if joined else None
        if last and last.end == part.start and last[2:] == part[2:] and last.end:
            joined[-1] = last._replace(end=part.end)
        else:
            joined.append(part)
    return joined


def _outside(part: Part, cuts: Sequence[Part]) -> list[Part]:
    """The pieces of a part that lie in none of the cuts, which are in order."""
    pieces, start = [], part.start
    for cut in cuts:
        if part.end and cut.start >= part.end:
            break
        if cut.end and cut.end <= start:
            continue
        if cut.start > start:
            pieces.append(part._replace(start=start, end=cut.start))
        if not cut.end or (part.end and cut.end >= part.end):
            return pieces
        start = cut.end
    return [*pieces, part._replace(start=start)]
