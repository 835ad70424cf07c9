"""The story: the machine goes down while a store is written. Of what was not synced any part may be on the disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.storefile import release
from tests.campaign.disk import CALLS, Disk, Event, Reader, write_files
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.servant import Crew, Died, Raised, Servant
from tests.campaign.strace import record
from tests.campaign.workload import TOKENS, Engine, Found, Writer, config, examine, memory_folder, warm_engine
from tests.support import shard_of

MODES: Final = ("commit", "process", "switch")
STATES_OF_A_TRACE: Final = 3000


# --- what the writer does ------------------------------------------------------------------------------------------


def write(engine: Engine, root: Path, mode: str, chance: Random) -> None:
    """A writer's life: many puts, evictions, rewritten blocks, a smaller capacity, everything dropped, and a close after
    most of it."""
    writer = Writer(engine, root)
    first, second = ("commit", "process") if mode == "switch" else (mode, mode)
    writer.open(first, 60)
    starts = list(range(0, 72, 8))
    chance.shuffle(starts)
    for start in starts[: chance.randint(7, 9)]:
        writer.put(start)
    writer.evict(chance.randint(1, 5))
    writer.put(chance.choice(starts) + 3, 1, None)
    _rewrite(writer, chance)
    writer.close()
    writer.open(second, 60)
    writer.put(72)
    if mode != "switch":
        writer.close()
    else:
        _die_open(writer)
    writer.open(first, 24 if mode != "switch" else 60)
    for start in starts[:3]:
        writer.put(start)
    writer.clear()
    writer.put(starts[0])
    writer.close()


def _rewrite(writer: Writer, chance: Random) -> None:
    """Put a block that is there with another number of valid tokens, which replaces it."""
    index = chance.choice(sorted(writer.present))
    writer.put(index, 1, index * TOKENS + chance.randint(1, TOKENS - 1))


def _die_open(writer: Writer) -> None:
    """End like a process that is killed: nothing is synced, nothing marked, and the lock goes."""
    store, writer.store = writer.store, None
    assert store is not None
    db = shard_of(store).db
    db._env.close()
    db.store_file.close()
    db._closing = db._closed = True
    release(db._opened_as)


# --- the trace -----------------------------------------------------------------------------------------------------


@dataclass
class Promise:
    """What a store must have after a power loss at one point of a trace.

    sure: valid tokens of the blocks that it had when the last operation ended; then: when the one in flight ends,
    or the same. safe: whether that may not be lost.
    """

    sure: dict[int, int]
    then: dict[int, int]
    safe: bool
    what: str

    @property
    def versions(self) -> dict[int, list[int]]:
        return {i: sorted({p[i] for p in (self.sure, self.then) if i in p}) for i in self.sure | self.then}


@dataclass
class Trace:
    """What a writer did, as events, and what it said about it."""

    mode: str
    events: list[Event]

    def __post_init__(self) -> None:
        self._said = [(i, json.loads(line)) for i, e in enumerate(self.events) if e.kind == "said" for line in [e.data]]
        self.points = [i for i, e in enumerate(self.events) if e.kind != "said"] + [len(self.events)]

    def promise(self, point: int) -> Promise:
        """The promise before event `point`."""
        before = [said for i, said in self._said if i < point]
        ended = [said for said in before if not said["begins"]]
        last = ended[-1] if ended else {"present": {}, "safe": True, "what": "nothing"}
        flying = bool(before) and before[-1]["begins"]
        following = next((said for i, said in self._said if i >= point and not said["begins"]), last)
        then = following if flying else last
        safe = last["safe"] and then["safe"]
        return Promise(_blocks(last), _blocks(then), safe, f"in {then['what']}" if flying else f"after {last['what']}")

    def crash(self, point: int, chance: Random) -> dict[str, bytes | None]:
        """The files after a power loss before event `point`, or in the middle of it."""
        disk = Disk()
        for event in self.events[:point]:
            disk.apply(event)
        for torn in self.events[point : point + 1]:
            if torn.kind not in ("said", "sync") and chance.random() < 0.5:
                disk.apply(replace(torn, durable=False))
        return disk.crash(chance)


def _blocks(said: dict[str, Any]) -> dict[int, int]:
    return {int(index): tokens for index, tokens in said["present"].items()}


def traced(engine: Engine, root: Path, mode: str, work: Callable[[], None]) -> Trace:
    """Run a writer under strace. Its folder is `root`, which must be empty."""
    with Servant(work) as servant:
        calls = record(servant, root.parent / f"{root.name}.strace", CALLS, [])
    return Trace(mode, list(Reader(root).events(calls)))


# --- the campaign --------------------------------------------------------------------------------------------------


def verdict(found: Found, promise: Promise) -> tuple[Kind, str]:
    """What became of a crash state whose store opened."""
    kept = {i: v for i, v in found.verified.items() if v in promise.versions.get(i, [])}
    lost = sorted(set(promise.sure) & set(promise.then) - set(kept))
    if found.wrong:
        return Kind.WRONG_SERVED, f"blocks {found.wrong} are wrong"
    if found.emptied and (promise.safe and promise.sure and promise.then):
        return Kind.BROKEN, f"emptied, and {len(promise.sure)} blocks were acknowledged"
    if not found.emptied and lost:
        return Kind.BROKEN, f"acknowledged blocks are lost: {lost}, rejected {found.rejected}"
    if stray := sorted(set(found.verified) - set(promise.sure) - set(promise.then)):
        return Kind.BROKEN, f"blocks that were dropped before are there: {stray}"
    if found.problems or found.rejected:
        return Kind.BROKEN, f"{found.problems}, rejected {found.rejected}"
    return (Kind.DETECTED, "") if found.emptied else (Kind.HARMLESS, "")


class Traces:
    """The traces of every mode, each recorded when a fault first needs it: which one that is follows from its number."""

    def __init__(self, context: Context, engine: Engine) -> None:
        self._context, self._engine = context, engine
        self._made: dict[tuple[str, int], Trace] = {}

    def has(self, number: int) -> bool:
        """Whether a fault's trace was recorded."""
        return _trace_of(number) in self._made

    def of(self, number: int) -> Trace:
        """A fault's trace."""
        key = _trace_of(number)
        if key not in self._made:
            self._made[key] = self._record(*key)
        return self._made[key]

    def _record(self, mode: str, serial: int) -> Trace:
        root = self._context.root / f"trace-{mode}-{serial}"
        root.mkdir()
        chance = Random(f"powerloss/{self._context.seed}/{mode}/{serial}")
        made = traced(self._engine, root, mode, partial(write, self._engine, root, mode, chance))
        shutil.rmtree(root)
        self._context.count("traces")
        self._context.count("points", len(made.points))
        return made


