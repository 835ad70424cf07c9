"""An engine whose store's files are another process's: what is done to that process, and what must be true of the store
afterwards. Lives in a servant (servant.py), which keeps stores open over several faults."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import kvstore.link
import kvstore.watching
from kvstore.link import START, Link
from tests.campaign.framework import Context, Kind, Outcome
from tests.campaign.iohand import PAUSE_S, PLAIN, Bystander, Hand, Setting
from tests.campaign.servant import Crew, Died, Raised
from tests.campaign.worlds import HUGE, LARGE, SMALL, audit, audit_file

T = TypeVar("T")
SHARD = "tp0of1-pp0of1"
START_PLAIN = START.replace("from", "import kvstore.hostpath as h; h.compiled_loops = lambda: None; from", 1)
"""Starts an I/O process that does all with numpy."""
HANDS = 2
REFUSALS = {"io_process", "backpressure", "not_admitted", "store_full", "reader_holds_space"}
"""Why a put may fail while the files are whole and the process has all that it needs."""
SHORTAGES = REFUSALS | {"io_error", "disk_full"}


@dataclass
class Report:
    """What a fault came to; a servant hands it to its campaign."""

    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    longest: float = 0.0
    """Seconds of the slowest call."""
    noticed: bool = False
    """Whether somebody was told: a counter, a failed put, an exception of kvstore.errors."""
    counts: Counter[str] = field(default_factory=Counter)

    def demand(self, good: object, problem: str) -> None:
        """A promise that holds, or is broken."""
        if not good:
            self.broken.append(problem)

    def outcome(self, number: int) -> Outcome:
        kinds = {Kind.WRONG_SERVED: self.wrong, Kind.CRASHED: self.crashed, Kind.BROKEN: self.broken}
        for kind, problems in kinds.items():
            if problems:
                return Outcome(number, kind, "; ".join([*self.wrong, *self.crashed, *self.broken]))
        return Outcome(number, Kind.DETECTED if self.noticed else Kind.HARMLESS)


def in_servants(context: Context, work: Callable[[int], Report]) -> Iterator[Outcome]:
    """Have servants make the faults, and count what they report."""

    def ended(number: int, how: Died | Raised) -> tuple[int, Report]:
        return number, Report(crashed=[f"the engine: {how}"])

    crew = Crew(lambda number: (number, work(number)), ended)
    for number in context.faults():
        for answered, report in crew.begin(number):
            yield _counted(context, answered, report)
    for answered, report in crew.end():
        yield _counted(context, answered, report)


def _counted(context: Context, number: int, report: Report) -> Outcome:
    context.figures.update(report.counts)
    context.figures["longest_ms"] = max(context.figures["longest_ms"], int(report.longest * 1000))
    return report.outcome(number)


def warm() -> None:
    """Make what servants inherit."""
    for world in (SMALL, LARGE, HUGE):
        world.warm()


class Engine:
    """An open store and its hands."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self.setting, self.path = setting, path
        self.store = setting.world.open(path, setting.config, io="process")
        self.hands: list[Hand] = []

    @property
    def folder(self) -> Path:
        return self.path / SHARD

    def reset(
        self,
        report: Report,
        chance: random.Random,
        hands: int = HANDS,
        refusals: set[str] = REFUSALS,
        fill: float = 0.4,
    ) -> None:
        """Begin a fault: a store that holds a share of what the hands may put."""
        self.settle(report)
        self.store.clear()
        rule = self.setting, self.store
        self.hands = [Hand(*rule, n, hands, refusals, random.Random(chance.random())) for n in range(hands)]
        for hand in self.hands:
            for number in hand._own:
                if chance.random() < fill:
                    hand.put(self.setting.world.request(number))

    def begin(self, weights: dict[str, float]) -> None:
        self._bystander = Bystander()
        for hand in self.hands:
            hand.begin(weights)

    def end(self, report: Report) -> bool:
        """Have the hands end; whether all did."""
        ended = [hand.end() for hand in self.hands]
        report.broken += self._bystander.end()
        for hand, good in zip(self.hands, ended, strict=True):
            report.demand(good, f"a call hangs: {hand.doing}: {hand.where()}")
            self._told(hand, report)
        return all(ended)

    def _told(self, hand: Hand, report: Report) -> None:
        report.wrong += hand.wrong
        report.broken += hand.broken
        report.demand(hand.damaged or not hand.rejected, f"rejected in a whole file: {hand.rejected}")
        report.crashed += [hand.error] * bool(hand.error)
        report.counts.update(hand.counts)
        report.noticed |= bool(hand.counts["put_failed"] or hand.counts["raised"] or hand.rejected)
        seconds, op = hand.slowest
        report.demand(seconds <= self.setting.limit_s, f"{op} took {seconds:.1f} seconds")
        report.longest = max(report.longest, seconds)

    def crashes(self) -> int:
        """How many ends of the process were counted."""
        return self.store._front.counters.figures().get("io_crashes", 0)

    def settle(self, report: Report) -> bool:
        """Wait until the process answers."""
        deadline = time.monotonic() + self.setting.limit_s
        while time.monotonic() < deadline:
            if self.store.io_process_id is not None and "records" in self.store.stats():
                return True
            time.sleep(PAUSE_S)
        report.demand(False, f"no process serves the shard after {self.setting.limit_s:.0f} seconds: {list(_log)}")
        return False

    def check(self, report: Report, refusals: set[str] = REFUSALS) -> None:
        """Everything that was acknowledged is served, and puts work. Also where nothing is known of what is there, all
        that is verified is right."""
        world = self.setting.world
        for hand in self.hands:
            hand.counts.clear()
            hand.broken.clear()
            hand.wrong.clear()
            self._check(hand, report)
            stored = self._insist(hand.put, world.request(hand._own[0]))
            report.demand(stored or not self.setting.keeps, "a put fails afterwards")
            report.wrong += hand.wrong
            report.broken += hand.broken
            report.counts["served"] += hand.counts["served"]

    def _insist(self, call: Callable[[range], T], numbers: range) -> T:
        """What a call comes to that storage answered: just started on a busy machine, it may be late."""
        deadline = time.monotonic() + self.setting.limit_s
        while True:
            before, result = self._unanswered(), call(numbers)
            if self._unanswered() == before or time.monotonic() > deadline:
                return result

    def _unanswered(self) -> int:
        figures = self.store._front.counters.figures()
        return sum(figures.get(name, 0) for name in ("get_unavailable", "put_failed_io_process"))

    def _check(self, hand: Hand, report: Report) -> None:
        world = self.setting.world
        for number in hand._own:
            wanted = set(world.request(number)) & hand.must
            if wanted or not self.setting.keeps:
                lost = wanted - self._insist(hand.get, world.request(number))
                report.demand(not lost & hand.must, f"acknowledged and not served: {sorted(lost)}")
        report.counts["acknowledged"] += len(hand.must)

    def audit(self, report: Report) -> None:
        """Close the store, look at its files, and open it again."""
        begin = time.monotonic()
        self.store.close()
        report.demand(time.monotonic() - begin < self.setting.limit_s, "closing took long")
        with self.setting.world.open(self.path, self.setting.config) as store:
            report.broken += audit(store)
        report.broken += audit_file(self.folder)
        report.counts["audits"] += 1
        self.store = self.setting.world.open(self.path, self.setting.config, io="process")
        self.bind()

    @property
    def started(self) -> int:
        """The process that was started last; it may be opening the shard still, or have ended."""
        return _started[self.folder]

    def kill(self) -> bool:
        """End that process; whether there was one."""
        return send_signal(self.started, signal.SIGKILL)

    def bind(self) -> None:
        """Give the hands the store that was opened."""
        for hand in self.hands:
            hand.bind(self.store)


