"""The memory that the GPU benchmark works on: a paged cache in one run of bytes, and which blocks each call takes.

The cache is several times the device's L2, and a call takes other blocks than the calls before it, in random order, so
that the L2 serves none of them. Staging is rotated likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.cache import CacheGroup, PagedKVCache
from kvstore.launches import ROW_COLUMNS, write_rows
from kvstore.span import Span, check_span
from kvstore.tools.gpu_device import BenchError, Place

MIB = 2**20
ALIGNMENT = 512
"""Of each layer's first byte, as allocators give it."""
SLACK_BYTES = 512 * MIB
"""For what torch's operations take by themselves."""


@dataclass(frozen=True)
class Geometry:
    """A cache of bf16: its layout, layers, KV heads, tokens a block, and channels of K (of the cell where the layout has no
    heads)."""

    name: str
    layout: str
    layers: int
    heads: int
    tokens: int
    channels: int

    def shape(self, blocks: int) -> list[int]:
        """Of one layer's tensor."""
        cell = 2 * self.channels if "H" in self.layout else self.channels
        size = {"B": blocks, "H": self.heads, "N": self.tokens, "C": cell, "D": self.channels, "2": 2}
        return [size[axis] for axis in self.layout]

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return math.prod(self.shape(1)) * torch.bfloat16.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.layer_bytes

    def blocks_in(self, nbytes: int) -> int:
        """Blocks of a cache that fits nbytes."""
        return (nbytes - self.layers * ALIGNMENT) // self.block_bytes


class Memory:
    """`cache` and `staging` on the device, `host` pinned and as large as staging: flat uint8, random bytes. Raises
    BenchError where the device has too little."""

    def __init__(self, place: Place, cache_bytes: int, staging_bytes: int) -> None:
        needed, free = cache_bytes + staging_bytes + SLACK_BYTES, place.free_bytes()
        if needed > free:
            raise BenchError(f"{needed / 2**30:.1f} GiB of the device are needed, {free / 2**30:.1f} GiB are free")
        self.place = place
        self.cache, self.staging = place.kit.memory(cache_bytes), place.kit.memory(staging_bytes)
        self.host = place.kit.pinned(staging_bytes)
        for memory in (self.cache, self.staging):
            memory.view(torch.int64).random_()
        self.host.copy_(self.staging)

    def paged(self, geometry: Geometry) -> PagedKVCache:
        """A paged cache over `cache`, of as many blocks as fit."""
        blocks = geometry.blocks_in(self.cache.numel())
        nbytes = blocks * geometry.layer_bytes
        stride = -(-nbytes // ALIGNMENT) * ALIGNMENT
        parts = [self.cache[i * stride : i * stride + nbytes] for i in range(geometry.layers)]
        tensors = [part.view(torch.bfloat16).view(geometry.shape(blocks)) for part in parts]
        names = [f"model.layers.{i}.self_attn.attn" for i in range(geometry.layers)]
        return PagedKVCache.from_tensors(dict(zip(names, tensors, strict=True)), geometry.layout)


def window(memory: torch.Tensor, nbytes: int, number: int) -> torch.Tensor:
    """nbytes of flat memory, other ones for each number until the memory's end is reached."""
    first = number % (memory.numel() // nbytes) * nbytes
    return memory[first : first + nbytes]


def spans(group: CacheGroup, blocks: int, calls: int, seed: int = 0) -> list[Span]:
    """Full blocks from position 0 for each of several calls, in random order: a call's blocks come back only after all
    others of the cache."""
    order = np.random.default_rng(seed).permutation(group.num_blocks)
    ids = order[np.arange(calls * blocks) % group.num_blocks].reshape(calls, blocks)
    return [check_span(group, row) for row in ids.tolist()]


def rows_of(chosen: list[Span], place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """The calls' rows, (calls, blocks, columns) int64, in pinned memory and on the device."""
    shape = (len(chosen), len(chosen[0]), ROW_COLUMNS)
    host = place.kit.pinned(8 * math.prod(shape)).view(torch.int64).view(shape)
    for span, rows in zip(chosen, host.numpy(), strict=True):
        write_rows(span, rows)
    return host, host.to(place.device)
