"""Sums of Mamba state, for each block (a request's running state, always at position 0), over all layers in one launch.

A state's elements of 2 or 4 bytes are its pieces (docs/checksum.md, section 5). They are visited in the order in which
they lie in memory, whichever axis the rows are: each axis says by how much a step along it moves the row and the
element's index in its row, and each element's weight follows from the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvstore.kernels.tables import (
    MAX_INDEX,
    MAX_PROGRAMS,
    MAX_WARPS,
    VECTOR_BYTES,
    check_tensor,
    int64_columns,
    lanes,
    power_of_two,
)

STATE_AXES = 3
STATE_ROW_COLUMNS = 2
ELEMENTS_A_THREAD = 8
TILES = 8
"""Tiles of one program: each is ELEMENTS_A_THREAD elements a thread."""


class StateAxis(NamedTuple):
    """One axis of a state: `stride` counts elements; a step along it moves the row by row_step, 1 along the rows'
    axis and 0 along others, and the element's index in its row by index_step."""

    size: int
    stride: int
    row_step: int
    index_step: int


class StateEntry(NamedTuple):
    """One layer's state: byte address of slot 0, byte stride of slots, m of its row 0 (uint64), and the index of its
    first element, 0 but where several states are one slice."""

    address: int
    slot_stride: int
    factor: int
    first_index: int = 0


@dataclass(frozen=True, eq=False)
class StateTable:
    """States of one form, one a layer, on a device.

    columns: (4, layers) int64: address, slot stride, m of row 0, first index. axes: STATE_AXES of them, the one with
    the largest stride first. itemsize: bytes of an element. alignment: of every address, in bytes, at most 16.
    """

    columns: torch.Tensor
    axes: tuple[StateAxis, ...]
    itemsize: int
    alignment: int

    @property
    def layers(self) -> int:
        return self.columns.shape[1]

    @property
    def flat(self) -> bool:
        """Whether a slot's elements are one run."""
        extents = [1, self.axes[2].size, self.axes[1].size * self.axes[2].size]
        return all(a.size == 1 or a.stride == n for a, n in zip(reversed(self.axes), extents, strict=True))

    @property
    def elements(self) -> int:
        """Elements of one layer's state in one slot."""
        return self.axes[0].size * self.axes[1].size * self.axes[2].size


def state_table(
    entries: Sequence[StateEntry], axes: Iterable[StateAxis], itemsize: int, device: torch.device
) -> StateTable:
    """States of one form. axes: of all of them, without the slots', in any order. itemsize: 2 or 4 bytes."""
    merged = merge_axes(axes)
    assert itemsize in (2, 4), f"elements of {itemsize} bytes: expected 2 or 4"
    assert len(merged) <= STATE_AXES, f"{merged}: expected at most {STATE_AXES} axes that do not merge"
    padded = (StateAxis(1, 0, 0, 0),) * (STATE_AXES - len(merged)) + merged
    alignment = VECTOR_BYTES
    for entry in entries:
        alignment |= entry.address | entry.slot_stride
    alignment &= -alignment
    assert alignment >= itemsize, f"states are aligned to {alignment} bytes: expected {itemsize}"
    table = StateTable(int64_columns(entries, device), padded, itemsize, alignment)
    assert 0 < table.elements < MAX_INDEX, f"a state has 1 to {MAX_INDEX - 1} elements"
    return table


def merge_axes(axes: Iterable[StateAxis]) -> tuple[StateAxis, ...]:
    """Axes by falling stride; neighbours that one axis can stand for are one, axes of one element left out."""
    merged: list[StateAxis] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: -a.stride):
        if merged and merged[-1][1:] == tuple(axis.size * step for step in axis[1:]):
            axis = axis._replace(size=merged.pop().size * axis.size)
        merged.append(axis)
    return tuple(merged)


