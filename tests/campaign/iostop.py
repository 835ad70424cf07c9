"""Campaign "io-stop": the I/O process is stopped past every deadline, and sometimes goes on later, with answers that nobody
waits for any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.ioengine import Engine, Report, engine_of, forget, in_servants, send_signal, warm
from tests.campaign.iohand import Setting
from tests.campaign.leases import Leases

TIMEOUTS_S = (0.3, 0.5)
HANDS = 3
SCENES: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "put": ({"put": 1}, ("none",)),
    "get": ({"get": 4, "put": 1}, ("none",)),
    "lookup": ({"match": 3, "touch": 2, "put": 1, "stats": 1}, ("none", "hazard")),
    "evicting": ({"put": 4, "touch": 2, "get": 2, "evict": 1}, ("hazard", "lru")),
    "mixed": ({"put": 4, "get": 4, "match": 2, "touch": 2, "stats": 1}, ("none",)),
}
_leases: dict[int, Leases] = {}
"""Of this process alone."""


def leases() -> Leases:
    """This servant's books, which begin with its first fault."""
    if os.getpid() not in _leases:
        _leases.clear()
        _leases[os.getpid()] = made = Leases()
        made.watch()
    return _leases[os.getpid()]


@campaign("io-stop", quick=30, full=500, alone=True)
def io_stop(context: Context) -> Iterator[Outcome]:
    """The I/O process is stopped past every deadline, and sometimes continued: no late answer counts, no buffer is shared."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root))


def one(chance: Random, root: Path) -> Report:
    """One fault."""
    report, scene, books = Report(), chance.choice(list(SCENES)), leases()
    weights, policies = SCENES[scene]
    setting = Setting.of(chance, chance.choice(TIMEOUTS_S), policies)
    engine, lent = engine_of(setting, root), books.lent
    engine.reset(report, chance, HANDS)
    stop(engine, report, chance, weights)
    if engine.settle(report):
        engine.check(report)
    report.broken += books.odd
    books.odd.clear()
    report.counts["buffers_lent"] += books.lent - lent
    report.counts[f"in_{scene}"] += 1
    if report.broken or report.crashed:
        report.broken.append(f"({scene}, {setting})")
        forget(engine)
    return report


def stop(engine: Engine, report: Report, chance: Random, weights: dict[str, float]) -> None:
    """Stop the process at a random moment, let hands go on, and continue it where that is asked for: before calls give
    up, after that, or when it may be about to be killed."""
    timeout_s, pid, before = engine.setting.timeout_s, engine.store.io_process_id, engine.crashes()
    waits = chance.choice([None, None, chance.uniform(0, 1), chance.uniform(1, 2), chance.uniform(1, 2.5)])
    engine.begin(weights)
    time.sleep(chance.uniform(0, 0.04))
    send_signal(pid, signal.SIGSTOP)
    time.sleep(timeout_s * (2 if waits is None else waits))
    if waits is not None:
        report.counts["continued"] += send_signal(pid, signal.SIGCONT)
        time.sleep(chance.uniform(0.05, 0.3))
    else:
        wait_for_the_end(engine, report, pid)
    engine.end(report)
    report.counts["given_up"] += engine.crashes() - before
    report.noticed |= engine.crashes() > before


def wait_for_the_end(engine: Engine, report: Report, pid: int | None) -> None:
    """A process that stays stopped is ended, and another one serves."""
    deadline = time.monotonic() + engine.setting.limit_s
    while engine.store.io_process_id in (None, pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    report.demand(engine.store.io_process_id not in (None, pid), "a stopped process is not replaced")
