"""`kvstore bench --steady`: a store that has been full for a long time, and one that is read for the first time.

Requests of mixed block sizes are put until ten times the capacity is written. The speed in the last tenth of that is set
against the speed in the second one, when the store is full for the first time: first where the oldest go first, then
where victims are random. Then the file's pages are dropped from the page cache, and gets are set against reads of a plain
file of as many bytes, dropped as well.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from kvstore import CacheIdentity, KVStore, PagedKVCache, StoreConfig
from kvstore.storefile import DATA_NAME
from kvstore.tools.bench_subject import MIB, BenchError

LAYERS: Final = 8
HEADS: Final = 4
HEAD_SIZE: Final = 64
TOKEN_BYTES: Final = LAYERS * HEADS * HEAD_SIZE * 2 * 2
TOKENS: Final = (8, 32, 128, 512)
"""Tokens of a block: blocks of 64 KiB, 256 KiB, 1 MiB and 4 MiB."""
REQUEST_BYTES: Final = 4 * MIB
"""Block bytes of a request."""
TIMES: Final = 10
"""How many capacities are written."""
RETOUCH_SHARE: Final = 0.05
"""For random victims all requests are touched in random order, once in so much of a capacity."""
COLD_ROUNDS: Final = 3
IDENTITY: Final = CacheIdentity(model="kvstore/bench-steady", revision="1", dtype="bfloat16")

Tick = Callable[[str], None]


def num_steps() -> int:
    """How often `run` calls its tick."""
    return 2 * TIMES * 10 + COLD_ROUNDS


def run(path: Path, capacity_bytes: int, seed: int, tick: Tick = lambda what: None) -> dict[str, Any]:
    """Measure in temporary files under `path`; the report. tick: called for each tenth of a capacity.

    Raises BenchError where a put that should find room found none, or a block was not verified.
    """
    found = {victims: _steady(path / victims, capacity_bytes, seed, victims, tick) for victims in ("oldest", "random")}
    cold = _cold(path / "cold", capacity_bytes, seed, tick)
    ratios = {f"steady_{victims}": report["last_vs_second"] for victims, report in found.items()}
    return {"ratios": ratios | {"cold_get_vs_pread": cold["ratio"]}, "steady": found, "cold": cold}


class Requests:
    """Requests of one block size each, in a store. Every one is new."""

    def __init__(self, store: KVStore, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._loaders = {tokens: store.attach(_cache(tokens, seed + tokens)) for tokens in TOKENS}
        self._store, self._number = store, 0
        self.hashes: dict[int, list[bytes]] = {}

    def put(self, tokens: int | None = None) -> int:
        """Put a request; its block bytes. Raises BenchError."""
        chosen = int(self._random.choice(TOKENS)) if tokens is None else tokens
        count = REQUEST_BYTES // (chosen * TOKEN_BYTES)
        self._number += 1
        names = (hashlib.sha256(f"{self._number}/{i}".encode()).digest() for i in range(count))
        self.hashes[self._number] = hashes = list(names)
        self._store.touch(hashes)
        found = self._loaders[chosen].put_blocks(hashes, range(count))
        if found.failed:
            reasons = sorted(set(found.failed.values()))
            raise BenchError(f"{len(found.failed)} of {count} blocks were not stored: {', '.join(reasons)}")
        return count * chosen * TOKEN_BYTES

    def touch_in_random_order(self) -> None:
        """Make the order in which requests go a random one; those that went already are forgotten."""
        numbers = [n for n, hashes in self.hashes.items() if self._store.match_prefix(hashes[:1])]
        self.hashes = {n: self.hashes[n] for n in numbers}
        for number in self._random.permutation(numbers).tolist():
            self._store.touch(self.hashes[number])


def _cache(tokens: int, seed: int) -> PagedKVCache:
    blocks = REQUEST_BYTES // (tokens * TOKEN_BYTES)
    random = np.random.default_rng(seed)
    shape = (blocks, HEADS, tokens, 2 * HEAD_SIZE)
    bits = (random.integers(0, 2**16, shape, np.uint16) for _ in range(LAYERS))
    tensors = {f"layers.{i}": torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for i, b in enumerate(bits)}
    return PagedKVCache.from_tensors(tensors, "BHNC")


def _open(folder: Path, capacity_bytes: int) -> KVStore:
    config = StoreConfig(capacity_bytes=capacity_bytes, durability="process", eviction="lru")
    return KVStore(folder, _cache(TOKENS[0], 0), IDENTITY, config)


def _steady(folder: Path, capacity_bytes: int, seed: int, victims: str, tick: Tick) -> dict[str, Any]:
    """GB/s of each capacity that is written, and how full the store is."""
    tenths = []
    with _open(folder, capacity_bytes) as store:
        requests = Requests(store, seed)
        for _ in range(TIMES):
            rates = [_put_some(requests, capacity_bytes // 10, victims, capacity_bytes, tick) for _ in range(10)]
            tenths.append(10 / sum(1 / rate for rate in rates))
        stats, file = store.stats(), store.folder / DATA_NAME
        full = stats["stored_bytes"] / capacity_bytes
        if file.stat().st_size > capacity_bytes:
            raise BenchError(f"{file} has {file.stat().st_size} bytes: expected at most {capacity_bytes}")
    return {
        "gb_per_s": tenths,
        "last_vs_second": tenths[-1] / tenths[1],
        "stored_share": full,
        "evicted": stats["evicted"],
        "capacity_bytes": capacity_bytes,
    }


def _put_some(requests: Requests, nbytes: int, victims: str, capacity_bytes: int, tick: Tick) -> float:
    """Put so many bytes; GB/s. Touching for random victims is not counted."""
    tick(victims)
    written, seconds, untouched = 0, 0.0, 0.0
    while written < nbytes:
        began = time.perf_counter()
        some = requests.put()
        seconds += time.perf_counter() - began
        written, untouched = written + some, untouched + some
        if victims == "random" and untouched > RETOUCH_SHARE * capacity_bytes:
            requests.touch_in_random_order()
            untouched = 0.0
    return written / seconds / 1e9


def _cold(folder: Path, capacity_bytes: int, seed: int, tick: Tick) -> dict[str, Any]:
    """Gets of blocks that no page cache holds, against reads of a plain file; medians of the rounds."""
    rounds, rates = [], []
    with _open(folder / "store", capacity_bytes) as store:
        requests = Requests(store, seed)
        nbytes = sum(requests.put(TOKENS[2]) for _ in range(capacity_bytes // 2 // REQUEST_BYTES))
        data = store.folder / DATA_NAME
    plain = folder / "plain"
    with plain.open("wb") as file:
        for start in range(0, nbytes, REQUEST_BYTES):
            file.write(np.random.default_rng(start).bytes(REQUEST_BYTES))
    for _ in range(COLD_ROUNDS):
        tick("cold")
        _forget(plain)
        read = _read(plain)
        _forget(data)
        got = _get_all(folder / "store", capacity_bytes, requests.hashes)
        rates.append((nbytes / got / 1e9, nbytes / read / 1e9))
        rounds.append(read / got)
    middle = sorted(range(COLD_ROUNDS), key=rounds.__getitem__)[COLD_ROUNDS // 2]
    return {"ratio": rounds[middle], "get_gb_per_s": rates[middle][0], "pread_gb_per_s": rates[middle][1]}


def _forget(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read(path: Path) -> float:
    """Seconds to read a file from end to end."""
    buffer = np.zeros(REQUEST_BYTES, np.uint8)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer.data):
            pass
    return time.perf_counter() - began


def _get_all(folder: Path, capacity_bytes: int, hashes: dict[int, list[bytes]]) -> float:
    """Seconds to get all requests. Raises BenchError where one is not verified."""
    with _open(folder, capacity_bytes) as store:
        loader = store.attach(_cache(TOKENS[2], 0))
        began = time.perf_counter()
        verified = [loader.get_blocks(some, range(len(some))).verified.all() for some in hashes.values()]
        seconds = time.perf_counter() - began
    if not all(verified):
        raise BenchError("a block was not verified: check this machine's memory and disk")
    return seconds


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report in words."""
    for victims, found in report["steady"].items():
        rates = " ".join(f"{rate:.2f}" for rate in found["gb_per_s"])
        share = f"last / second {found['last_vs_second']:.2f}; {found['stored_share']:.0%} full"
        yield f"victims {victims}: GB/s for each capacity written {rates}; {share}"
    cold = report["cold"]
    yield f"cold get {cold['get_gb_per_s']:.2f} GB/s, cold pread {cold['pread_gb_per_s']:.2f} GB/s: {cold['ratio']:.2f}"
