"""Campaign "threads": eight threads on overlapping keys of a store that evicts all the time."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from kvstore import KVStore, PagedKVCache, StoreConfig
from tests.campaign.children import Say, in_child
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.worlds import LARGE, SMALL, World, audit, audit_file, small_config
from tests.support import canonical, layer_tensors

THREADS = 8
ROUND_S = 1.0
PATIENCE_S = 60.0
OPS = {"put": 8, "get": 8, "touch": 3, "match": 2, "submit": 2, "evict": 1, "clear": 0.1}
FALSE_ALARMS = ("get_rejected_", "get_transient", "quarantine_failed", "match_failed", "stats_failed")
"""Counters of damage, in a store that nothing damaged."""


@dataclass
class Hand:
    """One thread: a cache of its own for what it loads, and the world's for what it puts."""

    world: World
    store: KVStore
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    error: str = ""
    ops: dict[str, float] = field(default_factory=lambda: OPS)

    def work(self, deadline: float) -> None:
        try:
            self._attach()
            while time.monotonic() < deadline:
                op = self.chance.choices(list(self.ops), list(self.ops.values()))[0]
                getattr(self, op)(self._numbers())
        except BaseException:
            self.error = traceback.format_exc()

    def _attach(self) -> None:
        self.tensors = layer_tensors("BHNC", blocks=self.world.length, seed=13, **self.world.shape)
        self.cache = PagedKVCache.from_tensors(self.tensors, "BHNC")
        self.loader = self.store.attach(self.cache)

    def _numbers(self) -> range:
        """Blocks of one request, of the first ones most of all."""
        request = self.world.request(int(self.world.requests * self.chance.random() ** 2))
        first = self.chance.randrange(len(request)) if self.chance.random() < 0.2 else 0
        return request[first : self.chance.randrange(first, len(request)) + 1]

    def _hashes(self, numbers: range) -> list[bytes]:
        return [self.world.hashes[n] for n in numbers]

    def put(self, numbers: range) -> None:
        self.world.put(self.store, numbers)

    def get(self, numbers: range, submit: bool = False) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).numpy().fill(0xA5)
        asked = self._hashes(numbers), range(len(numbers)), numbers[0] % self.world.length
        got = self.loader.submit_get_blocks(*asked).result() if submit else self.loader.get_blocks(*asked)
        same = (canonical(self.cache, range(len(numbers))) == self.world.truth[numbers[0] : numbers[-1] + 1]).all(
            axis=1
        )
        self.wrong += [numbers[int(i)] for i in np.flatnonzero(got.verified & ~same)]
        self.counts["served"] += int(got.verified.sum())

    def submit(self, numbers: range) -> None:
        self.get(numbers, submit=True)

    def touch(self, numbers: range) -> None:
        self.store.touch(self._hashes(self.world.request(numbers[0] // self.world.length)))

    def match(self, numbers: range) -> None:
        self.store.match_prefix(self._hashes(self.world.request(numbers[0] // self.world.length)))

    def evict(self, numbers: range) -> None:
        self.counts["evicted"] += self.store.evict(len(numbers))

    def clear(self, numbers: range) -> None:
        self.store.clear()


def play(world: World, config: StoreConfig, path: Path, seed: int, say: Say) -> None:
    """One round in one store, and what can be said of it afterwards."""
    with world.open(path, config) as store:
        hands = [Hand(world, store, random.Random(f"{seed}/{n}")) for n in range(THREADS)]
        threads = [threading.Thread(target=hand.work, args=(time.monotonic() + ROUND_S,)) for hand in hands]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say("wrong", sorted({n for hand in hands for n in hand.wrong}))
        say("errors", [hand.error for hand in hands if hand.error])
        stats = store.stats()
        say("broken", [*audit(store), *[f"{k}={v}" for k, v in stats.items() if k.startswith(FALSE_ALARMS)]])
        say("counts", sum((hand.counts for hand in hands), Counter(stored=stats["put_stored"])), failures(stats))
    say("broken", audit_file(path / "tp0of1-pp0of1"))


def failures(stats: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in stats.items() if name.startswith("put_failed_")}


@campaign("threads", quick=10, full=60)
def threads(context: Context) -> Iterator[Outcome]:
    """Eight threads put, get, touch, match, evict and clear overlapping keys for a second a fault."""
    for world in (SMALL, LARGE):
        world.warm()
    for number in context.faults():
        with context.folder(number) as folder:
            yield one(context, number, folder / "store")


def one(context: Context, number: int, path: Path) -> Outcome:
    chance = context.random(number)
    world, policy = chance.choice((SMALL, LARGE)), chance.choice(("hazard", "lru"))
    config = small_config(world, eviction=policy, durability=chance.choice(("commit", "process")))
    config = replace(
        config, codec=chance.choice(("raw", "raw", "bf16-planes")), read_batch_bytes=chance.choice((1, 2**26))
    )
    where = f"{world.name}, {policy}, {config.durability}, {config.codec}"
    ending = in_child(lambda say: play(world, config, path, chance.randrange(2**32), say), PATIENCE_S)
    wrong, errors, broken = ([v for values in ending.all(w) for v in values[0]] for w in ("wrong", "errors", "broken"))
    for figures in (found for values in ending.all("counts") for found in values):
        context.figures.update(figures)
    if wrong:
        return Outcome(number, Kind.WRONG_SERVED, f"{where}: blocks {wrong}")
    if ending.crash or errors:
        return Outcome(number, Kind.CRASHED, f"{where}: {ending.crash or errors[0]}")
    return Outcome(number, Kind.BROKEN if broken else Kind.HARMLESS, f"{where}: {broken}" if broken else "")
