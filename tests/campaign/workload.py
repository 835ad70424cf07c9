"""What a traced or disturbed writer does, and how the store that it leaves is examined."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import kvstore.environment
import kvstore.storefile
from kvstore import KVStore, PagedKVCache, StoreConfig
from kvstore.record import Header, parse_header
from kvstore.space import used_bytes
from kvstore.usage import Usage
from tests.campaign.disk import MARKER
from tests.campaign.framework import Context
from tests.support import MIB, block_hashes, layer_tensors, open_store, shard_of

BLOCKS: Final = 80
PER_CALL: Final = 8
GEOMETRY: Final = {"layers": 2, "heads": 4, "tokens": 16, "head_size": 64, "blocks": BLOCKS}
BLOCK_BYTES: Final = 2 * 4 * 16 * 2 * 64 * 2
TOKENS: Final = 16
HASHES: Final = block_hashes(BLOCKS)
MEMORY: Final = Path("/dev/shm")
ANOTHER_BOOT: Final = b"another boot. -."


def capacity(blocks: int) -> int:
    """A capacity for about so many blocks."""
    return max(MIB, blocks * (BLOCK_BYTES + 8192) + 64 * 4096)


def config(durability: str, blocks: int = 256, eviction: str = "lru", batch: int = 4) -> StoreConfig:
    """A configuration with room for about so many blocks."""
    return StoreConfig(
        capacity_bytes=capacity(blocks), durability=durability, eviction=eviction, batch_bytes=batch * BLOCK_BYTES
    )


class Engine:
    """An engine's cache: block i holds what is stored under HASHES[i]; and another of zeros, to load into."""

    def __init__(self) -> None:
        self._tensors = [layer_tensors("BHNC", **GEOMETRY), layer_tensors("BHNC", seed=1, **GEOMETRY)]
        self.cache, self.target = (PagedKVCache.from_tensors(tensors, "BHNC") for tensors in self._tensors)
        self._put, self._got = (
            [tensor.view(torch.uint8).numpy() for tensor in tensors.values()] for tensors in self._tensors
        )

    def warm(self, folder: Path) -> None:
        """Compile what is compiled at first use, so that forks need not."""
        with open_store(folder, self.cache, config("process")) as store:
            store.put_blocks(HASHES[:4], range(4))
            store.attach(self.target).get_blocks(HASHES[:4], range(4))

    def clear(self) -> None:
        """Zero the blocks to load into: what was right before must not look as if it were loaded."""
        for array in self._got:
            array.fill(0)

    def wrong(self, loaded: Iterable[tuple[int, int]]) -> list[int]:
        """Of loaded blocks with their valid tokens, those whose bytes are not those that were put."""
        found = set()
        for index, valid in loaded:
            for put, got in zip(self._put, self._got, strict=True):
                if not np.array_equal(put[index, :, :valid], got[index, :, :valid]):
                    found.add(index)
        return sorted(found)


def warm_engine(context: Context) -> Engine:
    """An engine whose forks have nothing left to compile."""
    engine = Engine()
    engine.warm(context.root / "warm")
    return engine


@contextmanager
def memory_folder(context: Context) -> Iterator[Path]:
    """A folder in memory where the system has one: a crash state's syncs then cost nothing."""
    if not MEMORY.is_dir():
        yield context.root
        return
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=MEMORY) as path:
        yield Path(path)


