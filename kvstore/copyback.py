"""Blocks of a device that no kernel serves: copied to the host, where they are moved and summed, and copied back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import CacheGroup, LayerCache, PagedKVCache
from kvstore.checksum import UInt64Array
from kvstore.hostpath import STAGED_ONLY, host_path
from kvstore.layout import LayerTensors
from kvstore.span import Span

MIRROR_BYTES: Final = 16 * 2**20
"""Host memory for blocks on their way, or one block where that is more."""
SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bits are moved as integers: some devices cannot index fp8."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Mirrored:
    """A tensor of the cache and its mirror on the host, which has fewer blocks."""

    def __init__(self, tensor: torch.Tensor, layout: str, blocks: int) -> None:
        self._tensor = tensor.view(SAME_SIZE[tensor.itemsize])
        self._blocks, self._tokens = layout.index("B"), layout.index("N")
        shape = [blocks if axis == self._blocks else size for axis, size in enumerate(tensor.shape)]
        self.mirror = torch.empty(shape, dtype=tensor.dtype)
        self._mirror = self.mirror.view(self._tensor.dtype)

    def fetch(self, block_ids: Ints) -> None:
        """Copy the cache's blocks to the mirror's first ones."""
        found = self._tensor.index_select(self._blocks, self._ids(block_ids))
        self._mirror.narrow(self._blocks, 0, block_ids.size).copy_(found)

    def push(self, block_ids: Ints, valid: Ints, block_size: int) -> None:
        """Copy the valid tokens of the mirror's first blocks to the cache's blocks, and nothing past them."""
        full = np.flatnonzero(valid == block_size)
        if full.size:
            chosen = self._mirror.index_select(self._blocks, torch.from_numpy(full))
            self._tensor.index_copy_(self._blocks, self._ids(block_ids[full]), chosen.to(self._tensor.device))
        for index in np.flatnonzero(valid < block_size).tolist():
            target = self._tensor.narrow(self._blocks, int(block_ids[index]), 1)
            source = self._mirror.narrow(self._blocks, index, 1)
            tokens = int(valid[index])
            target.narrow(self._tokens, 0, tokens).copy_(source.narrow(self._tokens, 0, tokens))

    def _ids(self, block_ids: Ints) -> torch.Tensor:
        return torch.from_numpy(block_ids).to(self._tensor.device)


class CopyBackPath:
    """HostPath for a group of a device, by torch's own copies. Keeps the group's tensors alive, not the group.

    Any thread may call it; one at a time uses the mirror. A checksum is taken from what it copies back from the device.
    """

    direct = False

    def __init__(self, cache: PagedKVCache, group: CacheGroup) -> None:
        self._step = min(group.num_blocks, max(1, MIRROR_BYTES // group.block_bytes))
        self._block_size, self._lock = group.block_size, threading.Lock()
        self._tensors: list[Mirrored] = []
        layers = {layer.name: layer for layer in group.layers}
        packed = "C" in cache.layout
        self._mirror = PagedKVCache.from_tensors(
            {name: self._mirrored(cache.tensors[name], cache.layout) for name in layers},
            cache.layout,
            value_channels={name: layer.v.channels for name, layer in layers.items()} if packed else None,
            layer_types={name: layer.type for name, layer in layers.items()},
        )
        mirrored = self._mirror.group(0)
        self._group = replace(mirrored, layers=tuple(_numbered_as(layers[m.name], m) for m in mirrored.layers))
        self._path = host_path(self._group)

    def _mirrored(self, tensors: LayerTensors, layout: str) -> LayerTensors:
        if isinstance(tensors, torch.Tensor):
            self._tensors.append(Mirrored(tensors, layout, self._step))
            return self._tensors[-1].mirror
        pair = [Mirrored(tensor, layout, self._step) for tensor in tensors]
        self._tensors += pair
        return pair[0].mirror, pair[1].mirror

    def checksum(self, span: Span) -> UInt64Array:
        sums = [np.empty((0, len(self._group.slices)), np.uint64)]
        for _, part, here in self._parts(span):
            with self._lock:
                self._fetch(part)
                sums.append(self._path.checksum(here))
        return np.concatenate(sums)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        return self._path.staging_checksum(span, staging)

    def gather(self, span: Span, staging: Bytes) -> None:
        for first, part, here in self._parts(span):
            with self._lock:
                self._fetch(part)
                self._path.gather(here, staging[first : first + len(part)])

    def scatter(self, span: Span, staging: Bytes) -> None:
        for first, part, here in self._parts(span):
            with self._lock:
                self._path.scatter(here, staging[first : first + len(part)])
                for tensor in self._tensors:
                    tensor.push(part.block_ids, part.valid, self._block_size)

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        raise TypeError(STAGED_ONLY)

    def land(self, *feed: object) -> int:
        raise TypeError(STAGED_ONLY)

    def _fetch(self, part: Span) -> None:
        for tensor in self._tensors:
            tensor.fetch(part.block_ids)

    def _parts(self, span: Span) -> Iterator[tuple[int, Span, Span]]:
        """(first index, blocks in the cache, the same blocks in the mirror), as many as the mirror holds."""
        for first in range(0, len(span), self._step):
            part = span.take(np.arange(first, min(first + self._step, len(span))))
            yield first, part, Span(part.start, np.arange(len(part), dtype=np.int64), part.first_tokens, part.valid)


def _numbered_as(layer: LayerCache, mirror: LayerCache) -> LayerCache:
    return replace(mirror, first_head=layer.first_head, heads_before=layer.heads_before)