@triton.jit(do_not_specialize=["p_table", "p_rows", "p_out", "layers", "chunks"])
def state_checksum_kernel(  # type: ignore[no-untyped-def]
    p_table,
    p_rows,
    p_out,
    layers: tl.int32,
    chunks: tl.int32,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    STRIDE_0: tl.constexpr,
    STRIDE_1: tl.constexpr,
    STRIDE_2: tl.constexpr,
    ROW_0: tl.constexpr,
    ROW_1: tl.constexpr,
    ROW_2: tl.constexpr,
    INDEX_0: tl.constexpr,
    INDEX_1: tl.constexpr,
    INDEX_2: tl.constexpr,
    FLAT: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add m*s of TILES*WIDTH elements of one layer's state in one slot to p_out[output index]. FLAT: they are one run.

    Program: (row * layers + layer) * chunks + chunk.
    """
    i_chunk = tl.program_id(0) % chunks
    i_layer = tl.program_id(0) // chunks % layers
    p_row = p_rows + (tl.program_id(0) // chunks // layers).to(tl.int64) * 2
    i_slot, i_out = tl.load(p_row), tl.load(p_row + 1)
    address = tl.load(p_table + i_layer) + i_slot * tl.load(p_table + layers + i_layer)
    factor = tl.load(p_table + 2 * layers + i_layer)
    first = tl.load(p_table + 3 * layers + i_layer)
    if ITEMSIZE == 2:
        p_state = tl.multiple_of(address.to(tl.pointer_type(tl.uint16), bitcast=True), ALIGN)
    else:
        p_state = tl.multiple_of(address.to(tl.pointer_type(tl.uint32), bitcast=True), ALIGN)

    b_sum = tl.zeros([WIDTH], tl.int64)
    begin = i_chunk * (TILES * WIDTH)
    for start in range(begin, min(begin + TILES * WIDTH, SIZE_0 * SIZE_1 * SIZE_2), WIDTH):
        i_element = start + tl.arange(0, WIDTH)
        i_2 = i_element % SIZE_2
        i_1 = i_element // SIZE_2 % SIZE_1
        i_0 = i_element // (SIZE_2 * SIZE_1)
        if FLAT:
            o_state = i_element.to(tl.int64)
        else:
            o_state = i_0.to(tl.int64) * STRIDE_0 + i_1.to(tl.int64) * STRIDE_1 + i_2.to(tl.int64) * STRIDE_2
        b_x = tl.load(p_state + o_state, mask=i_element < SIZE_0 * SIZE_1 * SIZE_2, other=0).to(tl.int64)
        b_row = (i_0 * ROW_0 + i_1 * ROW_1 + i_2 * ROW_2).to(tl.int64)
        b_index = (i_0 * INDEX_0 + i_1 * INDEX_1 + i_2 * INDEX_2).to(tl.int64) + first
        b_sum += b_x * ((2 * b_index + 1) * (factor + 2 * b_row))
    tl.atomic_add(p_out + i_out, tl.sum(b_sum, 0), sem="relaxed")


def checksum_states(table: StateTable, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Add each row's sum of m*s over the table's states to out[its output index], mod 2**64.

    rows: (rows, 2) int64, contiguous: slot (the state's block id) and output index, both trusted. out: (outputs,)
    int64, the uint64 sums' bits, which the caller has set to zero; all of a group's tables add up there.
    """
    device = table.columns.device
    check_tensor("rows", rows, torch.int64, device, STATE_ROW_COLUMNS)
    check_tensor("out", out, torch.int64, device)
    options = state_options(table, lanes())
    chunks = -(-table.elements // (options["WIDTH"] * TILES))
    programs = rows.shape[0] * table.layers * chunks
    assert programs < MAX_PROGRAMS, f"{programs} programs: give fewer rows"
    if programs:
        state_checksum_kernel[(programs,)](table.columns, rows, out, table.layers, chunks, **options)


def state_options(table: StateTable, warp: int) -> dict[str, int]:
    """The kernel's constants and warps for a table; warp: threads of one."""
    fill = power_of_two(-(-table.elements // (ELEMENTS_A_THREAD * warp)))
    warps = min(MAX_WARPS * 32 // warp, fill)
    constants = {
        f"{name}_{i}": axis[field]
        for field, name in enumerate(("SIZE", "STRIDE", "ROW", "INDEX"))
        for i, axis in enumerate(table.axes)
    }
    width = ELEMENTS_A_THREAD * warp * warps
    shape = {"FLAT": table.flat, "ITEMSIZE": table.itemsize, "ALIGN": table.alignment, "WIDTH": width, "TILES": TILES}
    return {**constants, **shape, "num_warps": warps}
