"""The host loops over Mamba state in numpy: for machines without numba."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array
from kvstore.stategeometry import Segment

if TYPE_CHECKING:
    from kvstore.states import Place, StateGroup

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Elements = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def place_view(place: Place, slots: int) -> Elements:
    """A place's elements where they lie: (slots, rows, *axes of a row), writable."""
    state, rows = place.state, place.segment.part.rows
    shape = (slots, rows, *(size for size, _ in state.axes))
    strides = (state.slot_stride, state.row_stride, *(stride for _, stride in state.axes))
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + state.itemsize
    memory = memoryview((ctypes.c_uint8 * span).from_address(place.address)).cast("B")
    return np.ndarray(shape, UNSIGNED[state.itemsize], memory, 0, strides)


class NumpyStateStaging:
    """Checksums of staged states by numpy. Stateless after construction: any thread may call it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments, self._num_slices = segments, segments[-1].slice + 1

    def staging_checksum(self, staging: Bytes) -> UInt64Array:
        """The sum of each range of staged blocks, (blocks, block bytes) in canonical order: (blocks, slices) uint64."""
        out = np.zeros((staging.shape[0], self._num_slices), np.uint64)
        for segment in self._segments:
            out[:, segment.slice] += _sums(segment, staged_rows(segment, staging))
        return out


class NumpyStates(NumpyStateStaging):
    """Checksum, gather and scatter over one group of states, by numpy. Stateless after construction: any thread may call
    it. It does not keep the group alive, which keeps it."""

    def __init__(self, group: StateGroup) -> None:
        super().__init__(group.segments)
        self._places = [(place.segment, place_view(place, group.num_blocks)) for place in group.places]

    def checksum(self, block_ids: Ints) -> UInt64Array:
        """The sum of each range of the engine's slots: (blocks, slices) uint64."""
        out = np.zeros((block_ids.size, self._num_slices), np.uint64)
        for segment, view in self._places:
            out[:, segment.slice] += _sums(segment, _rows(view[block_ids]))
        return out

    def gather(self, block_ids: Ints, staging: Bytes) -> None:
        """Copy the engine's slots to staging, (blocks, block bytes)."""
        for segment, view in self._places:
            staged_rows(segment, staging)[...] = _rows(view[block_ids])

    def scatter(self, block_ids: Ints, staging: Bytes) -> None:
        """Copy staged blocks to the engine's slots."""
        for segment, view in self._places:
            view[block_ids] = staged_rows(segment, staging).reshape(block_ids.size, *view.shape[1:])


def staged_rows(segment: Segment, staging: Bytes) -> Elements:
    """A segment's elements in staged blocks: (blocks, rows, elements)."""
    part = segment.part
    shape = (staging.shape[0], part.rows, part.elements)
    strides = (staging.strides[0], part.elements * part.itemsize, part.itemsize)
    return np.ndarray(shape, UNSIGNED[part.itemsize], staging.data, segment.offset, strides)


def _rows(elements: Elements) -> Elements:
    """(blocks, rows, *axes) as (blocks, rows, elements)."""
    return elements.reshape(*elements.shape[:2], -1)


def _sums(segment: Segment, elements: Elements) -> UInt64Array:
    """The sum of m*s over rows, (blocks, rows, elements) to (blocks,) uint64."""
    two, one = np.uint64(2), np.uint64(1)
    weights = two * (np.arange(elements.shape[2], dtype=np.uint64) + np.uint64(segment.first_index)) + one
    factors = two * np.arange(elements.shape[1], dtype=np.uint64) + np.uint64(segment.factor)
    return np.asarray(np.einsum("bre,e,r->b", elements.astype(np.uint64), weights, factors), np.uint64)
