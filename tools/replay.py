"""Replay a trace of requests against a store: what share of the blocks it would have served from disk.

Every block is a small one whose bytes tell which it is. What the store says it has is loaded, verified and compared.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore import CacheIdentity, KVStore, KVStoreError, PagedKVCache, StoreConfig
from kvstore.config import MAX_CAPACITY, MIB
from kvstore.eviction import POLICIES
from kvstore.space import PAGE_BYTES, PAGE_HEADER, usable_bytes
from kvstore.tools.bench_limits import base_folder

EPOCH_S: Final = 1_700_000_000.0
"""When a trace begins: what its first millisecond is to the store's clock."""
MAX_TIMESTAMP: Final = 1e12
"""Milliseconds; 30 years."""
BLOCK_PAGES: Final = 6
"""So many that the share of a page that its index entry takes, which varies, hardly counts."""
BLOCK_BYTES: Final = BLOCK_PAGES * PAGE_BYTES - PAGE_HEADER
SHARE_BYTES: Final = 690
"""What a record takes besides: index pages are about half full, so its entry of 280 bytes takes twice that, and
its directory and inner pages the rest."""
SPARE_BLOCKS: Final = 2
"""For the databases' first pages, and for what is free but less than a block."""
MIN_CAPACITY_BLOCKS: Final = 100
"""A store of fewer is not a whole number of its smallest parts."""
NAMES: Final = np.uint64(0xD1342543DE82EF95)
RAMP: Final = np.arange(BLOCK_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
CALLS: Final = ("touch", "match", "get", "put")

Words = npt.NDArray[np.uint64]
Tick = Callable[[], None]


class ReplayError(KVStoreError):
    """The trace is none, the replay cannot run here, or the store gave back something else than was stored."""


@dataclass(frozen=True)
class Request:
    """One request: when it came, in milliseconds, and the hash ids of its blocks from position 0."""

    timestamp: float
    hash_ids: list[int]


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace, one JSON object a line. Raises ReplayError, with the line's number."""
    expected = "expected a trace, a file of JSON lines"
    try:
        with path.open("rb") as lines:
            requests = [_request(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}: {expected}") from None
    for number, (one, two) in enumerate(pairwise(requests), 2):
        if two.timestamp < one.timestamp:
            late = f"timestamp {two.timestamp} after {one.timestamp}"
            raise ReplayError(f"{path}, line {number}: {late}: expected times in order, sort the lines")
    if not any(request.hash_ids for request in requests):
        raise ReplayError(f"{path}: {len(requests)} requests and no block: {expected}")
    return requests


def _request(line: bytes, where: str) -> Request:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ReplayError(f'{where}: {_shown(line)}: expected {{"timestamp": milliseconds, "hash_ids": [...]}}')
    timestamp, ids = found.get("timestamp"), found.get("hash_ids")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp <= MAX_TIMESTAMP:
        raise ReplayError(f"{where}: timestamp {_shown(timestamp)}: expected milliseconds since the trace began")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**64 for one in ids):
        raise ReplayError(f"{where}: hash_ids {_shown(ids)}: expected a list of integers, 0 to 2**64 - 1")
    if len(set(ids)) != len(ids):
        raise ReplayError(f"{where}: hash_ids {_shown(ids)}: expected each block of a request once")
    return Request(timestamp, ids)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def block_hash(hash_id: int) -> bytes:
    """A block's hash as engines make them: 32 bytes that do not tell the order in which blocks came."""
    return hashlib.sha256(b"kvstore replay" + hash_id.to_bytes(8, "little")).digest()


def contents(hash_ids: Sequence[int]) -> Words:
    """The words of blocks, (blocks, words): no word of one block is that of another, or of another place in it."""
    return (np.array(hash_ids, np.uint64) * NAMES)[:, None] + RAMP


def capacity_bytes(blocks: int) -> int:
    """The least capacity with which a store keeps so many blocks, to within 1 %. Raises ReplayError out of range."""
    needed = (blocks + SPARE_BLOCKS) * (BLOCK_PAGES * PAGE_BYTES + SHARE_BYTES)
    if blocks < MIN_CAPACITY_BLOCKS or 2 * needed > MAX_CAPACITY:
        most = MAX_CAPACITY // (2 * BLOCK_BYTES) // 1000 * 1000
        raise ReplayError(f"--capacity-blocks {blocks}: expected {MIN_CAPACITY_BLOCKS} to about {most}")
    low, high = MIB, 2 * needed + MIB
    while low < high:
        middle = (low + high) // 2
        enough = usable_bytes(middle) - StoreConfig(middle, "process").spare_bytes >= needed
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


@dataclass
class Cost:
    """What one kind of call took."""

    calls: int = 0
    blocks: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        micros = 1e6 * self.seconds
        each = {"us_per_call": micros / max(1, self.calls), "us_per_block": micros / max(1, self.blocks)}
        return {"calls": self.calls, "blocks": self.blocks} | {name: round(us, 1) for name, us in each.items()}


@dataclass
class Replay:
    """One replay against an open store, whose cache is `words`' memory. now: what the store's clock reads, in a list of one.

    A request touches all its blocks, loads the leading ones that are here, and puts the others: as an engine would.
    """

    store: KVStore
    words: Words
    now: list[float]
    references: int = 0
    verified: int = 0
    written: int = 0
    costs: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in CALLS})

    def request(self, request: Request) -> None:
        """Serve one request. Raises ReplayError where the store errs."""
        self.now[0] = EPOCH_S + request.timestamp / 1000
        ids = request.hash_ids
        hashes = [block_hash(one) for one in ids]
        self.references += len(ids)
        with self._timed("touch", len(ids)):
            self.store.touch(hashes)
        with self._timed("match", len(ids)):
            leading = self.store.match_prefix(hashes)
        if leading:
            self._get(ids[:leading], hashes[:leading])
        if leading < len(ids):
            self._put(ids[leading:], hashes[leading:], leading, hashes[leading - 1] if leading else None)

    def _get(self, ids: list[int], hashes: list[bytes]) -> None:
        places = self.words[: len(ids)]
        places.fill(0)
        with self._timed("get", len(ids)):
            got = self.store.get_blocks(hashes, range(len(ids)))
        if not got.verified.all():
            refused = {index: rejection.kind for index, rejection in got.rejected.items()}
            raise ReplayError(
                f"{len(ids)} blocks are here by match_prefix, {int(got.missing.sum())} are missing by get_blocks, refused: "
                f"{refused}: check this machine's memory and disk"
            )
        wrong = np.flatnonzero((places != contents(ids)).any(axis=1))
        if wrong.size:
            raise ReplayError(f"block {ids[int(wrong[0])]}: wrong bytes were loaded although verified: report this")
        self.verified += len(ids)

    def _put(self, ids: list[int], hashes: list[bytes], start: int, parent: bytes | None) -> None:
        self.words[: len(ids)] = contents(ids)
        with self._timed("put", len(ids)):
            put = self.store.put_blocks(hashes, range(len(ids)), start=start, parent=parent)
        if others := set(put.failed.values()) - {"not_admitted"}:
            raise ReplayError(f"blocks were not stored: {', '.join(sorted(others))}: choose a --path with more room")
        self.written += int(put.stored.sum())

    @contextmanager
    def _timed(self, name: str, blocks: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        cost = self.costs[name]
        cost.seconds += time.perf_counter() - began
        cost.calls, cost.blocks = cost.calls + 1, cost.blocks + blocks


def run(
    requests: Sequence[Request], capacity_blocks: int, policy: str, path: Path | None = None, tick: Tick = lambda: None
) -> dict[str, Any]:
    """Replay requests against a new store; the report of `kvstore replay --json`.

    path: the folder in which a temporary folder is made, used and removed; by default $TMPDIR or the current one.
    tick: called after each request. Raises ReplayError.
    """
    if policy not in POLICIES:
        raise ReplayError(f"--policy {policy}: expected one of {', '.join(POLICIES)}")
    config = StoreConfig(capacity_bytes(capacity_blocks), "process", eviction=policy)
    base = base_folder(path, ReplayError)
    _check_room(base, config.capacity_bytes)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kvstore-replay-", dir=base) as folder:
        found = _run(requests, config, Path(folder), tick)
    return {"policy": policy, "capacity_blocks": capacity_blocks} | found | {"seconds": time.perf_counter() - began}


def _check_room(base: Path, needed: int) -> None:
    free = shutil.disk_usage(base).free
    if needed > free:
        raise ReplayError(
            f"the store may take {needed} bytes of disk, {free} are free at {base}: give fewer --capacity-blocks, or another "
            "--path"
        )


def _run(requests: Sequence[Request], config: StoreConfig, folder: Path, tick: Tick) -> dict[str, Any]:
    tensor = torch.zeros((max(len(r.hash_ids) for r in requests), 1, 1, BLOCK_BYTES), dtype=torch.uint8)
    words: Words = tensor.numpy().reshape(-1, BLOCK_BYTES).view(np.uint64)
    cache = PagedKVCache.from_tensors({"model.layers.0.self_attn.attn": tensor}, "BHNC")
    now = [EPOCH_S]
    with KVStore(folder, cache, CacheIdentity("kvstore/replay"), config, clock=lambda: now[0]) as store:
        replay = Replay(store, words, now)
        for request in requests:
            replay.request(request)
            tick()
        stats = store.stats()
    return {
        "hit_ratio": replay.verified / replay.references,
        "requests": len(requests),
        "references": replay.references,
        "verified_gets": replay.verified,
        "blocks_written": replay.written,
        "resident_blocks": stats["records"],
        "file_bytes": stats["file_bytes"],
        "capacity_bytes": stats["capacity_bytes"],
        "calls": {name: cost.figures() for name, cost in replay.costs.items()},
    }


def render(report: dict[str, Any]) -> str:
    """The report in words."""
    calls = [
        f"  {name:6}{cost['calls']:>9,} calls {cost['us_per_call']:>9,.0f} us a call {cost['us_per_block']:>9.1f} us a block"
        for name, cost in report["calls"].items()
    ]
    return "\n".join(
        (
            f"{report['policy']}, {report['capacity_blocks']:,} blocks: hit_ratio {report['hit_ratio']:.4f}",
            f"  {report['requests']:,} requests for {report['references']:,} blocks: {report['verified_gets']:,} loaded and "
            f"verified, {report['blocks_written']:,} written",
            f"  {report['resident_blocks']:,} blocks are stored, data.mdb has {report['file_bytes']:,} bytes; "
            f"{report['seconds']:.1f} s",
            *calls,
        )
    )
