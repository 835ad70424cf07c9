"""Campaign "damage": data.mdb is damaged while nobody has it open; whatever is served afterwards must be right."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore import KVStore, StoreConfig
from kvstore.errors import KVStoreError
from kvstore.storefile import DATA_NAME
from tests.campaign.children import Ending, Say, in_child
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.worlds import HUGE, LARGE, SMALL, Served, World, small_config
from tests.support import flip

SHARD = "tp0of1-pp0of1"
PAGE = 4096
SECTOR = 512
PATIENCE_S = 20.0
OVERFLOW, PAGE_FLAGS = 0x04, slice(10, 12)
FATAL = ("SIGBUS", "SIGSEGV", "SIGABRT", "SIGFPE")
"""How LMDB itself ends a process whose tree is damaged, since it maps its pages and trusts them (docs/operations.md)."""
KNOWN_SHARE = 0.05
"""Of the faults, what may end so; more means that opening looks at less than it did."""


@dataclass(frozen=True)
class Subject:
    """A store that is damaged again and again, always from the same state."""

    name: str
    world: World
    config: StoreConfig

    def fill(self, path: Path, say: Say) -> None:
        """Records, some of them written twice, some evicted: free pages and old copies are there as well."""
        with self.world.open(path, self.config) as store:
            for request in (*range(self.world.requests), *range(0, self.world.requests, 4)):
                store.touch([self.world.hashes[n] for n in self.world.request(request)])
                self.world.put(store, self.world.request(request))
            say("present", self.world.present(store))


SUBJECTS = (
    Subject("small", SMALL, small_config(SMALL, eviction="lru")),
    Subject("large", LARGE, small_config(LARGE, eviction="hazard")),
    Subject("planes", LARGE, small_config(LARGE, eviction="lru", codec="bf16-planes")),
    Subject("huge", HUGE, small_config(HUGE, eviction="none")),
)


# --- damage ----------------------------------------------------------------------------------------------------------


def tree_pages(data: bytes) -> list[int]:
    """Pages that are no part of a run of overflow pages: meta pages, the tree, and whatever is free."""
    found, page = [], 0
    while page < len(data) // PAGE:
        head = data[page * PAGE : page * PAGE + 16]
        if page > 1 and int.from_bytes(head[PAGE_FLAGS], "little") == OVERFLOW:
            page += max(1, int.from_bytes(head[12:16], "little"))
        else:
            found.append(page)
            page += 1
    return found


def damage(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """The damaged file, and what was done. Half of the faults meet the tree, which has the fewest pages."""
    pages = range(len(data) // PAGE) if chance.random() < 0.5 else tree_pages(data)
    first, second, at = chance.choice(pages), chance.choice(pages), chance.randrange(PAGE)
    what = chance.choice(("bit", "bits", "garbage", "zeros", "exchange", "truncate"))
    place = first * PAGE
    if what == "bit":
        changed = flip(data, (place + at) * 8 + chance.randrange(8))
    elif what == "bits":
        changed = flip(
            flip(data, (place + at) * 8 + chance.randrange(8)), second * PAGE * 8 + chance.randrange(PAGE * 8)
        )
    elif what == "garbage":
        place += chance.randrange(PAGE // SECTOR) * SECTOR
        changed = data[:place] + chance.randbytes(SECTOR) + data[place + SECTOR :]
    elif what == "zeros":
        changed = data[:place] + bytes(PAGE) + data[place + PAGE :]
    elif what == "exchange":
        low, high = sorted((place, second * PAGE))
        changed = data[:low] + data[high : high + PAGE] + data[low + PAGE : high] * (high > low)
        changed += data[low : low + PAGE] * (high > low) + data[high + PAGE :]
    else:
        changed = data[: place + chance.choice((0, at))]
    return changed, f"{what} at page {first}, byte {at}" + f", page {second}" * (what in ("bits", "exchange"))


# --- the engine ------------------------------------------------------------------------------------------------------


class Warnings(logging.Handler):
    """Counts what the log says from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def use(subject: Subject, path: Path, mode: str, say: Say) -> None:
    """An engine that opens the damaged store, loads everything, and as a writer puts everything again."""
    warnings = Warnings()
    logging.getLogger("kvstore").addHandler(warnings)
    say("stage", "open")
    try:
        store = subject.world.open(path, replace(subject.config, quarantine_bytes=2**20), mode=mode)
    except KVStoreError as error:
        say("refused", f"{type(error).__name__}: {error}")
        return
    load(subject, store, say)
    stats = {name: count for name, count in store.stats().items() if finding(name) and count}
    say("found", stats, warnings.count)
    if mode == "rw":
        repair(subject, store, say)
    say("stage", "close")
    store.close()


