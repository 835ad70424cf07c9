"""Campaign "io-crowd": three engines on one shard, a writer and two readers, with many threads each and overlapping keys."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvstore import KVStore, StoreConfig
from tests.campaign.children import Child, Ending, Say
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.ioengine import SHARD
from tests.campaign.threads import FALSE_ALARMS, THREADS, Hand, failures
from tests.campaign.worlds import LARGE, SMALL, World, audit, audit_file, small_config

ROUND_S = 15.0
FULL_ROUND_S = 60.0
OPENING_S = 2.0
PATIENCE_S = 60.0
READERS = (("process", 4), ("inline", 4))
"""How readers have the shard open, and their threads."""
ASKS: dict[str, float] = {"get": 8, "touch": 1, "match": 3, "submit": 2}
UNAVAILABLE = ("get_unavailable", "match_unavailable", "touch_unavailable", "put_failed_io_process", "io_crashes")
"""Counters of an I/O process that cannot be asked, where nothing was done to it."""


class Listener(logging.Handler):
    """What a store says of an I/O process that did not do what it should."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        for name in ("kvstore.saving", "kvstore.loading", "kvstore.store", "kvstore.watching", "kvstore.serving"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if "I/O process" in text or "io_process" in text or record.name == "kvstore.serving":
            self.said.append(text[-1500:])


def play(hands: list[Hand], until: float, say: Say) -> None:
    """Use a store until then, and tell what was seen."""
    listener = Listener()
    threads = [threading.Thread(target=hand.work, args=(until,)) for hand in hands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("wrong", sorted({n for hand in hands for n in hand.wrong}))
    say("errors", [hand.error for hand in hands if hand.error])
    stats = hands[0].store.stats()
    say("broken", listener.said[:3])
    say("broken", [f"{k}={v}" for k, v in stats.items() if k.startswith((*FALSE_ALARMS, *UNAVAILABLE)) and v])
    say("counts", sum((hand.counts for hand in hands), Counter(stored=stats["put_stored"])), failures(stats))


def write(world: World, config: StoreConfig, path: Path, seed: int, until: float, say: Say) -> None:
    """The writer's life."""
    with world.open(path, config, io="process") as store:
        say("open")
        play([Hand(world, store, random.Random(f"{seed}/{n}")) for n in range(THREADS)], until, say)
    with world.open(path, config) as store:
        say("broken", audit(store))
    say("broken", audit_file(path / SHARD))


def read(world: World, store: KVStore, threads: int, seed: int, until: float, say: Say) -> None:
    """A reader's life."""
    with store:
        play([Hand(world, store, random.Random(f"{seed}/{n}"), ops=ASKS) for n in range(threads)], until, say)


@campaign("io-crowd", quick=1, full=5, alone=True)
def io_crowd(context: Context) -> Iterator[Outcome]:
    """Eight threads of a writer and eight of two other processes that read, at once, 15 seconds a fault (full: a minute)."""
    for world in (SMALL, LARGE):
        world.warm()
    for number in context.faults():
        with context.folder(number) as folder:
            yield one(context, number, folder / "store")


def one(context: Context, number: int, path: Path) -> Outcome:
    chance = context.random(number)
    world, policy = chance.choice((SMALL, LARGE)), chance.choice(("hazard", "lru"))
    config = small_config(world, eviction=policy, durability=chance.choice(("commit", "process")))
    config = replace(config, codec=chance.choice(("raw", "raw", "bf16-planes")), io_timeout_s=PATIENCE_S / 2)
    until = time.monotonic() + OPENING_S + (FULL_ROUND_S if context.full else ROUND_S)
    seed = chance.randrange(2**32)
    children = [Child(lambda say: write(world, config, path, seed, until, say))]
    children[0].listen(PATIENCE_S)
    for n, (io, threads) in enumerate(READERS):
        children.append(Child(reader(world, config, path, io, threads, seed + 1 + n, until)))
    endings = [child.join(until - time.monotonic() + PATIENCE_S) for child in children]
    return judge(context, number, f"{world.name}, {policy}, {config.durability}, {config.codec}", endings)


def reader(
    world: World, config: StoreConfig, path: Path, io: str, threads: int, seed: int, until: float
) -> Callable[[Say], object]:
    """What a reader's process does."""
    return lambda say: read(world, world.open(path, config, io=io, mode="r"), threads, seed, until, say)


def judge(context: Context, number: int, where: str, endings: list[Ending]) -> Outcome:
    said = {w: [v for e in endings for values in e.all(w) for v in values[0]] for w in ("wrong", "errors", "broken")}
    crashes = [ending.crash for ending in endings if ending.crash] + said["errors"]
    for ending in endings:
        for figures in (found for values in ending.all("counts") for found in values):
            context.figures.update(figures)
    if said["wrong"]:
        return Outcome(number, Kind.WRONG_SERVED, f"{where}: blocks {said['wrong']}")
    if crashes:
        return Outcome(number, Kind.CRASHED, f"{where}: {crashes[0]}")
    return (
        Outcome(number, Kind.BROKEN, f"{where}: {said['broken']}") if said["broken"] else Outcome(number, Kind.HARMLESS)
    )
