"""A repair: what is to be done about findings, and doing it. A checksum is never recomputed to make a record pass.

Killed at any moment it leaves the old database or the new one, with every undamaged record; repairing again ends it.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import lmdb

from kvstore.errors import StoreDamaged, StorePathError
from kvstore.fsck.alone import alone, locked_errors, lost_writes
from kvstore.fsck.findings import NOTHING, QUARANTINE, REBUILD, RECLAIM, RECOUNT, SALVAGE, Finding, count
from kvstore.fsck.inplace import Reclaimed, Repairing
from kvstore.fsck.keeping import DAMAGED, SALVAGE_NAME, Shelf, leftovers, remove, stamp, tidy
from kvstore.fsck.rebuilding import rebuild_store
from kvstore.fsck.salvage import Salvaged, Told, quiet, salvage
from kvstore.storefile import (
    DATA_NAME,
    STORE_NAME,
    StoreFile,
    StoreState,
    boot_id,
    check_data_file,
    parse_store,
    path_errors,
    sync_folder,
)

Checked = Callable[[Path], Iterable[object]]
"""Checks a shard again: what it yields that is a Finding counts."""
TIDY: Final = "tidy"
"""The remedy of an action that no finding asks for: a repair that was killed left something."""
LOCK_NAME: Final = "lock.mdb"
MIN_CAPACITY: Final = 2**20
ROOM_SHARE: Final = 64
"""One page of so many is added where deleting finds no room."""


@dataclass(frozen=True)
class Action:
    """One thing that a repair does. remedy: of findings; what: a sentence; records and nbytes that it concerns."""

    remedy: str
    what: str
    records: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What a repair of a shard does. rebuild: the STORE file; salvage: into a new database; records: what goes to
    quarantine, a finding each; reclaim, recount; actions: the same in words, in order; ignored: findings that it does
    nothing about, by kind: of another version, or not there on a second read; room: bytes that the disk should have free."""

    shard: Path
    rebuild: bool = False
    salvage: bool = False
    records: tuple[Finding, ...] = ()
    reclaim: bool = False
    recount: bool = False
    actions: tuple[Action, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)
    room: int = 0

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to repair."""
        return not self.actions


@dataclass
class Repaired:
    """What a repair did. rebuilt: the STORE file; salvaged: None where the database was repaired in place; kept: the old
    data.mdb's new name; folder: where quarantined records lie, and their stored bytes; sound: planned records that were not
    damaged any more; reclaimed; recounted: whether the accounting was wrong; compacted; left: damage that the check found
    afterwards, None where none was made."""

    plan: Plan
    rebuilt: bool = False
    salvaged: Salvaged | None = None
    kept: Path | None = None
    folder: Path | None = None
    quarantined: int = 0
    quarantined_bytes: int = 0
    sound: int = 0
    reclaimed: Reclaimed = field(default_factory=Reclaimed)
    recounted: bool = False
    compacted: bool = False
    left: list[Finding] | None = None

    def take(self, other: Repaired) -> None:
        """Add what a repair in place did after this one."""
        self.folder = other.folder or self.folder
        self.quarantined += other.quarantined
        self.quarantined_bytes += other.quarantined_bytes
        self.sound += other.sound
        self.reclaimed = Reclaimed(
            self.reclaimed.keys + other.reclaimed.keys,
            self.reclaimed.nbytes + other.reclaimed.nbytes,
            other.reclaimed.kept_for or self.reclaimed.kept_for,
        )
        self.recounted |= other.recounted
        self.compacted |= other.compacted

    @property
    def words(self) -> list[str]:
        """What was done, a sentence each."""
        return [sentence for sentence in _sentences(self) if sentence]


def plan(shard: Path, findings: Iterable[Finding]) -> Plan:
    """What a repair does about the findings of a shard's check. Raises StorePathError where the shard cannot be looked at."""
    by_remedy: dict[str, list[Finding]] = {}
    ignored = Counter[str]()
    for finding in findings:
        if (
            finding.remedy == NOTHING
            or finding.persisted is False
            or (finding.remedy == QUARANTINE and not finding.key)
        ):
            ignored[finding.kind] += 1
        else:
            by_remedy.setdefault(finding.remedy, []).append(finding)
    state = _state(shard)
    broken = SALVAGE in by_remedy or (bool(by_remedy) and lost_writes(state))
    records = {finding.key: finding for finding in reversed(by_remedy.get(QUARANTINE, []))}
    made = Plan(
        shard,
        rebuild=REBUILD in by_remedy,
        salvage=broken,
        records=tuple(reversed(records.values())),
        reclaim=bool(records) or RECLAIM in by_remedy,
        recount=bool(by_remedy),
        ignored=dict(ignored),
    )
    with path_errors(shard, "expected the folder of a shard"):
        size = (shard / DATA_NAME).stat().st_size if broken else 0
        left = sum(1 for _ in leftovers(shard))
    room = size if broken else sum(finding.nbytes for finding in made.records)
    return replace(made, actions=tuple(_actions(made, by_remedy, size, left)), room=room)


