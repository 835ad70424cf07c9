"""One KV cache group: its layers, where their K and V lie, and the slices of its blocks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kvstore.checksum import ReplicaKey, UInt64Array, slice_factors
from kvstore.identity import LayerSpec
from kvstore.layout import Plane

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerCache:
    """One layer of a group: its number in the model, its heads (global numbers first_head to first_head + heads
    - 1) and the planes that hold their K and V.

    heads_before: heads in the unsharded model of the caches that come before this one among those of the same layer
    number, whose heads are numbered first; kv_heads: its own there, where that was said; replica: which copy of its heads
    this is, where that was said; aliases: further layers that use this cache.
    """

    name: str
    number: int
    type: str
    dtype: str
    first_head: int
    heads: int
    k: Plane
    v: Plane
    heads_before: int = 0
    kv_heads: int | None = None
    replica: ReplicaKey | None = None
    aliases: tuple[str, ...] = ()

    @property
    def own_first_head(self) -> int:
        """The number of its first head among its own in the unsharded model."""
        return self.first_head - self.heads_before

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token's K and V in one head."""
        return self.k.nbytes + self.v.nbytes

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that hold a cell, in its order: one where K and V of a token are one run, else two."""
        k, v = self.k, self.v
        follows = v.address == k.address + k.channels * k.channel_stride and replace(
            v, address=0, channels=0
        ) == replace(k, address=0, channels=0)
        if v.channels and not follows:
            return (k, v)
        return (replace(k, channels=k.channels + v.channels),)

    def spec(self, group: int) -> LayerSpec:
        """The layer as an identity describes it, where this cache holds all its heads."""
        return LayerSpec(self.name, self.type, self.dtype, self.heads, self.k.nbytes, self.v.nbytes, group)


@dataclass(frozen=True)
class Slice:
    """One layer and one head of a block, in canonical order: `layer` and `head` are global numbers, `row` the
    layer's index in its group, `local_head` the head's in its layer, `nbytes` the bytes of block_size tokens."""

    layer: int
    head: int
    row: int
    local_head: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class CacheGroup:
    """One KV cache group: layers in order of number, then name; all with the same blocks and block size.

    Immutable and safe to share between threads; compares and hashes by identity.
    """

    number: int
    layers: tuple[LayerCache, ...]
    block_size: int
    num_blocks: int
    device: torch.device = CPU
    window: int | None = None
    """How many tokens a sliding window looks back; None: every token is needed."""

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The slices of a block in canonical order: head by head (global number), in it layer by layer."""
        rows = [
            Slice(layer.number, layer.first_head + h, row, h, layer.cell_bytes * self.block_size)
            for row, layer in enumerate(self.layers)
            for h in range(layer.heads)
        ]
        return tuple(sorted(rows, key=lambda s: (s.head, s.row)))

    @cached_property
    def factors(self) -> UInt64Array:
        """m of each slice, (slices,) uint64."""
        return slice_factors([s.layer for s in self.slices], [s.head for s in self.slices])

    @cached_property
    def slice_bytes(self) -> tuple[int, ...]:
        """Bytes of each slice, in canonical order."""
        return tuple(s.nbytes for s in self.slices)

    @cached_property
    def offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Offset of each slice in a block's canonical bytes, and their end: (slices + 1,) int64."""
        return np.concatenate(([0], np.cumsum(self.slice_bytes))).astype(np.int64)

    @property
    def looks_back(self) -> int | None:
        """How many tokens before a prefix's end whoever goes on there needs of this group; None: all."""
        return None if self.window is None else self.window - 1

    def restricted(self, layers: Collection[LayerCache]) -> CacheGroup:
        """The group with some of its layers alone; itself where these are all."""
        kept = tuple(layer for layer in self.layers if layer in layers)
        return self if len(kept) == len(self.layers) else replace(self, layers=kept)

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block in this group and rank."""
        return int(self.offsets[-1])

    @cached_property
    def regular(self) -> bool:
        """Whether the compiled loops can walk every layer (see Plane.regular)."""
        return all(layer.k.regular and layer.v.regular for layer in self.layers)


def shared_memory(group: CacheGroup) -> tuple[str, str] | None:
    """Two planes of a group that share bytes, as "layer K" and "layer V"; None where there are none.

    Groups may share memory: an engine gives them different blocks of it.
    """
    planes = [
        (plane, (group.num_blocks, layer.heads, group.block_size), f"{layer.name} {letter}")
        for layer in group.layers
        for letter, plane in (("K", layer.k), ("V", layer.v))
        if plane.channels
    ]
    planes.sort(key=lambda entry: entry[0].address)
    for index, (plane, sizes, name) in enumerate(planes):
        end = plane.end(sizes)
        for above, above_sizes, other in planes[index + 1 :]:
            if above.address >= end:
                break
            if plane.shares_bytes(above, sizes, above_sizes):
                return name, other
    return None
