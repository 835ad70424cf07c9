"""Campaign "io-orphan": the engine is killed, and nothing of it may stay: no I/O process, no memory, no lock."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.campaign.children import PATIENCE_S, Child, Ending, Say, in_child
from tests.campaign.framework import Context, Outcome, campaign
from tests.campaign.ioengine import SHARD, Engine, Report, begin_servant, in_servants, warm
from tests.campaign.iohand import PAUSE_S, Setting

TIMEOUT_S = 5.0
GONE_S = 3.0
"""What everything may take to go."""
OPEN_S = 5.0
"""What the next opening may take on a busy machine."""
OPENING_S = 0.5
WEIGHTS: dict[str, float] = {"put": 4, "get": 4, "match": 2, "touch": 2, "stats": 1}
STAGING = "/memfd:kvstore-staging"
WHEN = ("opening", "work", "work", "stopped")


@campaign("io-orphan", quick=50, full=500, alone=True)
def io_orphan(context: Context) -> Iterator[Outcome]:
    """SIGKILL of the engine, also while its I/O process is stopped: process and memory go, and the shard can be opened."""
    warm()
    yield from in_servants(context, lambda number: one(context.random(number), context.root / f"store-{number}"))


def one(chance: Random, path: Path) -> Report:
    """One fault."""
    report, when = Report(), chance.choice(WHEN)
    setting = Setting.of(chance, TIMEOUT_S)
    seed = chance.randrange(2**32)
    engine = Child(lambda say: play(setting, path, seed, say))
    lines = 0 if when == "opening" else 1
    while len(engine.ending.said) < lines and engine.listen(PATIENCE_S):
        pass
    time.sleep(chance.uniform(0, OPENING_S if when == "opening" else 0.03))
    left, memory = kill(engine, when == "stopped")
    acknowledged = [n for values in engine.ending.all("acknowledged") for n in values[0]]
    report.demand(engine.ending.status == -signal.SIGKILL, f"the engine ended by itself: {engine.ending.crash}")
    await_the_end(report, left, memory)
    after = in_child(lambda say: reopen(setting, path, acknowledged, chance.choice(("inline", "process")), say))
    take(report, after)
    report.counts[f"in_{when}"] += 1
    report.counts["processes"] += len(left)
    report.counts["memories"] += len(memory)
    return report


def play(setting: Setting, path: Path, seed: int, say: Say) -> None:
    """The engine that will be killed."""
    begin_servant()
    engine, report = Engine(setting, path), Report()
    engine.reset(report, random.Random(seed))
    say("acknowledged", sorted(n for hand in engine.hands for n in hand.must))
    engine.begin(WEIGHTS)
    time.sleep(PATIENCE_S)


def kill(engine: Child, stopped: bool) -> tuple[list[int], set[int]]:
    """Kill an engine, whose I/O process stands still where that is asked for; that process, and the inodes of its memory."""
    left = children_of(engine.pid)
    if stopped:
        for pid in left:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
    os.kill(engine.pid, signal.SIGSTOP)
    # Nothing begins any more: what there is now is all that may be left.
    left, memory = children_of(engine.pid), staging_of(engine.pid)
    engine.kill()
    return left, memory


def await_the_end(report: Report, left: list[int], memory: set[int]) -> None:
    """Processes and memory go within a while."""
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline and (alive(left) or holders(memory)):
        time.sleep(5 * PAUSE_S)
    report.demand(not alive(left), f"{len(left)} I/O processes outlive their engine by {GONE_S:.0f} seconds")
    report.demand(not holders(memory), f"staging memory outlives its engine in {holders(memory)}")


def alive(pids: list[int]) -> list[int]:
    """Those that run, with any of their threads: a file is open until the last one has ended, however dead the first is."""
    return [pid for pid in pids if status_of(pid)[:1] not in ([], ["Z"], ["X"]) or len(threads_of(pid)) > 1]


def threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def status_of(pid: int | str) -> list[str]:
    """State and parent of a process; nothing where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []


def children_of(parent: int) -> list[int]:
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and status_of(pid)[1:] == [str(parent)]]


def staging_of(pid: int | str) -> set[int]:
    """The inodes of staging memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if STAGING in line}


def holders(memory: set[int]) -> list[int]:
    """Processes that map some of this memory."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and staging_of(pid) & memory] if memory else []


def reopen(setting: Setting, path: Path, acknowledged: list[int], io: str, say: Say) -> None:
    """The next engine."""
    begin_servant()
    begin, world, report = time.monotonic(), setting.world, Report()
    with world.open(path, setting.config, io=io) as store:
        say("seconds", time.monotonic() - begin)
        found = world.get_all(store)
        report.wrong += [f"wrong bytes in {sorted(found.wrong)}"] * bool(found.wrong)
        lost = set(acknowledged) - found.right
        report.demand(not lost, f"acknowledged and not served: {sorted(lost)}")
        report.demand(not found.rejected, f"rejected in a whole file: {found.rejected}")
        failed = world.put(store, world.request(0)).failed
        report.demand(not failed, f"a put fails afterwards: {failed}")
        say("found", report.wrong, report.broken, len(found.right))
    report.demand((path / SHARD).is_dir(), "the shard is gone")


def take(report: Report, after: Ending) -> None:
    """What the next engine said."""
    report.crashed += [f"the next engine: {after.crash}"] * bool(after.crash)
    for (seconds,) in after.all("seconds"):
        report.longest = max(report.longest, seconds)
        report.demand(seconds < OPEN_S, f"the next opening took {seconds:.1f} seconds")
    for wrong, broken, right in after.all("found"):
        report.wrong += wrong
        report.broken += broken
        report.counts["served"] += right