FINDINGS = ("get_rejected_", "get_transient", "match_failed", "stats_failed", "emptied", "eviction_index_problems")


def finding(counter: str) -> bool:
    """Whether a counter of stats() tells an operator of damage."""
    return counter.startswith(FINDINGS)


def load(subject: Subject, store: KVStore, say: Say) -> None:
    world = subject.world
    say("stage", "match")
    for request in range(world.requests):
        store.match_prefix([world.hashes[n] for n in world.request(request)])
    say("stage", "get")
    tell(world.get_all(store), say)


def tell(served: Served, say: Say) -> None:
    say("served", sorted(served.right), sorted(served.wrong), sorted(served.rejected))


def repair(subject: Subject, store: KVStore, say: Say) -> None:
    """Puts, loads and deletions over the damaged tree. What LMDB refuses, the engine may not be told as an exception
    other than kvstore's own."""
    world = subject.world
    say("stage", "put")
    for request in range(0, world.requests, 2):
        world.put(store, world.request(request))
    say("stage", "get again")
    tell(world.get_all(store), say)
    say("stage", "evict")
    try:
        if subject.config.eviction != "none":
            store.evict(3)
        say("stage", "clear")
        store.clear()
    except KVStoreError as error:
        say("refused", f"{type(error).__name__}: {error}")


# --- the campaign ----------------------------------------------------------------------------------------------------


@dataclass
class Original:
    """A subject's undamaged file, and the blocks in it."""

    path: Path
    data: bytes
    present: set[int]

    @classmethod
    def of(cls, subject: Subject, path: Path) -> Original:
        ending = in_child(lambda say: subject.fill(path, say))
        assert not ending.crash, ending.crash
        return cls(path, (path / SHARD / DATA_NAME).read_bytes(), set(ending.all("present")[0][0]))


@campaign("damage", quick=500, full=20_000)
def damaged(context: Context) -> Iterator[Outcome]:
    """data.mdb damaged at rest: bits, garbage, zeros, exchanged pages, truncation; readers and writers."""
    originals: dict[str, Original] = {}
    died = 0
    for number in context.faults():
        chance = context.random(number)
        subject, mode = chance.choice(SUBJECTS), chance.choice(("r", "rw"))
        if subject.name not in originals:
            subject.world.warm()
            originals[subject.name] = Original.of(subject, context.root / subject.name)
        with context.folder(number) as folder:
            outcome = one(context, subject, originals[subject.name], mode, number, folder / "store")
        died += outcome.known
        yield replace(outcome, known=outcome.known and died <= 3 + KNOWN_SHARE * len(context.numbers))


def one(context: Context, subject: Subject, original: Original, mode: str, number: int, path: Path) -> Outcome:
    changed, what = damage(original.data, context.random(number + 2**32))
    shutil.copytree(original.path, path, ignore=shutil.ignore_patterns(DATA_NAME))
    (path / SHARD / DATA_NAME).write_bytes(changed)
    ending = in_child(lambda say: use(subject, path, mode, say), PATIENCE_S)
    stage = ([""] + [values[0] for values in ending.all("stage")])[-1]
    where = f"{subject.name}, mode {mode}, {what}, in {stage!r}"
    kind, detail = judge(context, ending, original, where)
    return Outcome(number, kind, detail, known=kind == Kind.CRASHED and mode == "r" and died_in_lmdb(ending))


def judge(context: Context, ending: Ending, original: Original, where: str) -> tuple[Kind, str]:
    loads = ending.all("served")
    wrong = sorted({n for _, found, _ in loads for n in found})
    context.count("served", sum(len(right) for right, _, _ in loads))
    if wrong:
        return Kind.WRONG_SERVED, f"{where}: blocks {wrong}"
    if ending.crash:
        return crashed(context, ending, where)
    if not loads:
        return Kind.DETECTED, f"{where}: {ending.all('refused')}"
    counters, warnings = ending.all("found")[0]
    lost = original.present - set(loads[0][0])
    context.count("blocks_lost", len(lost))
    if counters or warnings:
        return Kind.DETECTED, f"{where}: {counters}"
    return (Kind.MISSED_SILENTLY, f"{where}: {len(lost)} blocks") if lost else (Kind.HARMLESS, "")


def died_in_lmdb(ending: Ending) -> bool:
    return ending.crash.splitlines()[0] in FATAL


def crashed(context: Context, ending: Ending, where: str) -> tuple[Kind, str]:
    context.count(ending.crash.splitlines()[0].lower() if died_in_lmdb(ending) else "exception")
    return Kind.CRASHED, f"{where}: {ending.crash}"
