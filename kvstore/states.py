"""Mamba state: what a layer keeps of a request as a whole, one slot a block, and the rows that the checksum numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from kvstore.checksum import UInt64Array
from kvstore.identity import LayerSpec, StateSpec
from kvstore.stategeometry import UNSPLIT, Segment, StateRows, canonical, grid_of, segments_of, slice_bytes

CPU = torch.device("cpu")
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class StateTensor:
    """One state of a layer as its engine keeps it.

    tensor: (slots, ...), any strides, elements of 2 or 4 bytes; the slots are the group's blocks. split_axis: the tensor's
    axis that tensor parallelism splits, 1 or more: one index along it is a row; None: the split is not known, and the whole
    layer is one slice, numbered by the rank. rows: (number of the first row in the unsharded model, how many) of the rows
    that this rank has, in the order in which they lie along the axis; by default all from 0. model_rows: rows of this state
    in the unsharded model; by default what the tensor has, where `rows` names nothing else.
    """

    tensor: torch.Tensor
    split_axis: int | None
    rows: Sequence[tuple[int, int]] | None = None
    model_rows: int | None = None


@dataclass(frozen=True)
class State:
    """Where a state lies: byte address of slot 0, row 0, and byte strides; axes: (size, stride) of a row's axes in their
    order. rows: (first one's number among the state's in the model, how many), as they lie; model_rows: 0 where the split is
    not known: then a slot is one row."""

    dtype: str
    itemsize: int
    address: int
    slot_stride: int
    row_stride: int
    axes: Pairs
    rows: Pairs
    model_rows: int

    @cached_property
    def elements(self) -> int:
        """Elements of a row."""
        return int(np.prod([size for size, _ in self.axes], dtype=np.int64))

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], int, int]:
        """A row's elements in their order: the byte offsets of runs, and of each run the elements and their stride."""
        merged: list[tuple[int, int]] = []
        for size, stride in self.axes:
            if size > 1 and merged and merged[-1][1] == size * stride:
                merged[-1] = (merged[-1][0] * size, stride)
            elif size > 1:
                merged.append((size, stride))
        *outer, (count, stride) = merged or [(1, self.itemsize)]
        steps = product(*(range(0, size * step, step) for size, step in outer))
        return tuple(map(sum, steps)), count, stride

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """(first row's number, rows, index of the first one along the axis) of the ranges, by number."""
        found, local = [], 0
        for first, count in self.rows:
            found.append((first, count, local))
            local += count
        return tuple(sorted(found))

    @cached_property
    def merged_rows(self) -> Pairs:
        """The rows by number, neighbours as one range."""
        merged: list[tuple[int, int]] = []
        for first, count, _ in self.pieces:
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            else:
                merged.append((first, count))
        return tuple(merged)


@dataclass(frozen=True)
class LayerStates:
    """One layer of a group of states. dtype: those of its states, joined. rank: whose slice it is where its split is not
    known, else None. heads_before: rows of the layers of the same number whose names come first."""

    name: str
    number: int
    dtype: str
    states: tuple[State, ...]
    rank: int | None
    heads_before: int = 0
    type = "mamba"

    @property
    def model_rows(self) -> int:
        """Rows of all states in the unsharded model; where the split is not known, the ranks up to this one."""
        return sum(state.model_rows for state in self.states) if self.rank is None else self.rank + 1

    @property
    def whole(self) -> bool:
        """Whether this cache holds all of the layer's rows."""
        return not self.rank and all(s.merged_rows == ((0, s.model_rows),) for s in self.states if s.model_rows)

    @cached_property
    def origins(self) -> tuple[int, ...]:
        """The number of each state's row 0 in the layer; where the split is not known, the state's index."""
        if self.rank is not None:
            return tuple(range(len(self.states)))
        return tuple(self.heads_before + sum(s.model_rows for s in self.states[:i]) for i in range(len(self.states)))

    @property
    def entries(self) -> list[StateRows]:
        """The rows that are here, as a record describes them."""
        found: list[StateRows] = []
        for origin, state in zip(self.origins, self.states, strict=True):
            form = (state.elements, state.itemsize)
            if self.rank is not None:
                found.append(StateRows(self.number, origin, self.rank, 1, *form, UNSPLIT))
                continue
            grid = grid_of(state.model_rows, len(self.states))
            found += [StateRows(self.number, origin, origin + r, n, *form, grid) for r, n in state.merged_rows]
        return found

    def spec(self, group: int) -> LayerSpec:
        """The layer as an identity describes it."""
        states = tuple(StateSpec(s.model_rows, s.elements, s.itemsize) for s in self.states)
        return LayerSpec(self.name, self.type, self.dtype, self.model_rows, 0, 0, group, states)


@dataclass(frozen=True)
class Place:
    """Where a segment's rows lie, or those that follow each other along the axis: address in slot 0; the state tells the
    rest. segment: the rows, of which these are the ones from `offset` in a block on."""

    segment: Segment
    state: State
    address: int


@dataclass(frozen=True, eq=False)
class StateGroup:
    """One group of Mamba states: layers in order of number, then name, all with the same slots. block_size: tokens that a
    block stands for; a block's bytes do not depend on them.

    Immutable and safe to share between threads; compares and hashes by identity.
    """

    number: int
    layers: tuple[LayerStates, ...]
    block_size: int
    num_blocks: int
    device: torch.device = CPU
    window = None
    looks_back = 1
    """Tokens before a prefix's end that whoever goes on there needs of this group: its last block has the state."""

    @cached_property
    def entries(self) -> tuple[StateRows, ...]:
        """The rows of all layers in canonical order."""
        return tuple(sorted((e for layer in self.layers for e in layer.entries), key=canonical))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The parts of a block's slices, in canonical order."""
        return tuple(segments_of(self.entries))

    @cached_property
    def slice_bytes(self) -> tuple[int, ...]:
        """Bytes of each slice: of each range of rows, in canonical order."""
        return tuple(slice_bytes(self.segments))

    @cached_property
    def factors(self) -> UInt64Array:
        """Of each slice, (slices,) uint64: 1, since a range's sum has its rows' factors inside."""
        return np.ones(len(self.slice_bytes), np.uint64)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(self.slice_bytes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Where the segments lie."""
        own = {
            (layer.number, origin): state
            for layer in self.layers
            for origin, state in zip(layer.origins, layer.states, strict=True)
        }
        return tuple(place for s in self.segments for place in _places(s, own[s.part.layer, s.part.origin]))


def _places(segment: Segment, state: State) -> list[Place]:
    part = segment.part
    if part.grid == UNSPLIT:
        return [Place(segment, state, state.address)]
    start, found = part.first_row - part.origin, []
    for first, count, local in state.pieces:
        a, b = max(first, start), min(first + count, start + part.rows)
        if a < b:
            rows = part._replace(first_row=part.origin + a, rows=b - a)
            offset = segment.offset + (a - start) * part.elements * part.itemsize
            address = state.address + (local + a - first) * state.row_stride
            found.append(Place(segment._replace(offset=offset, part=rows), state, address))
    return found