def _state(shard: Path) -> StoreState | None:
    try:
        with (shard / STORE_NAME).open("rb") as file:
            return parse_store(file.read(4096), shard / STORE_NAME)
    except (StoreDamaged, OSError):
        return None


def _actions(made: Plan, by_remedy: dict[str, list[Finding]], size: int, left: int) -> Iterable[Action]:
    """The plan in words."""
    if made.rebuild:
        yield Action(
            REBUILD, "write a new STORE file, with a new store id; what is there of the old one is kept beside it"
        )
    if made.salvage:
        what = (
            f"copy every intact record out of {DATA_NAME} ({size:,} bytes) into a new database that takes its place; the old "
            f"one is kept as {DAMAGED}<time>. Then check the new one: damage that the broken trees hid is repaired in place"
        )
        yield Action(SALVAGE, what, nbytes=size)
    if made.records:
        nbytes = sum(finding.nbytes for finding in made.records)
        what = f"move damaged records to the folder quarantine-<time>, and delete them: {count(len(made.records), 'record')}"
        yield Action(QUARANTINE, f"{what}, {nbytes:,} bytes", len(made.records), nbytes)
    if orphans := by_remedy.get(RECLAIM):
        nbytes = sum(finding.nbytes for finding in orphans)
        yield Action(RECLAIM, f"reclaim stored bytes that no record names: {nbytes:,} bytes", 0, nbytes)
    if RECOUNT in by_remedy:
        yield Action(RECOUNT, "count records and bytes anew")
    if left:
        yield Action(TIDY, "remove what a repair left that was cut short")


def carry_out(
    shard: Path,
    todo: Plan,
    compact: bool = False,
    progress: Told = quiet,
    check: Checked | None = None,
    uncover: Checked | None = None,
) -> Repaired:
    """Do what is planned, and check again by `check`. Where the trees turn out to be broken everything is salvaged.

    uncover: checks a new database that took the old one's place, None leaves that to `check`: damage that the broken trees
    hid is repaired in place before the last check.

    Raises StoreLocked or StoreBusy where somebody has the shard open, StorePathError where the disk has no room or does not
    write, UnsupportedFormat for a shard of a newer version, StoreDamaged where it is none. What was done until then stays;
    repairing again ends it.
    """
    done = Repaired(todo)
    if todo.nothing and not compact:
        return done
    with _disk_errors(shard):
        _repair(shard, done, compact, progress)
    look, left = uncover or check, None
    if look is not None and done.salvaged is not None:
        found = _damage(shard, look)
        left = None if _uncovered(shard, done, compact, found) else found
    if check is not None:
        done.left = _damage(shard, check) if left is None else left
    return done


@contextmanager
def _disk_errors(shard: Path) -> Iterator[None]:
    with path_errors(shard, "expected a shard, on a file system with room"):
        try:
            yield
        except lmdb.Error as error:
            raise StorePathError(f"{shard}: LMDB cannot write: {error}: look at the disk, and repair again") from error


def _damage(shard: Path, check: Checked) -> list[Finding]:
    return [found for found in check(shard) if isinstance(found, Finding) and found.damage]


def _uncovered(shard: Path, done: Repaired, compact: bool, found: Sequence[Finding]) -> bool:
    """Repair in place what was found in a new database, whether anything was. It is not salvaged again, which would give the
    same."""
    more = plan(shard, found)
    if more.nothing or more.salvage or more.rebuild:
        return False
    second = Repaired(more)
    try:
        with _disk_errors(shard):
            _in_place(shard, second, compact, done.folder)
    except StoreDamaged:
        return False
    done.take(second)
    return True


