"""The kernels' launches over one group's blocks: the only door to kvstore.kernels.

Every call enqueues on the current stream, one launch for each form of slices (kvstore.kernels.tables), and neither waits
nor allocates. Rows are int64 (rows, 5) on the device, as `write_rows` makes them.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import CacheGroup, LayerCache
from kvstore.checksum import slice_factor
from kvstore.kernels.checksum import checksum_blocks, checksum_slices
from kvstore.kernels.copy import gather, scatter
from kvstore.kernels.state import STATE_AXES, StateAxis, StateEntry, checksum_states, merge_axes, state_table
from kvstore.kernels.tables import MAX_INDEX, ROW_COLUMNS, SliceEntry, slice_tables
from kvstore.span import Span
from kvstore.states import State, StateGroup

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


class StateLaunches:
    """The launches of one group of states: one for each form of them. Holds addresses, as Launches. Rows are int64 (rows, 2)
    on the device: slot, index of the output."""

    def __init__(self, group: StateGroup, device: torch.device) -> None:
        self._tables = [
            state_table(entries, axes, itemsize, device) for (axes, itemsize), entries in state_forms(group).items()
        ]

    def checksum_blocks(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Add c of each row's slot to out, (blocks,) int64."""
        for table in self._tables:
            checksum_states(table, rows, out)


StateForm = tuple[tuple[StateAxis, ...], int]
"""The axes of rows that lie alike, without the slots', and bytes of an element."""


def state_forms(group: StateGroup) -> dict[StateForm, list[StateEntry]]:
    """The rows of a group's states as they follow each other in memory, by form."""
    forms: dict[StateForm, list[StateEntry]] = {}
    for layer in group.layers:
        first_index = 0
        for origin, state in zip(layer.origins, layer.states, strict=True):
            split = layer.rank is None
            for first, count, local in state.pieces:
                row = origin + first if split else layer.rank or 0
                entry = StateEntry(
                    *(state.address + local * state.row_stride, state.slot_stride, slice_factor(layer.number, row)),
                    first_index,
                )
                forms.setdefault((_state_axes(state, count), state.itemsize), []).append(entry)
            first_index += 0 if split else state.elements
    return forms


def _state_axes(state: State, rows: int) -> tuple[StateAxis, ...]:
    item, index, axes = state.itemsize, 1, [StateAxis(rows, state.row_stride // state.itemsize, 1, 0)]
    for size, stride in reversed(state.axes):
        axes.append(StateAxis(size, stride // item, 0, index))
        index *= size
    return merge_axes(axes)


def states_unserved(group: StateGroup) -> str | None:
    """Why the kernel cannot sum a group's states, None where it can."""
    for (axes, itemsize), entries in state_forms(group).items():
        if len(axes) > STATE_AXES:
            return f"a state has {len(axes)} axes that do not merge: at most {STATE_AXES}"
        if prod(axis.size for axis in axes) >= MAX_INDEX:
            return f"a state has {MAX_INDEX} elements a slot or more"
        if any((entry.address | entry.slot_stride) % itemsize for entry in entries):
            return f"a state of {itemsize}-byte elements is not aligned to them"
    return None


__all__ = [
    "ROW_COLUMNS",
    "Launches",
    "StateLaunches",
    "engine_entries",
    "staging_entries",
    "state_forms",
    "states_unserved",
    "write_rows",
]
