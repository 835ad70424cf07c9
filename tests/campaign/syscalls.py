"""The story: one system call of the writer fails, once or from then on. The engine goes on, and nothing that was
acknowledged is lost."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstore import KVStore
from kvstore.errors import KVStoreError
from tests.campaign.disk import CALLS
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.servant import Crew, Died, Raised, Servant
from tests.campaign.strace import record, run_injected
from tests.campaign.workload import HASHES, TOKENS, Engine, Found, config, examine, listing, memory_folder, warm_engine
from tests.support import open_store, shard_of

SHARD: Final = "store/tp0of1-pp0of1"
ERRORS: Final = ("error=EIO", "error=ENOSPC")
SHORT: Final = "retval=64"
"""A short write: fewer bytes than any write has. strace does not write them, which a caller must not rely on."""
SHORT_CALLS: Final = ("pwrite64", "pwritev", "writev")
INJECTED: Final = (
    *("openat", "pwrite64", "pwritev", "write", "writev", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("rename", "unlink", "mkdir", "pread64", "flock", "mmap"),
)
REASONS: Final = {"disk_full", "io_error"}


@dataclass(frozen=True)
class Plan:
    """The `nth` call of a name on a path fails. sticky: and all later ones."""

    mode: str
    call: str
    path: str
    nth: int
    fault: str
    sticky: bool

    @property
    def when(self) -> str:
        return f"{self.fault}:when={self.nth}{'+' if self.sticky else ''}"


@dataclass
class Report:
    """What a disturbed writer saw."""

    failed: list[str] = field(default_factory=list)
    """Operations that failed in a way that is documented."""
    problems: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    """Operations that raised what the interface does not promise."""
    required: set[int] = field(default_factory=set)
    """Blocks that the store must still have."""


class Disturbed:
    """A writer that goes on whatever fails."""

    def __init__(self, engine: Engine, root: Path, mode: str) -> None:
        self._engine, self._root, self._mode = engine, root, mode
        self._store: KVStore | None = None
        self.report = Report()

    def run(self) -> Report:
        self._open(60)
        for first in range(0, 40, 8):
            self._put(first)
        self._drop("evict", lambda store: store.evict(2))
        self._put(40)
        self._close()
        self._open(24)
        self._put(48)
        self._drop("clear", lambda store: store.clear())
        self._put(56)
        self._put(64)
        self._close()
        return self.report

    def _guarded(self, what: str, work: Callable[[], Any]) -> Any:
        """Do an operation. KVStoreError is what opening and closing promise, and dropping where writing fails."""
        try:
            return work()
        except KVStoreError as error:
            self.report.failed.append(f"{what}: {type(error).__name__}")
        except Exception as error:
            self.report.failed.append(what)
            self.report.crashes.append(f"{what}: {type(error).__module__}.{type(error).__name__}: {error}")
        return None

    def _open(self, blocks: int) -> None:
        for _ in range(2):
            opened = partial(open_store, self._root / "store", self._engine.cache, config(self._mode, blocks))
            self._store = self._guarded("open", opened)
            if self._store is not None:
                self._look()
                return
            self.report.required = set()

    def _look(self) -> bool:
        """Note what is there; False where that cannot be read."""
        assert self._store is not None
        try:
            self.report.required = set(listing(self._store))
        except lmdb.Error:
            return False
        return True

    def _put(self, first: int) -> None:
        store = self._store
        if store is None:
            return
        before, evicted = self.report.required, _evicted(store)
        blocks = range(first, first + 8)
        put = self._guarded("put", lambda: store.put_blocks(HASHES[first : first + 8], blocks, first))
        if put is None:
            self.report.crashes.append("put raised")
            return
        if put.failed:
            self.report.failed.append(f"put: {sorted(set(put.failed.values()))}")
            if set(put.failed.values()) - REASONS:
                self.report.problems.append(f"put failed for {put.failed}")
        stored = {block for block, new in zip(blocks, put.stored.tolist(), strict=True) if new}
        self._compare(before | stored, _evicted(store) - evicted)

    def _compare(self, expected: set[int], evicted: int) -> None:
        """What is there must be what was there and what was stored, less what was evicted."""
        if not self._look():
            self.report.required = expected
        elif len(gone := expected - self.report.required) != evicted:
            self.report.problems.append(f"{len(gone)} blocks went, {evicted} were evicted")

    def _drop(self, what: str, work: Callable[[KVStore], int]) -> None:
        store = self._store
        if store is not None:
            self._guarded(what, lambda: work(store))
            self._look()

    def _close(self) -> None:
        if self._store is not None:
            self._guarded("close", self._store.close)
        self._store = None


def _evicted(store: KVStore) -> int:
    return shard_of(store).counters.figures().get("evicted", 0)


def disturb(engine: Engine, root: Path, mode: str) -> Report:
    return Disturbed(engine, root, mode).run()


# --- plans ---------------------------------------------------------------------------------------------------------


def plans(context: Context, engine: Engine, memory: Path) -> list[Plan]:
    """Every call that the writer makes, failing in every way, in an order that is shuffled."""
    found = []
    for mode in ("commit", "process"):
        root = memory / f"plain-{mode}"
        root.mkdir()
        for (call, path), count in sorted(_counted(engine, root, mode).items()):
            for fault in (*ERRORS, SHORT) if call in SHORT_CALLS else ERRORS:
                found += [
                    Plan(mode, call, path, n + 1, fault, sticky) for n in range(count) for sticky in (False, True)
                ]
    context.random(None).shuffle(found)
    return found


def _counted(engine: Engine, root: Path, mode: str) -> Counter[tuple[str, str]]:
    """How often an undisturbed writer makes each call on each path below its folder, in one thread: strace counts the
    calls of each thread by itself."""
    with Servant(partial(disturb, engine)) as servant:
        calls = record(servant, root / "strace", sorted({*CALLS, *INJECTED}), [root, mode])
    found: Counter[tuple[int, str, str]] = Counter()
    for call in calls:
        texts = [text.decode() for text in call.strings] if call.name in ("openat", "rename", "unlink", "mkdir") else []
        for path in (texts or call.paths)[:1]:
            if call.name in INJECTED and path.startswith(f"{root}/"):
                found[call.pid, call.name, path.removeprefix(f"{root}/")] += 1
    most: Counter[tuple[str, str]] = Counter()
    for (_, *key), count in found.items():
        most[key[0], key[1]] = max(most[key[0], key[1]], count)
    return most


# --- the campaign --------------------------------------------------------------------------------------------------


def verdict(plan: Plan, report: Report, found: Found, hits: int) -> tuple[Kind, str]:
    """What became of a fault. found: in the store afterwards, by a process that nothing disturbs."""
    lost = sorted(report.required - set(found.verified))
    if found.wrong:
        return Kind.WRONG_SERVED, f"blocks {found.wrong} are wrong"
    if report.crashes:
        return Kind.CRASHED, "; ".join(report.crashes)
    if lost or found.rejected:
        return Kind.BROKEN, f"acknowledged blocks are lost: {lost}, rejected {found.rejected}"
    if report.problems or found.problems:
        return Kind.BROKEN, f"{report.problems + found.problems}"
    if not plan.sticky and len(report.failed) > max(1, hits):
        return Kind.BROKEN, f"{hits} calls failed, and all of these with them: {report.failed}"
    return (Kind.DETECTED if report.failed else Kind.HARMLESS), ""


@dataclass
class Check:
    """Makes a fault in a process of its own and examines the store afterwards. Used in servants."""

    engine: Engine
    plans: list[Plan]
    memory: Path

    def __call__(self, number: int) -> tuple[Outcome, int]:
        plan, root = self.plans[number % len(self.plans)], self.memory / f"fault-{number}"
        root.mkdir()
        try:
            kind, detail, hits = self._made(plan, root)
        finally:
            shutil.rmtree(root)
        return Outcome(number, kind, f"{plan}: {detail}"), hits

    def _made(self, plan: Plan, root: Path) -> tuple[Kind, str, int]:
        output, path = self.memory / f"{root.name}.strace", root / plan.path
        with Servant(partial(disturb, self.engine)) as servant:
            try:
                report, hits = run_injected(servant, output, plan.call, [path], plan.when, [root, plan.mode])
            except Died as died:
                return Kind.CRASHED, str(died), 1
        assert isinstance(report, Report)
        try:
            versions = {block: [TOKENS] for block in range(len(HASHES))}
            found = examine(self.engine, root / "store", config(plan.mode, eviction="none"), versions, boot=False)
        except KVStoreError as error:
            return Kind.BROKEN, f"it does not open afterwards: {type(error).__name__}: {error}", hits
        return *verdict(plan, report, found, hits), hits


def crashed(number: int, how: Died | Raised) -> tuple[Outcome, int]:
    return Outcome(number, Kind.CRASHED, str(how)), 0


@campaign("syscalls", quick=300, full=10_000)
def syscalls(context: Context) -> Iterator[Outcome]:
    """Any one system call of a writer fails with EIO or ENOSPC or writes too little, once or from then on."""
    engine = warm_engine(context)
    with memory_folder(context) as memory:
        made = plans(context, engine, memory)
        context.count("plans", len(made))
        for outcome, hits in _outcomes(context, Crew(Check(engine, made, memory), crashed), len(made)):
            context.count("calls_failed", hits)
            context.count("faults_without_a_call", not hits)
            yield outcome


def _outcomes(context: Context, crew: Crew, most: int) -> Iterator[tuple[Outcome, int]]:
    """Each plan once, however many faults are asked for."""
    for number in context.faults():
        if number < most:
            yield from crew.begin(number)
    yield from crew.end()
