"""The story: the disk is full. Puts fail and say so, everything that is stored stays and is right, and once there is room
again puts work again. A file that may grow no more (RLIMIT_FSIZE), and a file system of a few MiB (tmpfs)."""

from __future__ import annotations

import ctypes
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from kvstore import KVStore, StoreConfig
from kvstore.errors import KVStoreError, StorePathError
from kvstore.storefile import DATA_NAME
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.servant import Died, Raised, Servant
from tests.campaign.workload import BLOCKS, HASHES, TOKENS, Engine, config, examine, listing, memory_folder, warm_engine
from tests.support import MIB, open_store

REASONS: Final = {"disk_full", "io_error"}
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
FULL_EVICTIONS: Final = 3
MOST_LEFT: Final = 200_000


# --- disks that are full at will -----------------------------------------------------------------------------------


class Limit:
    """No file of this process may grow past the size that the store's has, and a little more."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def fill(self, left: int) -> None:
        data = next(self.root.glob(f"store/*/{DATA_NAME}"))
        self._set(data.stat().st_size + left)

    def empty(self) -> None:
        self._set(resource.RLIM_INFINITY)

    def _set(self, nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Small:
    """A file system of its own, which a file of ballast fills."""

    def __init__(self, root: Path) -> None:
        self.root = root
        mount_small(root)

    def fill(self, left: int) -> None:
        with (self.root / "ballast").open("wb") as ballast, suppress(OSError):
            free = os.statvfs(self.root)
            os.posix_fallocate(ballast.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left))

    def empty(self) -> None:
        (self.root / "ballast").unlink()


def mount_small(path: Path) -> None:
    """Mount a tmpfs, in name spaces of this process alone. Raises OSError where the system does not let it."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(line)
    _check(libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, f"size={8 * MIB}".encode()))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def can_mount(root: Path) -> bool:
    """Whether a process here may mount a file system of its own."""
    root.mkdir()
    with Servant(lambda: mount_small(root)) as servant, suppress(Raised):
        servant.ask()
        return True
    return False


# --- what is done on them ------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What a writer on a full disk saw."""

    figures: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


