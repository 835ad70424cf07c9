"""Campaign "io-kill": the I/O process is killed at a random moment of whatever it does, and the engine goes on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kvstore.errors import StoreUnavailable
from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.ioengine import HANDS, Engine, Report, engine_of, forget, in_servants, send_signal, warm
from tests.campaign.iohand import PAUSE_S, Setting

TIMEOUT_S = 2.0
SIGNALS = [signal.SIGKILL] * 20 + [signal.SIGBUS, signal.SIGSEGV] * 3 + [signal.SIGTERM]
"""The last is the engine's alone: its process takes no notice."""
OPENING_S = 0.35
"""About how long an opening takes."""
SCENES: dict[str, tuple[dict[str, float], tuple[str, ...], int]] = {
    "put": ({"put": 1}, ("none",), HANDS),
    "get": ({"get": 4, "put": 1}, ("none",), HANDS),
    "lookup": ({"match": 3, "touch": 2, "put": 1, "stats": 1}, ("none", "hazard"), HANDS),
    "evicting": ({"put": 4, "touch": 2, "get": 1}, ("hazard", "lru"), HANDS),
    "evict": ({"evict": 2, "put": 1}, ("hazard", "lru"), HANDS),
    "clear": ({"clear": 1, "put": 4, "get": 1}, ("none", "hazard"), 1),
    "mixed": ({"put": 4, "get": 4, "match": 2, "touch": 2, "stats": 1}, ("none",), HANDS),
    "restart": ({"put": 2, "get": 2, "match": 1}, ("none",), HANDS),
    "open": ({}, ("none",), HANDS),
}
"""What hands do, under which policies, and how many they are."""


@campaign("io-kill", quick=200, full=5000, alone=True)
def io_kill(context: Context) -> Iterator[Outcome]:
    """The I/O process is killed in put, get, look-ups, eviction, clear, opening and its restart: calls miss, and go on."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root))


def one(chance: Random, root: Path) -> Report:
    """One fault."""
    report, scene = Report(), chance.choice(list(SCENES))
    weights, policies, hands = SCENES[scene]
    setting = Setting.of(chance, TIMEOUT_S, policies)
    engine = engine_of(setting, root)
    engine.reset(report, chance, hands)
    if scene == "open":
        kill_in_opening(engine, report, chance)
    else:
        kill_at_work(engine, report, chance, weights, again=scene == "restart")
    if engine.settle(report):
        engine.check(report)
        if chance.random() < 0.1:
            engine.audit(report)
    report.counts[f"in_{scene}"] += 1
    if report.broken or report.crashed:
        report.broken.append(f"({scene}, {setting})")
        forget(engine)
    return report


def kill_at_work(engine: Engine, report: Report, chance: Random, weights: dict[str, float], again: bool) -> None:
    """Kill the process while hands use the store, and while it is started again where that is asked for."""
    before, pid, number = engine.crashes(), engine.store.io_process_id, chance.choice(SIGNALS)
    engine.begin(weights)
    time.sleep(chance.uniform(0, 0.04))
    send_signal(pid, number)
    if number == signal.SIGTERM:
        time.sleep(0.02)
    else:
        kills = 1 + (kill_the_next(engine, chance, pid or 0) if again else 0)
        wait_for_another(engine, report, pid)
        report.counts["kills"] += kills
    engine.end(report)
    counted = engine.crashes() - before
    report.noticed |= counted > 0
    report.demand((counted >= 1) == (number != signal.SIGTERM), f"signal {number}, and {counted} crashes counted")


def kill_the_next(engine: Engine, chance: Random, pid: int) -> int:
    """Kill the process that is started in another's place, while it opens the shard or right after; how many."""
    deadline = time.monotonic() + TIMEOUT_S
    while engine.started == pid and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    time.sleep(chance.uniform(0, OPENING_S))
    return int(engine.started != pid and engine.kill())


def wait_for_another(engine: Engine, report: Report, pid: int | None) -> None:
    """Wait until a process serves that is not this one."""
    deadline = time.monotonic() + engine.setting.limit_s
    while engine.store.io_process_id in (None, pid) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    report.demand(engine.store.io_process_id not in (None, pid), "the process was not started again")


def kill_in_opening(engine: Engine, report: Report, chance: Random) -> None:
    """Close the store, and kill the process of the next opening: it opens, or says that it cannot be asked."""
    engine.store.close()
    last, failed = engine.started, list[Exception]()

    def opening() -> None:
        try:
            engine.store = engine.setting.world.open(engine.path, engine.setting.config, io="process")
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=opening, daemon=True)
    thread.start()
    while engine.started == last and thread.is_alive():
        time.sleep(PAUSE_S / 10)
    time.sleep(chance.uniform(0, OPENING_S))
    engine.kill()
    thread.join(engine.setting.limit_s)
    report.counts["kills"] += 1
    report.demand(not thread.is_alive(), "an opening hangs")
    if failed:
        report.noticed = True
        report.counts["openings_failed"] += 1
        report.crashed += [f"{e!r}" for e in failed if not isinstance(e, StoreUnavailable)]
        engine.store = engine.setting.world.open(engine.path, engine.setting.config, io="process")
    engine.bind()
