"""What the tests share: caches of random bytes, chained hashes, stores, and byte-level access to a shard."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch

from kvstore import CacheIdentity, KVStore, PagedKVCache, StoreConfig
from kvstore.cache import CacheGroup
from kvstore.checksum import reference_block_checksum, reference_slice_checksum
from kvstore.environment import DATABASES, LMDB_ENGINE
from kvstore.inline import InlineStorage
from kvstore.loops_numpy import NumpyLoops
from kvstore.remote import RemoteStorage
from kvstore.shard import Shard
from kvstore.staging import Buffers

MIB = 2**20
IDENTITY = CacheIdentity(model="test/model", revision="1", dtype="bfloat16")
SMALL = StoreConfig(capacity_bytes=64 * MIB, durability="process", max_rejections_per_minute=None)
IO = "KVSTORE_TESTS_IO"
"""The environment variable that says which io stores are opened with where a test does not: scripts inherit it."""
LAYOUTS = ("BHNC", "BNHC", "2BNHD", "B2NHD", "2BHND", "NBHC", "BHND", "BNHD")


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor whose bytes are uniformly random, NaN patterns and all."""
    generator = torch.Generator().manual_seed(seed)
    shape = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def layer_tensors(
    layout: str,
    layers: int = 2,
    blocks: int = 8,
    heads: int = 2,
    tokens: int = 4,
    head_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    first_layer: int = 0,
) -> dict[str, Any]:
    """{layer name: tensor, or (K, V) pair} in a layout, K and V of head_size channels each."""
    size = {"B": blocks, "H": heads, "N": tokens, "C": 2 * head_size, "D": head_size, "2": 2}
    shape = [size[axis] for axis in layout]
    pair = not set(layout) & set("2C")

    def one(layer: int) -> Any:
        seeds = [seed * 1_000_003 + layer * 2 + part for part in range(2)]
        k = random_tensor(shape, dtype, seeds[0])
        return (k, random_tensor(shape, dtype, seeds[1])) if pair else k

    return {f"model.layers.{first_layer + i}.self_attn.attn": one(first_layer + i) for i in range(layers)}


def make_cache(layout: str = "BHNC", **options: Any) -> PagedKVCache:
    """A cache of random bytes; options as `layer_tensors`."""
    return PagedKVCache.from_tensors(layer_tensors(layout, **options), layout)


def own_cache(layout: str = "BHNC", **options: Any) -> PagedKVCache:
    """A cache as `make_cache`, that says that no other rank has the same heads."""
    tensors = layer_tensors(layout, **options)
    return PagedKVCache.from_tensors(tensors, layout, replicas=dict.fromkeys(tensors, (1, 0)))


def block_hashes(count: int, request: str = "r", parent: bytes = b"") -> list[bytes]:
    """Chained 32-byte hashes of the blocks of a request."""
    hashes: list[bytes] = []
    for index in range(count):
        parent = hashlib.sha256(parent + f"{request}/{index}".encode()).digest()
        hashes.append(parent)
    return hashes


def io_mode() -> str:
    """The io that stores are opened with."""
    return os.environ.get(IO, "inline")


def open_store(path: Path, cache: PagedKVCache, config: StoreConfig = SMALL, **options: Any) -> KVStore:
    """A store of IDENTITY."""
    return KVStore(path, cache, options.pop("identity", IDENTITY), config, **{"io": io_mode(), **options})


def canonical(cache: PagedKVCache, block_ids: Sequence[int], group: int = 0) -> np.ndarray[Any, Any]:
    """Blocks' canonical bytes, (blocks, block bytes) uint8, read with numpy alone."""
    members = cache.group(group)
    ids = np.asarray(block_ids, np.int64)
    staging = np.zeros((ids.size, members.block_bytes), np.uint8)
    NumpyLoops(members).gather(ids, np.full(ids.size, members.block_size, np.int64), staging)
    return staging


def reference_checksums(group: CacheGroup, blocks: np.ndarray[Any, Any], start: int, valid: Sequence[int]) -> list[int]:
    """c of canonical blocks by the plain reference."""
    sums = []
    for row, (block, tokens) in enumerate(zip(blocks, valid, strict=True)):
        first = (start + row) * group.block_size
        parts = [
            (s.layer, s.head, reference_slice_checksum(cells(group, block, i)[:tokens], first))
            for i, s in enumerate(group.slices)
        ]
        sums.append(reference_block_checksum(parts))
    return sums


def cells(group: CacheGroup, block: np.ndarray[Any, Any], index: int) -> np.ndarray[Any, Any]:
    """One slice of a canonical block: (tokens, cell bytes)."""
    return block[group.offsets[index] : group.offsets[index + 1]].reshape(group.block_size, -1)