class Filled:
    """A writer whose disk is full for a while."""

    def __init__(self, engine: Engine, disk: Limit | Small, chance: Random) -> None:
        self._engine, self._disk, self._chance = engine, disk, chance
        self._mode, self._eviction = chance.choice(["commit", "process"]), chance.choice(["lru", "none"])
        self._next = 0
        self.report = Report()

    def run(self) -> Report:
        """From a store with room over a full disk to room again."""
        self._store = self._open(256)
        for _ in range(self._chance.randint(4, 6)):
            self._put()
        self._disk.fill(self._chance.choice([0, 4096, self._chance.randrange(MOST_LEFT)]))
        for _ in range(self._chance.randint(1, 2)):
            self._put(full=True)
        self._evict()
        if self._chance.random() < 0.5:
            self._shrink()
        self._disk.empty()
        self._put()
        self._store.close()
        self._examine()
        return self.report

    def _config(self, blocks: int) -> StoreConfig:
        return config(self._mode, blocks, self._eviction)

    def _open(self, blocks: int) -> KVStore:
        return open_store(self._disk.root / "store", self._engine.cache, self._config(blocks))

    def _put(self, full: bool = False) -> None:
        first = self._next % BLOCKS
        self._next += 8
        before = set(listing(self._store))
        put = self._store.put_blocks(HASHES[first : first + 8], range(first, first + 8), first)
        good = {first + int(i) for i in np.flatnonzero(put.stored | put.present)}
        self._same(before | good, f"a put of blocks {first} to {first + 7}")
        self.report.figures["blocks_failed"] += len(put.failed)
        if put.failed and not (full and set(put.failed.values()) <= REASONS):
            self.report.problems.append(f"a put {'on the full disk' if full else 'with room'} failed for {put.failed}")
        self._verify()

    def _same(self, expected: set[int], what: str) -> None:
        there = set(listing(self._store))
        if there != expected:
            self.report.problems.append(f"{what}: {expected - there} are gone, {there - expected} are there")

    def _verify(self) -> None:
        """All that the store has is given back, and right."""
        self._engine.clear()
        there = listing(self._store)
        loader = self._store.attach(self._engine.target)
        got = loader.get_blocks(HASHES, range(BLOCKS))
        verified = {int(i) for i in np.flatnonzero(got.verified)}
        if verified != set(there):
            self.report.problems.append(f"{set(there) - verified} do not verify: {got.rejected}")
        self.report.wrong += self._engine.wrong([(i, TOKENS) for i in verified])

    def _evict(self) -> None:
        """Evict on the full disk, and put into the room: neither needs more of the disk than the file has."""
        if self._eviction == "none":
            return
        for _ in range(FULL_EVICTIONS):
            before = len(listing(self._store))
            worked = self._documented("evict", lambda: self._store.evict(8))
            if worked and before - len(listing(self._store)) != worked:
                self.report.problems.append(f"evict says {worked}, {before - len(listing(self._store))} went")
            self.report.figures["evictions" if worked else "evictions_failed"] += 1
        failed = self.report.figures["blocks_failed"]
        self._put(full=True)
        self.report.figures["puts_into_evicted_room"] += self.report.figures["blocks_failed"] == failed
        self._verify()

    def _documented(self, what: str, work: Callable[[], Any]) -> Any:
        """Do what may fail as documented."""
        try:
            return work()
        except StorePathError:
            return None
        except Exception as error:
            self.report.crashes.append(f"{what}: {type(error).__module__}.{type(error).__name__}: {error}")
        return None

    def _shrink(self) -> None:
        """Open with a capacity that is smaller than the file: it fits, or it is refused and nothing has changed."""
        before = set(listing(self._store))
        self._store.close()
        try:
            self._store = self._open(16)
            self.report.figures["shrunk"] += 1
            self._verify()
            self._store.close()
        except KVStoreError as error:
            self._refused(error, before)
        except Exception as error:
            self.report.crashes.append(f"open: {type(error).__module__}.{type(error).__name__}: {error}")
        self._store = self._open(256)
        self._verify()

    def _refused(self, error: KVStoreError, before: set[int]) -> None:
        figure = "bytes for a copy where" in str(error)
        self.report.figures["shrinking_refused_with_figure" if figure else "shrinking_refused"] += 1
        self._store = self._open(256)
        if figure:
            self._same(before, "a capacity that was refused for want of room")
        leftover = self._store.folder / "data.mdb.compact"
        if leftover.exists():
            self.report.problems.append("the copy of a compaction that was refused is left")
        self._store.close()

    def _examine(self) -> None:
        versions = {i: [TOKENS] for i in range(BLOCKS)}
        found = examine(self._engine, self._disk.root / "store", self._config(256), versions, boot=False)
        self.report.problems += [*found.problems, *(f"block {i} rejected: {why}" for i, why in found.rejected.items())]
        self.report.wrong += found.wrong


def run_filled(engine: Engine, kind: type[Limit | Small], root: Path, chance: Random) -> Report:
    return Filled(engine, kind(root), chance).run()


# --- the campaign --------------------------------------------------------------------------------------------------


def verdict(report: Report) -> tuple[Kind, str]:
    if report.wrong:
        return Kind.WRONG_SERVED, f"blocks {report.wrong} are wrong"
    if report.crashes:
        return Kind.CRASHED, "; ".join(report.crashes)
    if report.problems:
        return Kind.BROKEN, "; ".join(report.problems)
    return (Kind.DETECTED if report.figures["blocks_failed"] else Kind.HARMLESS), ""


@campaign("fulldisk", quick=80, full=4_000)
def fulldisk(context: Context) -> Iterator[Outcome]:
    """The disk is full for a while, by a limit on the file or in a small file system of its own."""
    engine = warm_engine(context)
    kinds: list[type[Limit | Small]] = [Limit]
    if can_mount(context.root / "mount"):
        kinds.append(Small)
    else:
        context.count("file_systems_refused_by_the_system")
    with memory_folder(context) as memory:
        for number in context.faults():
            kind, root = kinds[number % len(kinds)], memory / f"disk-{number}"
            root.mkdir()
            context.count("limits" if kind is Limit else "file_systems")
            yield _outcome(context, number, partial(run_filled, engine, kind, root))


def _outcome(context: Context, number: int, work: Callable[[Random], Report]) -> Outcome:
    with Servant(work) as servant:
        try:
            report: Report = servant.ask(context.random(number))
        except Died as died:
            return Outcome(number, Kind.CRASHED, str(died))
        except Raised as raised:
            return Outcome(number, Kind.CRASHED, str(raised))
    for name, amount in sorted(report.figures.items()):
        context.count(name, amount)
    return Outcome(number, *verdict(report))
