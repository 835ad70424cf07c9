"""The host loops in numpy: for machines without numba, and for caches whose bytes are no aligned runs.

Engine memory is seen through one byte array for each of K and V of a layer: (blocks, heads, tokens, bytes).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.checksum import PIECE_BYTES, UInt64Array
from kvstore.span import Blocks

if TYPE_CHECKING:
    from kvstore.cache import CacheGroup
    from kvstore.layout import Plane

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def plane_view(plane: Plane, blocks: int, heads: int, tokens: int) -> Bytes:
    """A plane's bytes where they lie: (blocks, heads, tokens, channels, itemsize) uint8, writable."""
    shape = (blocks, heads, tokens, plane.channels, plane.itemsize)
    strides = (plane.block_stride, plane.head_stride, plane.token_stride, plane.channel_stride, 1)
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    memory = memoryview((ctypes.c_uint8 * span).from_address(plane.address)).cast("B")
    return np.ndarray(shape, np.uint8, memory, 0, strides)


class NumpyStaging:
    """Checksums of staged blocks by numpy. Stateless after construction: any thread may call it."""

    def __init__(self, blocks: Blocks) -> None:
        self._num_slices, self._offsets, self._block_size = len(blocks.slices), blocks.offsets, blocks.block_size

    def staging_checksum(self, staging: Bytes, first_tokens: Ints, valid: Ints) -> UInt64Array:
        """s of each slice of staged blocks, (blocks, block bytes) in canonical order: (blocks, slices) uint64."""
        out = np.empty((staging.shape[0], self._num_slices), np.uint64)
        for index, chosen, tokens in self._runs(valid):
            out[chosen, index] = _sums(self._staged(staging, index)[chosen, :tokens], first_tokens[chosen])
        return out

    def _runs(self, valid: Ints) -> Iterator[tuple[int, Ints, int]]:
        """(slice, indices of blocks, their valid tokens): blocks of equal valid tokens are one numpy call."""
        for tokens in np.unique(valid):
            chosen = np.flatnonzero(valid == tokens)
            for index in range(self._num_slices):
                yield index, chosen, int(tokens)

    def _staged(self, staging: Bytes, index: int) -> Bytes:
        start, end = self._offsets[index : index + 2]
        return staging[:, start:end].reshape(staging.shape[0], self._block_size, -1)


class NumpyLoops(NumpyStaging):
    """Checksum, gather and scatter over one group, by numpy. Stateless after construction: any thread may call it.

    It does not keep the group alive, which keeps it (kvstore.hostpath.host_path)."""

    def __init__(self, group: CacheGroup) -> None:
        super().__init__(group)
        self._slices = group.slices
        self._planes = [
            [plane_view(p, group.num_blocks, layer.heads, group.block_size) for p in layer.planes]
            for layer in group.layers
        ]

    def checksum(self, block_ids: Ints, first_tokens: Ints, valid: Ints) -> UInt64Array:
        """s of each slice of the engine's blocks: (blocks, slices) uint64."""
        out = np.empty((block_ids.size, self._num_slices), np.uint64)
        for index, chosen, tokens in self._runs(valid):
            out[chosen, index] = _sums(self._cells(index, block_ids[chosen], tokens), first_tokens[chosen])
        return out

    def gather(self, block_ids: Ints, valid: Ints, staging: Bytes) -> None:
        """Copy the engine's blocks to staging, (blocks, block bytes); slots past the valid tokens become zero."""
        for index, chosen, tokens in self._runs(valid):
            target = self._staged(staging, index)
            target[chosen, :tokens] = self._cells(index, block_ids[chosen], tokens)
            target[chosen, tokens:] = 0

    def scatter(self, block_ids: Ints, valid: Ints, staging: Bytes) -> None:
        """Copy staged blocks' valid tokens to the engine's blocks, and nothing past them."""
        for index, chosen, tokens in self._runs(valid):
            cells, at = self._staged(staging, index)[chosen, :tokens], 0
            part = self._slices[index]
            for plane in self._planes[part.row]:
                size = plane.shape[3] * plane.shape[4]
                value = cells[..., at : at + size].reshape(cells.shape[:2] + plane.shape[3:])
                plane[block_ids[chosen], part.local_head, :tokens] = value
                at += size

    def _cells(self, index: int, block_ids: Ints, tokens: int) -> Bytes:
        part = self._slices[index]
        parts = [plane[block_ids, part.local_head, :tokens] for plane in self._planes[part.row]]
        return np.concatenate([p.reshape(*p.shape[:2], -1) for p in parts], axis=2)


def _sums(cells: Bytes, first_tokens: Ints) -> UInt64Array:
    """s of (blocks, tokens, cell bytes) whose first token has the number first_tokens[block]."""
    pieces = np.ascontiguousarray(cells).reshape(cells.shape[0], -1).view("<u8")
    per_token = np.uint64(cells.shape[2] // PIECE_BYTES)
    weights = np.uint64(2) * np.arange(pieces.shape[1], dtype=np.uint64) + np.uint64(1)
    start = np.uint64(2) * first_tokens.astype(np.uint64) * per_token
    return np.asarray(np.einsum("ij,j->i", pieces, weights) + start * np.einsum("ij->i", pieces), np.uint64)
