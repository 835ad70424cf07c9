"""The GPU benchmark's end-to-end phase: put and get of many blocks by the host's clock, without a database and with one.

Without: batches go through pinned buffers as in the store; a put's are summed on the host, a get's are scattered and
verified, and the host's copies from and to the database are left out. With: through KVStore, durability "process".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.cache import PagedKVCache
from kvstore.checksum import UInt64Array, weighted_sums
from kvstore.devicepath import DeviceRoute
from kvstore.hostpath import compiled_loops, staging_sums
from kvstore.route import Gathered, Staged
from kvstore.span import Span, check_span
from kvstore.staging import STAGING_BUFFERS, Buffer, StagingPool
from kvstore.tools.gpu_device import BenchError, Mismatch

MIB = 2**20
CAPACITY_FACTOR = 4
"""The store's room over the bytes that are put: freed pages wait two transactions until they are used again."""
WARM_ROUNDS = 2
"""Rounds before those that count: both starts have been put, and freed pages are being used again."""


class LeftOut(Exception):
    """A part that is not measured here, with the reason."""


class Moves:
    """Puts and gets between a cache and staging, batch_bytes at a time. put_ids and get_ids: the blocks' ids."""

    def __init__(self, cache: PagedKVCache, route: DeviceRoute, nbytes: int, batch_bytes: int) -> None:
        self.cache, self.group, self._route = cache, cache.group(0), route
        self._staging_sums = staging_sums(self.group)
        block_bytes = self.group.block_bytes
        blocks = min(self.group.num_blocks, max(1, nbytes // block_bytes))
        order = np.random.default_rng(3).permutation(self.group.num_blocks)
        self.put_ids, self.get_ids = order[:blocks].tolist(), order[-blocks:].tolist()
        self.nbytes, self._step = blocks * block_bytes, max(1, batch_bytes // block_bytes)
        self._put_pool, self._get_pool = (StagingPool(self._step * block_bytes, route.new_buffer) for _ in range(2))
        part_bytes = route.part_bytes
        self._part = self._step if part_bytes is None else max(1, part_bytes // block_bytes)
        self.sums: UInt64Array = np.empty(0, np.uint64)

    def put(self) -> float:
        """Gather and sum on the device, copy, and sum again on the host, the next batch being under way meanwhile:
        seconds. Raises Mismatch."""
        began = time.perf_counter()
        transfer, waiting = self._route.begin_put(), deque[tuple[Span, Buffer, Staged, Gathered]]()
        with _borrowing(self._put_pool) as owner:
            for span in self._batches(self.put_ids):
                if len(waiting) == STAGING_BUFFERS:
                    self._arrive(owner, *waiting.popleft())
                buffer = self._put_pool.borrow(owner)
                staged = self._route.stage(buffer, len(span))
                waiting.append((span, buffer, staged, transfer.gather(span, staged)))
            while waiting:
                self._arrive(owner, *waiting.popleft())
        return time.perf_counter() - began

    def _arrive(self, owner: object, span: Span, buffer: Buffer, staged: Staged, gathered: Gathered) -> None:
        for first in range(0, len(span), self._part):
            end = min(first + self._part, len(span))
            sums, part = gathered.take(first, end), span.take(np.arange(first, end))
            if not np.array_equal(sums, self._staging_sums(part, staged.bytes[first:end])):
                raise Mismatch("gathered blocks do not have their source's sums")
        self._put_pool.give_back(owner, buffer)

    def get(self) -> tuple[float, float]:
        """Copy and scatter whatever lies in the buffers, then verify: seconds of each."""
        began = time.perf_counter()
        transfer = self._route.begin_get()
        with _borrowing(self._get_pool) as owner:
            for span in self._batches(self.get_ids):
                buffer = self._get_pool.borrow(owner)
                transfer.scatter(span, self._route.stage(buffer, len(span)))
                self._get_pool.give_back(owner, buffer)
        transfer.finish()
        landed = time.perf_counter()
        self.sums = transfer.block_checksums(check_span(self.group, self.get_ids), self._get_pool)
        return landed - began, time.perf_counter() - landed

    def check_get(self) -> None:
        """Fill the buffers alike, get, and raise Mismatch unless every block has the sum of what was staged for it."""
        with _borrowing(self._get_pool) as owner:
            buffers = [self._get_pool.borrow(owner) for _ in range(STAGING_BUFFERS)]
            for buffer in buffers:
                buffer.memory[...] = np.random.default_rng(0).integers(0, 256, buffer.memory.size, np.uint8)
        self.get()
        sums = [self._staged_sums(span, buffers[0]) for span in self._batches(self.get_ids)]
        if not np.array_equal(self.sums, np.concatenate(sums)):
            raise Mismatch("scattered blocks do not have their staging's sums")

    def _staged_sums(self, span: Span, buffer: Buffer) -> UInt64Array:
        staged = self._route.stage(buffer, len(span))
        return weighted_sums(self._staging_sums(span, staged.bytes), self.group.factors)

    def _batches(self, block_ids: list[int]) -> Iterator[Span]:
        span = check_span(self.group, block_ids)
        for first in range(0, len(span), self._step):
            yield span.take(np.arange(first, min(first + self._step, len(span))))


@contextlib.contextmanager
def _borrowing(pool: StagingPool) -> Iterator[object]:
    """A borrower, whose buffers are given back at the end."""
    owner = object()
    try:
        yield owner
    finally:
        pool.borrowed.pop(owner, None)


def without_disk(moves: Moves, rounds: int) -> dict[str, Any]:
    """Rates of put, get and of a get's two parts; the verification's share of the load."""
    moves.put()
    moves.check_get()
    puts = [moves.put() for _ in range(rounds)]
    gets = [moves.get() for _ in range(rounds)]
    seconds = {
        "put": puts,
        "get": [a + b for a, b in gets],
        "load": [a for a, _ in gets],
        "verify": [b for _, b in gets],
    }
    found = rates(seconds, moves.nbytes)
    return found | {"verify_of_load": float(np.median([b / a for a, b in gets]))}


def rates(seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """{name: {"seconds": median, "gb_per_s": rate}}, and the bytes."""
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return {"bytes": nbytes} | {n: {"seconds": s, "gb_per_s": nbytes / s / 1e9} for n, s in medians.items()}


def host_sums() -> str:
    """What sums staged blocks on the host: "numba" or "numpy"."""
    return "numpy" if compiled_loops() is None else "numba"


def with_disk(moves: Moves, rounds: int, batch_bytes: int, base: Path | None) -> dict[str, Any]:
    """Rates of put_blocks and get_blocks through a store in a temporary folder, its file being overwritten.

    base: where the folder is made, by default $TMPDIR or the current one. Raises LeftOut where what the store needs is not
    installed or has no room, BenchError where a block is not stored or verified.
    """
    try:
        from kvstore.store import KVStore  # needs lmdb and xxhash, which the other phases do without
    except ImportError as error:
        raise LeftOut(str(error)) from None
    base = base or Path(os.environ.get("TMPDIR") or ".")
    capacity = max(64 * MIB, CAPACITY_FACTOR * moves.nbytes)
    if not base.is_dir() or shutil.disk_usage(base).free < capacity:
        raise LeftOut(f"{base}: expected a folder on a disk with {capacity / 1e9:.1f} GB free")
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder,
        _store(KVStore, Path(folder), moves, capacity, batch_bytes) as store,
    ):
        return rates(_rounds(store, moves, rounds), moves.nbytes)


def _store(kind: Any, folder: Path, moves: Moves, capacity: int, batch_bytes: int) -> Any:
    from kvstore.config import StoreConfig
    from kvstore.identity import CacheIdentity

    identity = CacheIdentity(model="kvstore/bench", revision=moves.cache.layout, dtype="bfloat16")
    config = StoreConfig(capacity_bytes=capacity, durability="process", batch_bytes=batch_bytes)
    return kind(folder, moves.cache, identity, config)


def _rounds(store: Any, moves: Moves, rounds: int) -> dict[str, list[float]]:
    """Seconds of puts and gets after warm ones. Each put has another start than the one before, so that a record is not
    `present` and all blocks are written anew."""
    hashes = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(len(moves.put_ids))]
    seconds: dict[str, list[float]] = {"put": [], "get": []}
    for number in range(-WARM_ROUNDS, rounds):
        marks = [time.perf_counter()]
        put = store.put_blocks(hashes, moves.put_ids, start=number % 2)
        marks.append(time.perf_counter())
        got = store.get_blocks(hashes, moves.get_ids, start=number % 2)
        marks.append(time.perf_counter())
        if not (put.stored.all() and got.verified.all()):
            raise BenchError(f"blocks were not stored or not verified: {put.failed} {got.rejected}")
        if number >= 0:
            seconds["put"].append(marks[1] - marks[0])
            seconds["get"].append(marks[2] - marks[1])
    return seconds
