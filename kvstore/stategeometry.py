"""The geometry of Mamba state in a record's header: rows of states, the ranges that the slice table sums, and their order.
docs/format.md is the specification.

It names no tensor. Headers may be crafted: what is expanded here is bounded by `extent` and `sound` before.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.checksum import MAX_KV_HEADS_PER_LAYER, slice_factor
from kvstore.errors import UnsupportedCache
from kvstore.runs import MAX_RUNS, stepped_runs

STATES: Final = 1
"""The bit of a header's flags: its geometry is of state runs."""
STATE_RUN: Final = struct.Struct("<IHHHHIHBB")
"""First layer, count, step, first row, rows - 1, elements of a row, origin, item size, grid."""
UNSPLIT: Final = 255
"""The grid of a layer whose split is not known: all its states are one slice."""
MAX_RANGES: Final = 64
"""Of rows in one layer and record."""
MAX_ENTRIES: Final = 2**16
"""The sum of the counts of a geometry's runs at most."""
ITEM_SIZES: Final = (2, 4)


class StateRows(NamedTuple):
    """Consecutive rows of one state of one layer.

    layer: its number; origin: the number of the state's row 0 among the layer's rows; first_row: of these rows, numbered as
    origin; elements: of a row; itemsize: bytes of an element; grid: ranges are cut at origin + i * 2**grid. Where grid is
    UNSPLIT: the one row that a whole state of a rank counts as; origin is then the state's index, first_row the rank.
    """

    layer: int
    origin: int
    first_row: int
    rows: int
    elements: int
    itemsize: int
    grid: int

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.rows * self.elements * self.itemsize

    @property
    def ranges(self) -> int:
        """How many ranges the grid cuts these rows into."""
        if self.grid == UNSPLIT:
            return 1
        start = self.first_row - self.origin
        return (start + self.rows - 1 >> self.grid) - (start >> self.grid) + 1


class Segment(NamedTuple):
    """A part of a slice: rows of one state. slice: its number; offset: of its bytes in a block; first_index: the number of
    its first element in its row, 0 but where several states are one slice."""

    slice: int
    offset: int
    part: StateRows
    first_index: int

    @property
    def factor(self) -> int:
        """m of the first row."""
        return slice_factor(self.part.layer, self.part.first_row)


def grid_of(model_rows: int, states: int) -> int:
    """Bits of the grid of a state with so many rows in the unsharded model, in a layer of so many states: the finest one
    that leaves each state its share of MAX_RANGES."""
    most = MAX_RANGES // states
    return max(0, (-(-model_rows // most) - 1).bit_length())


def encode_states(entries: Iterable[StateRows]) -> bytes:
    """The rows of a group as runs of 20 bytes: equal rows give equal bytes. Raises UnsupportedCache above MAX_RUNS runs."""
    runs = stepped_runs(sorted((*entry[1:], entry.layer) for entry in entries))
    if len(runs) > MAX_RUNS:
        raise UnsupportedCache(
            f"the states form {len(runs)} runs of equal rows, a record's header has room for {MAX_RUNS}: split the group"
        )
    return b"".join(
        STATE_RUN.pack(layer, count, step, first, rows - 1, elements, origin, itemsize, grid)
        for layer, count, step, origin, first, rows, elements, itemsize, grid in runs
    )


def state_runs(geometry: bytes) -> Iterator[tuple[int, int, StateRows]]:
    """(count, step, rows of the first layer) of each run."""
    for layer, count, step, first, more, elements, origin, itemsize, grid in STATE_RUN.iter_unpack(geometry):
        yield count, step, StateRows(layer, origin, first, more + 1, elements, itemsize, grid)


def decode_states(geometry: bytes) -> list[StateRows]:
    """The rows in canonical order: layer by layer, in it row by row. Of a geometry that is `sound`."""
    found = [
        rows._replace(layer=rows.layer + i * step) for count, step, rows in state_runs(geometry) for i in range(count)
    ]
    return sorted(found, key=canonical)


def canonical(rows: StateRows) -> tuple[int, int, int]:
    """What rows are ordered by."""
    return rows.layer, rows.first_row, rows.origin


def segments_of(entries: Sequence[StateRows]) -> list[Segment]:
    """The slices of a block in canonical order, each of one segment, or of one for each state of an unsplit layer.

    entries: in canonical order."""
    found: list[Segment] = []
    number, offset, index = -1, 0, 0
    for entry in entries:
        last = found[-1].part if found else None
        goes_on = entry.grid == UNSPLIT and last is not None and (last.layer, last.grid) == (entry.layer, UNSPLIT)
        index = index if goes_on else 0
        for part in _cut(entry):
            number += not goes_on
            found.append(Segment(number, offset, part, index))
            offset += part.nbytes
        index += entry.elements
    return found


def slice_bytes(segments: Sequence[Segment]) -> list[int]:
    """Bytes of each slice. segments: in canonical order."""
    sizes: list[int] = []
    for segment in segments:
        sizes += [0] * (segment.slice + 1 - len(sizes))
        sizes[segment.slice] += segment.part.nbytes
    return sizes


def _cut(entry: StateRows) -> Iterator[StateRows]:
    """The ranges of consecutive rows."""
    first, end = entry.first_row, entry.first_row + entry.rows
    if entry.grid == UNSPLIT:
        yield entry
        return
    while first < end:
        cut = min(end, entry.origin + ((first - entry.origin >> entry.grid) + 1 << entry.grid))
        yield entry._replace(first_row=first, rows=cut - first)
        first = cut


def state_extent(geometry: bytes) -> tuple[int, int]:
    """How many slices a block has, and how many bytes; of any bytes, without expanding them."""
    slices = raw = 0
    for count, _, rows in state_runs(geometry):
        slices += count * (rows.ranges if rows.grid != UNSPLIT else rows.origin == 0)
        raw += count * rows.nbytes
    return slices, raw


def sound_states(geometry: bytes) -> bool:
    """Whether a writer could have given these runs, each by itself."""
    runs = list(state_runs(geometry))
    return sum(count for count, _, _ in runs) <= MAX_ENTRIES and all(
        count and rows.elements and rows.itemsize in ITEM_SIZES and _numbered(rows) for count, _, rows in runs
    )


def _numbered(rows: StateRows) -> bool:
    if rows.grid == UNSPLIT:
        return rows.rows == 1 and rows.origin < MAX_RANGES
    return rows.origin <= rows.first_row and rows.first_row + rows.rows <= MAX_KV_HEADS_PER_LAYER and rows.grid <= 16


def rows_twice(geometry: bytes) -> bool:
    """Whether a geometry that is `sound` names a row twice, or a part of an unsplit layer alone."""
    layer, end, parts = -1, 0, 0
    for rows in decode_states(geometry):
        unsplit = rows.grid == UNSPLIT
        if rows.layer != layer:
            layer, end, parts = rows.layer, 0, 0
        elif unsplit != bool(parts):
            return True
        if (unsplit and (rows.origin != parts or (parts and rows.first_row != end))) or (
            not unsplit and rows.first_row < end
        ):
            return True
        end = rows.first_row if unsplit else rows.first_row + rows.rows
        parts += unsplit
    return False


def describe_states(geometry: bytes) -> str:
    """A geometry of states in words, for a rejection's detail."""
    words = sorted({(count, r.first_row, r.rows, r.elements, r.itemsize) for count, _, r in state_runs(geometry)})
    return f"states, as (layers, first row, rows, elements of a row, bytes of each): {words}"
