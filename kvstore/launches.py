"""The kernels' launches over one group's blocks: the only door to kvstore.kernels.

Every call enqueues on the current stream, one launch for each form of slices (kvstore.kernels.tables), and neither waits
nor allocates. Rows are int64 (rows, 5) on the device, as `write_rows` makes them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import CacheGroup, LayerCache
from kvstore.kernels.checksum import checksum_blocks, checksum_slices
from kvstore.kernels.copy import gather, scatter
from kvstore.kernels.tables import ROW_COLUMNS, SliceEntry, slice_tables
from kvstore.span import Span

Ints = npt.NDArray[np.int64]


def write_rows(span: Span, rows: Ints) -> None:
    """Fill (blocks, ROW_COLUMNS) int64 with a span's blocks: block id, 0, valid tokens, first token, index."""
    rows[:, 0] = span.block_ids
    rows[:, 1] = 0
    rows[:, 2] = span.valid
    rows[:, 3] = span.first_tokens
    rows[:, 4] = np.arange(len(span))


class Launches:
    """The launches of one group. Holds addresses: the PagedKVCache that owns the group keeps their memory alive.

    Immutable after construction; any thread may use it, with a stream of the group's device as its current one.
    """

    def __init__(self, group: CacheGroup, device: torch.device) -> None:
        self.num_slices, self.block_bytes = len(group.slices), group.block_bytes
        sizes = group.block_size, group.block_bytes, device
        self._tables = slice_tables(engine_entries(group), *sizes)
        self._staging_tables = slice_tables(staging_entries(group), *sizes)

    def checksum_blocks(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add c of each row's block in the engine's cache to out, (blocks,) int64."""
        for table in self._tables:
            checksum_blocks(table, rows, out)

    def checksum_slices(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add s of each row's slices in the engine's cache to out, (blocks, slices) int64."""
        for table in self._tables:
            checksum_slices(table, rows, out)

    def checksum_staged(self, rows: torch.Tensor, out: torch.Tensor, staging: torch.Tensor) -> None:
        """Add c of each row's staged block to out, (blocks,) int64; rows number the rows of staging."""
        for table in self._staging_tables:
            checksum_blocks(table, rows, out, staging)

    def gather(self, rows: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy the rows' blocks to staging on the device, (blocks, block bytes) uint8; other slots become zero."""
        for table in self._tables:
            gather(table, rows, staging)

    def scatter(self, rows: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy staged blocks' valid tokens to the rows' blocks, and nothing past them."""
        for table in self._tables:
            scatter(table, rows, staging)


def engine_entries(group: CacheGroup) -> list[SliceEntry]:
    """Where a group's slices lie in the engine's memory, layer by layer in the order of their addresses."""
    factors = group.factors.tolist()
    entries = [_engine_entry(group, number, factors[number]) for number in range(len(group.slices))]
    return sorted(entries, key=lambda entry: (group.slices[entry.number].row, entry.k_address))


def _engine_entry(group: CacheGroup, number: int, factor: int) -> SliceEntry:
    part = group.slices[number]
    fields = _plane_fields(group.layers[part.row], part.local_head)
    offset = int(group.offsets[number])
    return SliceEntry(*fields)._replace(factor=factor, number=number, staging_offset=offset)


def _plane_fields(layer: LayerCache, head: int) -> list[int]:
    fields: list[int] = []
    for plane in layer.planes:
        fields += [plane.address + head * plane.head_stride, plane.block_stride, plane.token_stride, plane.nbytes]
    return fields


def staging_entries(group: CacheGroup) -> list[SliceEntry]:
    """Where a group's slices lie in a staged block: offsets, and whole cells as K."""
    cells = [nbytes // group.block_size for nbytes in group.slice_bytes]
    places = enumerate(zip(group.offsets.tolist(), cells, group.factors.tolist(), strict=False))
    return [
        SliceEntry(offset, group.block_bytes, cell, cell, factor=factor, number=number, staging_offset=offset)
        for number, (offset, cell, factor) in places
    ]


__all__ = ["ROW_COLUMNS", "Launches", "engine_entries", "staging_entries", "write_rows"]
