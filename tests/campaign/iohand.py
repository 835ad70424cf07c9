"""Threads of an engine that use a store while something is done to its I/O process, and what they may claim of it."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvstore import KVStore, PagedKVCache, StoreConfig
from kvstore.errors import StorePathError, StoreUnavailable
from tests.campaign.kill import ROOMY
from tests.campaign.worlds import HUGE, LARGE, SMALL, World, small_config
from tests.support import canonical, layer_tensors

PLAIN = "plain"
RESTART_S = 6.0
"""What a restart may take on a busy machine."""
PAUSE_S = 0.001


@dataclass(frozen=True)
class Setting:
    """What a store is opened with. Faults of the same setting may use the same open store."""

    world: World
    durability: str
    eviction: str
    timeout_s: float

    @classmethod
    def of(cls, chance: random.Random, timeout_s: float, evictions: tuple[str, ...] = ("none",)) -> Setting:
        worlds, modes = (SMALL, SMALL, LARGE, HUGE, HUGE), ("commit", "process")
        return cls(chance.choice(worlds), chance.choice(modes), chance.choice(evictions), timeout_s)

    @property
    def compiled(self) -> bool:
        """Whether the I/O process loads the compiled loops, which takes longer than everything else at its start."""
        return self.world is LARGE

    @property
    def config(self) -> StoreConfig:
        """What holds all of the world where nothing is evicted, and half of it where something is."""
        config = small_config(self.world, durability=self.durability, eviction=self.eviction)
        config = replace(config, io_timeout_s=self.timeout_s, max_rejections_per_minute=None)
        return replace(config, capacity_bytes=ROOMY[self.world.name]) if self.keeps else config

    @property
    def keeps(self) -> bool:
        """Whether what was acknowledged stays until it is cleared."""
        return self.eviction == "none"

    @property
    def limit_s(self) -> float:
        """What no call may take longer than."""
        return 3 * self.timeout_s + RESTART_S

    def __str__(self) -> str:
        parts = (
            self.world.name,
            self.durability,
            self.eviction,
            f"{self.timeout_s:g}",
            "compiled" if self.compiled else PLAIN,
        )
        return "-".join(parts)


class Hand:
    """A thread that uses the store; what it puts are requests of its own, and what it loads goes into a cache of its own."""

    def __init__(
        self, setting: Setting, store: KVStore, number: int, hands: int, refusals: set[str], chance: random.Random
    ) -> None:
        self._setting, self._refusals, self._chance = setting, refusals, chance
        self._world = world = setting.world
        self._own = range(number, world.requests, hands)
        self._tensors = layer_tensors("BHNC", blocks=world.length, seed=13 + number, **world.shape)
        self._cache = PagedKVCache.from_tensors(self._tensors, "BHNC")
        self.bind(store)
        self.must: set[int] = set()
        """Acknowledged, and neither cleared nor rejected since."""
        self.may: set[int] = set()
        """Put or tried to."""
        self.rejected: dict[int, str] = {}
        self.damaged = False
        """Whether the file was damaged on purpose: only then may anything be rejected."""
        self.wrong: list[str] = []
        self.broken: list[str] = []
        self.error = self.doing = ""
        self.slowest = (0.0, "")
        self.counts: Counter[str] = Counter()

    def bind(self, store: KVStore) -> None:
        """Use this store from now on."""
        self._store, self._loader = store, store.attach(self._cache)

    def begin(self, weights: dict[str, float]) -> None:
        """Do things at random, in a thread, until `end`."""
        self._weights, self._ending = weights, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._ending.is_set():
                self.do(self._chance.choices(list(self._weights), list(self._weights.values()))[0])
                if self._store.io_process_id is None:
                    time.sleep(5 * PAUSE_S)
        except BaseException:
            self.error = traceback.format_exc()

    def do(self, op: str) -> None:
        """One call."""
        request = self._world.request(self._chance.choice(self._own))
        numbers, begin = request[: self._chance.randrange(len(request)) + 1], time.monotonic()
        self.doing = op
        try:
            getattr(self, op)(numbers)
        except (StoreUnavailable, StorePathError):
            if op not in ("evict", "clear"):
                raise
            self.counts["raised"] += 1
        self.slowest = max(self.slowest, (time.monotonic() - begin, op))
        self.doing = ""
        self.counts["calls"] += 1

    def end(self) -> bool:
        """Have the thread end; whether it did in time."""
        self._ending.set()
        self._thread.join(self._setting.limit_s)
        return not self._thread.is_alive()

    def where(self) -> str:
        """Where the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-8:]) if frame is not None else "at its end"

    def _hashes(self, numbers: range) -> list[bytes]:
        return [self._world.hashes[n] for n in numbers]

    def put(self, numbers: range) -> bool:
        self.may |= set(numbers)
        found = self._world.put(self._store, numbers)
        odd = set(found.failed.values()) - self._refusals
        self.broken += [f"a put failed: {sorted(odd)}"] * bool(odd)
        self.counts["put_failed"] += bool(found.failed)
        if self._setting.keeps:
            self.must |= {n for n, kept in zip(numbers, found.stored | found.present, strict=True) if kept}
        return not found.failed

    def get(self, numbers: range) -> set[int]:
        """Load, and compare; the blocks that were right."""
        for tensor in self._tensors.values():
            tensor.view(torch.uint8).numpy().fill(0xA5)
        got = self._loader.get_blocks(self._hashes(numbers), range(len(numbers)))
        landed = canonical(self._cache, range(len(numbers)))
        same = (landed == self._world.truth[numbers[0] : numbers[-1] + 1]).all(axis=1)
        self.wrong += [f"block {numbers[int(i)]}" for i in np.flatnonzero(got.verified & ~same)]
        self.rejected |= {numbers[i]: f"{r.kind}: {r.detail}" for i, r in got.rejected.items()}
        self.must -= {numbers[i] for i in got.rejected}
        right = {numbers[int(i)] for i in np.flatnonzero(got.verified & same)}
        self.counts["served"] += len(right)
        return right

    def match(self, numbers: range) -> None:
        found = self._store.match_prefix(self._hashes(numbers))
        least, most = (
            next((i for i, n in enumerate(numbers) if n not in s), len(numbers)) for s in (self.must, self.may)
        )
        if self._setting.keeps and not self.damaged and not (found == 0 or least <= found <= most):
            self.broken.append(f"match said {found}: at least {least} and at most {most} are there")

    def touch(self, numbers: range) -> None:
        self._store.touch(self._hashes(numbers))

    def stats(self, numbers: range) -> None:
        self._store.stats()

    def evict(self, numbers: range) -> None:
        self._store.evict(len(numbers))

    def clear(self, numbers: range) -> None:
        """Only where no other hand puts at the same time."""
        self.must.clear()
        self._store.clear()


class Bystander:
    """The rest of an engine: it opens sockets all the time, and nobody else may read from or write to them."""

    def __init__(self) -> None:
        self.odd: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ending.wait(PAUSE_S):
            pairs = [socket.socketpair() for _ in range(8)]
            for one, other in pairs:
                one.send(b"one")
                other.send(b"other")
            self._ending.wait(2 * PAUSE_S)
            self.odd += [
                f"a bystander's socket: {found}" for pair in pairs if (found := drain(*pair)) != (b"other", b"one")
            ]

    def end(self) -> list[str]:
        """What happened to its sockets."""
        self._ending.set()
        self._thread.join()
        return self.odd


def drain(*ends: socket.socket) -> tuple[bytes, ...]:
    """What can be read from sockets, which are closed then."""
    found = []
    for end in ends:
        end.setblocking(False)
        with suppress(OSError):
            found.append(end.recv(2**16))
    for end in ends:
        end.close()
    return tuple(found)