def _repair(shard: Path, done: Repaired, compact: bool, progress: Told) -> None:
    with locked_errors(shard):
        done.rebuilt = rebuild_store(shard)
    with alone(shard):
        tidy(shard)
    if done.plan.salvage:
        _salvage(shard, done, progress)
    try:
        _in_place(shard, done, compact)
    except StoreDamaged:
        _salvage(shard, done, progress)
        _in_place(shard, done, compact)


# --- in place --------------------------------------------------------------------------------------------------------


def _in_place(shard: Path, done: Repaired, compact: bool, folder: Path | None = None) -> None:
    """With the map as large as it was, so that the file does not grow; where nothing can be deleted in that, a larger one.
    folder: where damaged records go, None for a new one."""
    size = (shard / DATA_NAME).stat().st_size
    room = max(MIN_CAPACITY, size, check_data_file(shard / DATA_NAME))
    shelf = Shelf(shard)
    shelf.folder = folder or shelf.folder
    try:
        _edit(shard, done, compact, room, shelf)
    except lmdb.MapFullError:
        _edit(shard, done, compact, room + room // ROOM_SHARE + MIN_CAPACITY, shelf)


def _edit(shard: Path, done: Repaired, compact: bool, capacity: int, shelf: Shelf) -> None:
    todo, token = done.plan, object()
    with locked_errors(shard):
        db = Repairing(shard, capacity)
    try:
        db.enter(token)
        if todo.records:
            db.take_out(todo.records, shelf)
            done.quarantined, done.quarantined_bytes = shelf.records, shelf.nbytes
            done.sound, done.folder = len(todo.records) - shelf.records, shelf.folder if shelf.records else None
        if todo.reclaim:
            done.reclaimed = db.reclaim()
        done.recounted |= db.recount()
        db.calls.discard(token)
        if compact:
            db.compact()
            done.compacted = True
    finally:
        db.calls.discard(token)
        db.close()


# --- into a new database ---------------------------------------------------------------------------------------------


def _salvage(shard: Path, done: Repaired, progress: Told) -> None:
    with locked_errors(shard), alone(shard) as store_file:
        made = shard / SALVAGE_NAME
        remove(made)
        try:
            done.salvaged = salvage(shard, made, progress)
            done.kept = _swap(shard, made / DATA_NAME, store_file)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _swap(shard: Path, new: Path, store_file: StoreFile) -> Path:
    """Put the new database in the old one's place; the old one's new name. STORE never says `clean` of a file of which writes
    may be lost, nor that writes may be lost of the new one, which is whole on disk."""
    with new.open("rb") as file:
        os.fsync(file.fileno())
    state = store_file.state
    assert state is not None, "an intact STORE file was locked"
    if not state.clean:
        store_file.write(replace(state, clean=False, boot_id=boot_id()))
    data, kept = shard / DATA_NAME, _name(shard)
    os.link(data, kept)
    sync_folder(shard)
    os.replace(new, data)
    (shard / LOCK_NAME).unlink(missing_ok=True)
    sync_folder(shard)
    if not state.clean:
        store_file.write(replace(state, clean=True, boot_id=boot_id()))
    return kept


def _name(shard: Path) -> Path:
    base, number = f"{DAMAGED}{stamp()}", 0
    while (shard / f"{base}{f'-{number}' * bool(number)}").exists():
        number += 1
    return shard / f"{base}{f'-{number}' * bool(number)}"


# --- in words --------------------------------------------------------------------------------------------------------


def _sentences(done: Repaired) -> Sequence[str]:
    salvaged, reclaimed = done.salvaged, done.reclaimed
    return (
        "wrote a new STORE file" * done.rebuilt,
        ""
        if salvaged is None or done.kept is None
        else f"salvaged {count(salvaged.records, 'record')}, {salvaged.nbytes:,} bytes, into a new database; the old one is "
        f"{done.kept.name}: remove it when it is not needed any more",
        ""
        if done.folder is None
        else f"moved {count(done.quarantined, 'damaged record')}, {done.quarantined_bytes:,} bytes, to {done.folder.name}",
        f"left {count(done.sound, 'record')} alone, sound by now or not there any more" if done.sound else "",
        f"reclaimed {reclaimed.nbytes:,} bytes that no record names" if reclaimed.keys else "",
        f"reclaimed nothing: {reclaimed.kept_for}" if reclaimed.kept_for else "",
        "counted records and bytes anew" * done.recounted,
        "returned free space to the file system" * done.compacted,
    )