def shard_of(store: KVStore) -> Shard:
    """What a store with io="inline" has open."""
    storage = store._front.storage
    assert isinstance(storage, InlineStorage)
    return storage.shard


def buffers_of(store: KVStore) -> Buffers:
    """The staging memory of a store."""
    storage = store._front.storage
    return storage._watch.serving().buffers if isinstance(storage, RemoteStorage) else storage.buffers


def buffers_are_lost(store: KVStore, patience_s: float = 5.0) -> bool:
    """Whether somebody has staging memory though no call is in flight. What another process may still use of a call that
    was cut short comes back soon."""
    storage, deadline = store._front.storage, time.monotonic() + patience_s
    while any(pool.borrowed for pool in buffers_of(store).pools.values()):
        if not isinstance(storage, RemoteStorage) or time.monotonic() > deadline:
            return True
        storage._watch.serving().sweep()
        time.sleep(0.001)
    return False


def index_key(store: KVStore, block_hash: bytes, group: int = 0) -> bytes:
    """The index key of a block."""
    return store._views[group].shape.keys([block_hash])[0]


class Raw:
    """An open store's LMDB databases, for tests that damage them: values are replaced in transactions of their own,
    below everything that kvstore checks. Where another process has the shard open, each operation opens it here as well:
    LMDB's own locks keep the two apart."""

    def __init__(self, store: KVStore) -> None:
        storage = store._front.storage
        self._folder, self._own = store.folder, storage.shard.db if isinstance(storage, InlineStorage) else None

    def entry(self, key: bytes) -> bytes | None:
        """An index entry."""
        return self.value("index", key)

    def entries(self) -> dict[bytes, bytes]:
        """All index entries by their keys."""
        return self.all("index")

    def put_entry(self, key: bytes, value: bytes | None) -> None:
        """Replace an index entry, or delete it."""
        self.replace("index", key, value)

    def payload(self) -> dict[bytes, bytes]:
        """All chunks by their keys."""
        return self.all("payload")

    def chunk(self, key: bytes) -> bytes:
        """One chunk."""
        found = self.value("payload", key)
        assert found is not None
        return found

    def put_chunk(self, key: bytes, value: bytes | None) -> None:
        """Replace a chunk, or delete it."""
        self.replace("payload", key, value)

    def quarantined(self) -> list[bytes]:
        """The quarantine's values, oldest first."""
        return list(self.all("quarantine").values())

    def transactions(self) -> int:
        """The number of the last transaction that wrote."""
        return int(self.info()["last_txnid"])

    def info(self) -> dict[str, int]:
        """What LMDB says of the environment."""
        with self._environment() as (env, _):
            return dict(env.info())

    def value(self, database: str, key: bytes) -> bytes | None:
        """What lies under a key."""
        with self.transaction() as (txn, databases):
            found = txn.get(key, db=databases[database])
            return None if found is None else bytes(found)

    def all(self, database: str) -> dict[bytes, bytes]:
        """Everything in a database, in order."""
        with self.transaction() as (txn, databases), txn.cursor(db=databases[database]) as cursor:
            return {bytes(k): bytes(v) for k, v in cursor}

    def replace(self, database: str, key: bytes, value: bytes | None) -> None:
        """Replace what lies under a key, or delete it."""
        with self.transaction(write=True) as (txn, databases):
            if value is None:
                txn.delete(key, db=databases[database])
            else:
                txn.put(key, value, db=databases[database])

    @contextmanager
    def transaction(self, write: bool = False) -> Iterator[tuple[Any, dict[str, Any]]]:
        """A transaction, and the databases by their names."""
        with self._environment() as (env, databases), env.begin(write=write) as txn:
            yield txn, databases

    @contextmanager
    def _environment(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        names = [name.decode() for name in DATABASES]
        if self._own is not None:
            own = [self._own._meta, self._own._index, self._own._payload, self._own.quarantine.database]
            yield self._own._env, dict(zip(names, own, strict=True))
            return
        # Map size 0: the file's own.
        options = {"map_size": 0, "max_dbs": len(names), "lib_version": LMDB_ENGINE, "sync": False}
        with lmdb.open(str(self._folder), create=False, **options) as env:
            yield env, {name: env.open_db(name.encode(), create=False) for name in names}


CAMPAIGNS: list[str] = []
"""A line for each fault campaign that ran; the test session prints them at its end."""


def report_campaign(name: str, faults: int, detected: int, wrong_served: int, seed: str = "exhaustive") -> None:
    """Note how many faults a campaign made, and what became of them."""
    CAMPAIGNS.append(f"campaign={name} faults={faults} detected={detected} wrong_served={wrong_served} seed={seed}")


def flip(data: bytes, bit: int) -> bytes:
    """The bytes with one bit flipped."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