_started: dict[Path, int] = {}
"""By their shard, the I/O process that this process started last."""
_log: deque[str] = deque(maxlen=5)
"""Errors that the store told of last."""
_engines: dict[str, Engine] = {}
_begun: list[int] = []


def begin_servant() -> None:
    """What a servant does once: what its I/O processes die of is nobody's news, and those that live a moment only are
    started again as fast as others."""
    if _begun == [os.getpid()]:
        return
    _begun[:] = [os.getpid()]
    _engines.clear()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    kvstore.watching.STEADY_S = 0.0  # type: ignore[misc]
    kvstore.watching.FIRST_DELAY_S, kvstore.watching.LONGEST_DELAY_S = 0.02, 0.4  # type: ignore[misc]
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: _log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvstore.watching").addHandler(listener)
    start, lock = Link._start, threading.Lock()

    def started(link: Link) -> object:
        with lock:
            plain = f"-{PLAIN}-" in link.opening.folder.parent.name
            kvstore.link.START = START_PLAIN if plain else START  # type: ignore[misc]
            process, control = start(link)
            _started[link.opening.folder] = process.pid
        return process, control

    Link._start = started  # type: ignore[assignment, method-assign]


def engine_of(setting: Setting, root: Path) -> Engine:
    """This servant's store of a setting."""
    begin_servant()
    engine = _engines.get(str(setting))
    if engine is None:
        engine = _engines[str(setting)] = Engine(setting, root / f"{setting}-{os.getpid()}")
    return engine


def forget(engine: Engine) -> None:
    """Use a store no more: a fault left it in a state that others must not begin with."""
    _engines.pop(str(engine.setting), None)


def send_signal(pid: int | None, number: int) -> bool:
    """Send one; whether there was somebody."""
    try:
        os.kill(pid or 2**31 - 1, number)
    except ProcessLookupError:
        return False
    return True
