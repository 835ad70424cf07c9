"""What the benchmark moves: paged caches as an engine has them, and a store that is being overwritten."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore import CacheIdentity, KVStore, KVStoreError, PagedKVCache, StoreConfig, block_checksums
from kvstore.errors import ConfigError, UnknownLayout
from kvstore.hostpath import NumbaPath, host_path
from kvstore.layout import DTYPES, LayerTensors, check_layout

MIB = 2**20
CAPACITY_FACTOR = 2
"""The store's room over the bytes that are put: freed pages wait two transactions until they are used again."""

Bytes = npt.NDArray[np.uint8]


class BenchError(KVStoreError):
    """The benchmark cannot run here, or the store did not do what was measured."""


@dataclass(frozen=True)
class Geometry:
    """One cache: blocks, layers, KV heads, tokens a block, channels of K and of V, element type; seed of its bytes
    and of the order of its block ids. Raises ConfigError for an unknown element type."""

    blocks: int = 128
    layers: int = 32
    heads: int = 8
    tokens: int = 16
    head_size: int = 128
    dtype: str = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPES.values())}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        found: torch.dtype = {name: dtype for dtype, name in DTYPES.items()}[self.dtype]
        return found

    @property
    def cell_bytes(self) -> int:
        """Bytes of K and V of one token in one head."""
        return 2 * self.head_size * self.torch_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layers * self.heads * self.tokens * self.cell_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def describe(self) -> dict[str, Any]:
        """All of it, for a report."""
        names = ("blocks", "layers", "heads", "tokens", "head_size", "dtype", "seed")
        derived = ("cell_bytes", "block_bytes", "total_bytes")
        return {name: getattr(self, name) for name in (*names, *derived)} | {"block_ids": "permuted"}

    def check(self, layout: str) -> None:
        """Raise UnknownLayout for a layout that is none, or that has no axis for these heads."""
        check_layout(layout)
        if "H" not in layout and self.heads != 1:
            raise UnknownLayout(
                f"layout {layout!r} has no axis for {self.heads} heads: give heads=1, or a layout with H"
            )

    def shape(self, layout: str) -> list[int]:
        """The shape of a layer's tensor, or of each of its two."""
        size = {"B": self.blocks, "H": self.heads, "N": self.tokens, "2": 2}
        return [(size | {"C": 2 * self.head_size, "D": self.head_size})[axis] for axis in layout]


def check_room(geometry: Geometry, base: Path, memory_factor: int, disk_factor: int) -> None:
    """Raise BenchError unless memory, and the disk at `base`, have room for so many times the bytes of all blocks."""
    total = geometry.total_bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage(base).free
    for what, needed, there in (("memory", memory_factor, memory), (f"disk at {base}", disk_factor, disk)):
        if needed * total > there:
            raise BenchError(
                f"{geometry.blocks} blocks of {geometry.block_bytes} bytes need {needed * total / 1e9:.1f} GB of {what}, "
                f"{there / 1e9:.1f} GB are there: give fewer --blocks, or another --path"
            )


def planes(tensors: LayerTensors) -> list[torch.Tensor]:
    """A layer's tensors, one or two."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous tensor's bytes where they lie: its shape, the last axis in bytes."""
    seen: Bytes = tensor.view(torch.uint8).numpy()
    return seen


def make_layers(geometry: Geometry, layout: str, seed: int | None) -> dict[str, LayerTensors]:
    """{layer name: tensors}, each layer's memory of its own: random bytes of this seed, or zeros without one. Every
    page is touched."""
    random = None if seed is None else np.random.default_rng(seed)

    def one() -> torch.Tensor:
        tensor = torch.zeros(geometry.shape(layout), dtype=geometry.torch_dtype)
        seen = as_bytes(tensor)
        seen[...] = 0 if random is None else random.integers(0, 256, seen.shape, np.uint8)
        return tensor

    pair = not set(layout) & set("2C")
    names = [f"model.layers.{i}.self_attn.attn" for i in range(geometry.layers)]
    return {name: (one(), one()) if pair else one() for name in names}


def chained_hashes(count: int) -> list[bytes]:
    """Chained 32-byte block hashes of one request."""
    hashes = [b""]
    for index in range(count):
        hashes.append(hashlib.sha256(hashes[-1] + index.to_bytes(8, "little")).digest())
    return hashes[1:]