@dataclass
class Writer:
    """A store that is written, and its announcements.

    Each operation is announced before it begins and after it ended, with what the store then has ({block: valid
    tokens}) and whether that is promised to survive a power loss.
    """

    engine: Engine
    root: Path

    def __post_init__(self) -> None:
        self._marker = os.open(self.root / MARKER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.store: KVStore | None = None
        self.safe, self.durability, self.present = True, "commit", dict[int, int]()

    def _say(self, what: str, begins: bool) -> None:
        said = {"what": what, "begins": begins, "present": self.present, "safe": self.safe}
        os.write(self._marker, json.dumps(said).encode() + b"\n")

    def do(self, what: str, work: Callable[[], Any], safe: bool) -> Any:
        """An operation. safe: whether what is there after it is promised to survive."""
        self._say(what, True)
        result = work()
        if self.store is not None:
            self.present = listing(self.store)
        self.safe = safe
        self._say(what, False)
        return result

    def open(self, durability: str, blocks: int) -> None:
        self.durability = durability

        def work() -> None:
            self.store = open_store(self.root / "store", self.engine.cache, config(durability, blocks))

        shrinks = (self.root / "store").exists() and blocks < 40
        self.do("open", work, durability == "commit" or (self.safe and not shrinks))

    def put(self, first: int, count: int = PER_CALL, tokens: int | None = None) -> None:
        self._change(
            "put", lambda s: s.put_blocks(HASHES[first : first + count], range(first, first + count), first, tokens)
        )

    def evict(self, blocks: int) -> None:
        self._change("evict", lambda s: s.evict(blocks))

    def clear(self) -> None:
        self._change("clear", lambda s: s.clear())

    def _change(self, what: str, work: Callable[[KVStore], Any]) -> None:
        store = self.store
        assert store is not None
        self.do(what, lambda: work(store), self.durability == "commit")

    def close(self) -> None:
        store, self.store = self.store, None
        assert store is not None
        self.do("close", store.close, True)


def listing(store: KVStore) -> dict[int, int]:
    """The blocks that the index names, with their valid tokens. Raises lmdb.Error."""
    return store._run(lambda: _listing(store))


def _listing(store: KVStore) -> dict[int, int]:
    prefix, found = store._views[0].shape.prefix, dict[int, int]()
    index_of = {prefix + block_hash: i for i, block_hash in enumerate(HASHES)}
    with shard_of(store).db.read() as view:
        entries = zip(index_of, view.headers(list(index_of)), strict=True)
        for key, value in ((key, value) for key, value in entries if value is not None):
            header = parse_header(bytes(value), key)
            assert isinstance(header, Header)
            found[index_of[key]] = header.valid_tokens
    return dict(sorted(found.items()))


@dataclass
class Found:
    """What an examined store had."""

    verified: dict[int, int]
    wrong: list[int]
    rejected: dict[int, str]
    emptied: bool
    problems: list[str]


def examine(engine: Engine, path: Path, opened: StoreConfig, versions: dict[int, list[int]], boot: bool) -> Found:
    """Open a store, ask for every block in each of the versions (valid tokens) that it may have, and put some more.

    boot: whether the machine has booted since the store was written.
    """
    if boot:
        kvstore.storefile.boot_id = kvstore.environment.boot_id = lambda: ANOTHER_BOOT
    engine.clear()
    with open_store(path, engine.cache, opened) as store:
        found = Found({}, [], {}, bool(store.stats()["emptied_at_open"]), recount(store))
        _load_all(engine, store, versions, found)
        _put_again(engine, store, found)
    with open_store(path, engine.cache, opened) as store:
        found.problems += recount(store)
    return found


def _load_all(engine: Engine, store: KVStore, versions: dict[int, list[int]], found: Found) -> None:
    """First all blocks as full ones, then those with other versions one by one."""
    loader = store.attach(engine.target)
    _load(engine, loader, list(range(BLOCKS)), None, found)
    for index, tokens in ((i, v) for i in versions for v in versions[i] if v != TOKENS):
        if index not in found.verified:
            _load(engine, loader, [index], index * TOKENS + tokens, found)


def _load(engine: Engine, loader: KVStore, indices: list[int], tokens: int | None, found: Found) -> None:
    got = loader.get_blocks([HASHES[i] for i in indices], indices, indices[0], tokens)
    valid = TOKENS if tokens is None else tokens - indices[0] * TOKENS
    verified = [(indices[i], valid) for i in np.flatnonzero(got.verified).tolist()]
    found.verified |= dict(verified)
    found.rejected |= {indices[i]: rejection.kind for i, rejection in got.rejected.items()}
    found.wrong += engine.wrong(verified)


def _put_again(engine: Engine, store: KVStore, found: Found) -> None:
    hashes = block_hashes(3, "again")
    put = store.put_blocks(hashes, range(3))
    if not (put.stored | put.present).all():
        found.problems.append(f"a put afterwards failed: {put.failed}")
        return
    got = store.attach(engine.target).get_blocks(hashes, range(3))
    if not got.verified.all() or engine.wrong([(i, TOKENS) for i in range(3)]):
        found.problems.append("what was put afterwards does not verify")
    if store.stats()["file_bytes"] > store.stats()["capacity_bytes"]:
        found.problems.append("the file is larger than its capacity")


def recount(store: KVStore) -> list[str]:
    """What is wrong with the accounting, by a count of what is there."""
    db, problems = shard_of(store).db, []
    with db._env.begin() as txn:
        usage = Usage.parse(txn.get(b"usage", db=db._meta))
        headers = [parse_header(bytes(value), bytes(key)) for key, value in txn.cursor(db=db._index)]
        intact = [header for header in headers if isinstance(header, Header)]
        if len(intact) < len(headers):
            problems.append(f"{len(headers) - len(intact)} headers are damaged")
        counted = (sum(h.raw_length for h in intact), sum(h.stored_length for h in intact))
        if (usage.raw_bytes, usage.stored_bytes) != counted:
            problems.append(f"accounting says {usage}, there are {counted}")
        named = {h.sequence for h in intact}
        there = {int.from_bytes(key[:8], "big") for key in txn.cursor(db=db._payload).iternext(values=False)}
        if named != there:
            problems.append(f"chunks without a record: {there - named}, records without chunks: {named - there}")
        if used_bytes(txn, (db._meta, db._index, db._payload, db._quarantined)) > db.capacity_bytes:
            problems.append("more is in use than the capacity")
    return problems
