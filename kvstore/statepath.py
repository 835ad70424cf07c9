"""The CPU's loops over a group of Mamba states: compiled (kvstore.loops_states), or numpy where numba is not installed.

Valid tokens and positions are in no sum and no copy here: a block is the whole state.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array
from kvstore.hostpath import STAGED_ONLY, StagingSums, compiled_loops, staging_sums
from kvstore.loops_states_numpy import NumpyStates, NumpyStateStaging
from kvstore.span import Span
from kvstore.stategeometry import Segment

if TYPE_CHECKING:
    from kvstore.shape import GroupShape
    from kvstore.states import Place, StateGroup

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class StatePath:
    """What StatePaths have in common: they move staged blocks only."""

    direct = False

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        raise TypeError(STAGED_ONLY)

    def land(self, *feed: object) -> int:
        raise TypeError(STAGED_ONLY)


class NumpyStatePath(StatePath):
    """HostPath by numpy calls."""

    def __init__(self, group: StateGroup) -> None:
        self._loops = NumpyStates(group)

    def checksum(self, span: Span) -> UInt64Array:
        return self._loops.checksum(span.block_ids)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        return self._loops.staging_checksum(staging)

    def gather(self, span: Span, staging: Bytes) -> None:
        self._loops.gather(span.block_ids, staging)

    def scatter(self, span: Span, staging: Bytes) -> None:
        self._loops.scatter(span.block_ids, staging)


class NumbaStateStaging:
    """Checksums of staged states by the compiled loops. Any thread may call it."""

    def __init__(self, segments: Sequence[Segment], loops: ModuleType) -> None:
        self._loops, self._num_slices = loops, segments[-1].slice + 1
        self._block_bytes = segments[-1].offset + segments[-1].part.nbytes
        self._staging = _table(_staging_row(segment, self._block_bytes) for segment in segments)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        return self._sums(_address(staging), self._staging, np.arange(staging.shape[0], dtype=np.int64))

    def _sums(self, base: int, table: tuple[Ints, Ints], block_ids: Ints) -> UInt64Array:
        out = np.empty((block_ids.size, self._num_slices), np.uint64)
        self._loops.checksum(base, *table, np.ascontiguousarray(block_ids), out)
        return out


class NumbaStatePath(StatePath, NumbaStateStaging):
    """HostPath by the compiled loops. Holds addresses: the PagedKVCache that owns the group keeps their memory alive. Does
    not keep the group alive, which keeps it."""

    def __init__(self, group: StateGroup, loops: ModuleType) -> None:
        super().__init__(group.segments, loops)
        self._engine = _table(_engine_row(place) for place in group.places)

    def checksum(self, span: Span) -> UInt64Array:
        return self._sums(0, self._engine, span.block_ids)

    def gather(self, span: Span, staging: Bytes) -> None:
        self._move(span, staging, False)

    def scatter(self, span: Span, staging: Bytes) -> None:
        self._move(span, staging, True)

    def _move(self, span: Span, staging: Bytes, inwards: bool) -> None:
        ids = np.ascontiguousarray(span.block_ids)
        self._loops.move(_address(staging), *self._engine, ids, self._block_bytes, inwards)


Row = tuple[list[int], tuple[int, ...]]
"""A table's row without its two columns of offsets, and the offsets."""


def _engine_row(place: Place) -> Row:
    state, part = place.state, place.segment.part
    offsets, count, stride = state.runs
    lies = [place.address, state.slot_stride, state.row_stride, part.rows]
    return [*lies, count, stride, part.itemsize, *_weighed(place.segment)], offsets


def _staging_row(segment: Segment, block_bytes: int) -> Row:
    part = segment.part
    lies = [segment.offset, block_bytes, part.elements * part.itemsize, part.rows]
    return [*lies, part.elements, part.itemsize, part.itemsize, *_weighed(segment)], (0,)


def _weighed(segment: Segment) -> list[int]:
    factor = int(np.uint64(segment.factor).astype(np.int64))
    return [factor, segment.first_index, segment.slice, segment.offset]


def _table(rows: Iterable[Row]) -> tuple[Ints, Ints]:
    table: list[list[int]] = []
    offsets: list[int] = []
    known: dict[tuple[int, ...], int] = {}
    for row, own in rows:
        if own not in known:
            known[own] = len(offsets)
            offsets += own
        table.append([*row[:4], known[own], len(own), *row[4:]])
    return np.array(table, np.int64), np.array(offsets, np.int64)


def _address(staging: Bytes) -> int:
    if not staging.flags.c_contiguous:
        raise ValueError("staging must be contiguous")
    return int(staging.ctypes.data)


@cache
def _compiled_states() -> ModuleType | None:
    """The compiled loops over states, None where numba is not there or does not work, which is said once in the log."""
    if compiled_loops() is None:
        return None
    try:
        return importlib.import_module("kvstore.loops_states")
    except Exception as error:
        # Whatever keeps numba from compiling, numpy does the work.
        log.warning("numba does not work (%s: %s): states are moved and summed in numpy", type(error).__name__, error)
        return None


# No path refers to its group: an entry goes with its key.
_paths: WeakKeyDictionary[StateGroup, Any] = WeakKeyDictionary()


def state_path(group: StateGroup) -> NumbaStatePath | NumpyStatePath:
    """The group's path on the CPU, made once a group."""
    path = _paths.get(group)
    if path is None:
        loops = _compiled_states()
        path = _paths[group] = NumpyStatePath(group) if loops is None else NumbaStatePath(group, loops)
    found: NumbaStatePath | NumpyStatePath = path
    return found


def shape_sums(shape: GroupShape) -> StagingSums:
    """Checksums of a group's staged blocks, of tokens or of states."""
    if not shape.of_states:
        return staging_sums(shape)
    loops = _compiled_states()
    if loops is not None:
        return NumbaStateStaging(shape.segments, loops).staging_checksum
    staging = NumpyStateStaging(shape.segments)
    return lambda span, staged: staging.staging_checksum(staged)