def _trace_of(number: int) -> tuple[str, int]:
    return MODES[number % len(MODES)], number // STATES_OF_A_TRACE


@dataclass
class Check:
    """Makes crash states and examines them. Used in servants, which are forked from a process that has the traces."""

    context: Context
    engine: Engine
    traces: Traces
    memory: Path

    def __call__(self, number: int) -> tuple[Outcome, int]:
        chance, path, trace = self.context.random(number), self.memory / f"state-{number}", self.traces.of(number)
        point = trace.points[int(chance.random() * len(trace.points))]
        promise = trace.promise(point)
        path.mkdir()
        write_files(path, trace.crash(point, chance))
        durability = trace.mode if trace.mode != "switch" else chance.choice(["commit", "process"])
        try:
            found = examine(
                self.engine, path / "store", config(durability, eviction="none"), promise.versions, boot=True
            )
            kind, detail = verdict(found, promise)
        except KVStoreError as error:
            kind, detail = Kind.BROKEN, f"it does not open: {type(error).__name__}: {error}"
        shutil.rmtree(path)
        blocks = len(promise.sure) if promise.safe else 0
        return Outcome(number, kind, f"{trace.mode}, event {point}, {promise.what}: {detail}"), blocks


def crashed(number: int, how: Died | Raised) -> tuple[Outcome, int]:
    return Outcome(number, Kind.CRASHED, str(how)), 0


@campaign("powerloss", quick=500, full=50_000)
def powerloss(context: Context) -> Iterator[Outcome]:
    """The power goes at any point of a recorded trace of a writer; of what was not synced, any sectors are on the disk."""
    engine = warm_engine(context)
    with memory_folder(context) as memory:
        for outcome, blocks in _outcomes(context, engine, memory):
            context.count("promised_blocks", blocks)
            yield outcome


def _outcomes(context: Context, engine: Engine, memory: Path) -> Iterator[tuple[Outcome, int]]:
    traces = Traces(context, engine)
    crew = Crew(Check(context, engine, traces, memory), crashed)
    for number in context.faults():
        if not traces.has(number):
            yield from crew.end()
            traces.of(number)
        context.count(_trace_of(number)[0])
        yield from crew.begin(number)
    yield from crew.end()