class Caches:
    """A source cache of random bytes and a target cache of zeros in one layout, with scattered block ids for each."""

    def __init__(self, geometry: Geometry, layout: str) -> None:
        geometry.check(layout)
        self.geometry, self.layout = geometry, layout
        self._source_layers = make_layers(geometry, layout, geometry.seed)
        self._target_layers = make_layers(geometry, layout, None)
        self.source = PagedKVCache.from_tensors(self._source_layers, layout)
        self.target = PagedKVCache.from_tensors(self._target_layers, layout)
        order = np.random.default_rng(geometry.seed + 1)
        self.source_ids = order.permutation(geometry.blocks).tolist()
        self.target_ids = order.permutation(geometry.blocks).tolist()
        self._words = [
            as_bytes(t).reshape(-1).view(np.uint64) for layer in self._source_layers.values() for t in planes(layer)
        ]

    @property
    def loops(self) -> str:
        """Which loops move and sum these caches' blocks: "numba" or "numpy"."""
        return "numba" if isinstance(host_path(self.source.group(0)), NumbaPath) else "numpy"

    def checksum(self) -> None:
        """The content checksum of every block of the source, in scattered order."""
        block_checksums(self.source, self.source_ids)

    def plain_sum(self) -> None:
        """np.sum of the same words, layer by layer in the order of their memory."""
        for words in self._words:
            np.sum(words)

    def clear_target(self) -> None:
        """Zero the target."""
        for layer in self._target_layers.values():
            for tensor in planes(layer):
                tensor.zero_()

    def check_equal(self) -> None:
        """Raise BenchError unless every block of the target has the bytes of its block in the source."""
        axis = self.layout.index("B")
        for name, layer in self._source_layers.items():
            for one, two in zip(planes(layer), planes(self._target_layers[name]), strict=True):
                wanted, got = np.moveaxis(as_bytes(one), axis, 0), np.moveaxis(as_bytes(two), axis, 0)
                if not np.array_equal(wanted[self.source_ids], got[self.target_ids]):
                    raise BenchError(f"{name}: loaded bytes are not the stored ones although verified: report this")


class Subject:
    """A store between two caches whose blocks are put over and over.

    Every put has the same hashes with another start than the one before: a record at another position is not
    `present`, so each put writes all blocks anew and frees the old ones.
    """

    def __init__(self, folder: Path, caches: Caches, durability: str, io: str = "inline") -> None:
        geometry = caches.geometry
        config = StoreConfig(
            capacity_bytes=max(64 * MIB, CAPACITY_FACTOR * geometry.total_bytes), durability=durability
        )
        identity = CacheIdentity(model="kvstore/bench", revision=caches.layout, dtype=geometry.dtype)
        self.batch_bytes = max(1, config.write_batch_bytes // geometry.block_bytes) * geometry.block_bytes
        self._caches, self._hashes, self._start = caches, chained_hashes(geometry.blocks), 0
        self._store = KVStore(folder, caches.source, identity, config, io=io)
        self._reader = self._store.attach(caches.target)

    def put(self) -> None:
        """Put every block; raises BenchError unless each was written."""
        self._start = 1 - self._start
        result = self._store.put_blocks(self._hashes, self._caches.source_ids, start=self._start)
        if not result.stored.all():
            raise BenchError(_why(result.failed, "not stored", "choose a --path with more room, or fewer --blocks"))

    def get(self) -> None:
        """Get every block into the target; raises BenchError unless each is verified."""
        result = self._reader.get_blocks(self._hashes, self._caches.target_ids, start=self._start)
        if not result.verified.all():
            raise BenchError(_why(result.rejected, "not verified", "check this machine's memory and disk"))

    def match(self) -> None:
        """Match all blocks' hashes, after an even number of puts; raises BenchError unless each is there."""
        found = self._reader.match_prefix(self._hashes)
        if found != len(self._hashes):
            raise BenchError(f"{found} of {len(self._hashes)} leading blocks were matched: report this")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()


def _why(reasons: dict[int, Any], what: str, hint: str) -> str:
    first = next(iter(reasons.items()), None)
    told = f", block {first[0]}: {getattr(first[1], 'kind', first[1])}" if first else ""
    return f"{max(1, len(reasons))} blocks were {what}{told}: {hint}"
