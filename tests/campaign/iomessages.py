"""Campaign "io-messages": messages between an engine and its I/O process are cut, spoilt, repeated, renumbered and lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.fuzz import Bench
from tests.campaign.ioengine import HANDS, REFUSALS, Report, engine_of, forget, in_servants, warm
from tests.campaign.iohand import Setting
from tests.campaign.wire import DIRECTIONS, SPOILS, Plan, Wire

TIMEOUT_S = 0.4
REAL = 5
"""Every so manieth fault is made between two processes."""
WEIGHTS: dict[str, float] = {"put": 4, "get": 4, "match": 2, "touch": 1, "stats": 1}
MESSAGES = 40
"""One of so many is spoilt, counted from a random moment."""
WAIT_S = 0.5
_wires: dict[int, Wire] = {}
_benches: dict[int, Bench] = {}
"""Of this process alone, both."""


@campaign("io-messages", quick=300, full=20_000, alone=True)
def io_messages(context: Context) -> Iterator[Outcome]:
    """Messages are cut, flipped, garbled, stalled, lost, replayed, renumbered, both ways; a fifth between processes."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root, number % REAL == 0))


def one(chance: Random, root: Path, real: bool) -> Report:
    """One fault."""
    return between_processes(chance, root) if real else bench(root).one(chance)


def bench(root: Path) -> Bench:
    """This servant's."""
    if os.getpid() not in _benches:
        _benches.clear()
        _benches[os.getpid()] = Bench(root / f"bench-{os.getpid()}")
    return _benches[os.getpid()]


def wire() -> Wire:
    """What leads to this servant's I/O processes."""
    if os.getpid() not in _wires:
        _wires.clear()
        _wires[os.getpid()] = made = Wire()
        made.watch()
    return _wires[os.getpid()]


def between_processes(chance: Random, root: Path) -> Report:
    """Spoil one message while hands use the store."""
    report, line = Report(), wire()
    setting = Setting.of(chance, TIMEOUT_S)
    engine = engine_of(setting, root)
    engine.reset(report, chance, HANDS, REFUSALS)
    name, before = chance.choice(list(SPOILS)), engine.crashes()
    pause = TIMEOUT_S * chance.uniform(0.2, 3)
    plan = Plan(chance.choice(DIRECTIONS), chance.randrange(MESSAGES), name, Random(chance.random()), pause)
    line.arm(plan, engine.folder)
    engine.begin(WEIGHTS)
    report.counts["spoilt"] += plan.done.wait(WAIT_S + pause)
    time.sleep(chance.uniform(0, 0.1))
    line.disarm()
    engine.end(report)
    if engine.settle(report):
        engine.check(report)
    report.noticed |= engine.crashes() > before
    report.counts[name] += 1
    report.counts["restarts"] += engine.crashes() - before
    if report.broken or report.crashed:
        report.broken.append(f"({name}, {plan.direction}, {setting})")
        forget(engine)
    return report
