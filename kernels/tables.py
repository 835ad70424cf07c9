"""What one launch works on, and its configuration: plain Python and tensors, no kernel.

A SliceTable lists slices of equal form (one layer and one KV head each; docs/checksum.md), of all layers of a group.
Rows say which tokens: int64 (rows, ROW_COLUMNS), contiguous, on the table's device, with the columns

    block id, token offset in the page, tokens, request position of the first token, output index

A row names consecutive tokens of one page, so a table of another block size is summed by cutting or joining rows. A
row of no tokens does nothing, and may fill a batch up. Ids, offsets and tokens are trusted: the caller has checked
that they lie in the cache, keeps its memory alive, and has made the table's device and a stream current: every call
is one launch there.

A kernel is compiled once for each form (bytes of K and V, token strides, alignment; for a gather the block size too)
and never again for other rows, addresses or numbers of slices but the few that fill no program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

ROW_COLUMNS = 5
PIECE_BYTES = 8
"""Bytes of a piece, the unit that the checksum weighs."""
VECTOR_BYTES = 16
"""The widest access of one thread."""
MAX_INDEX = 2**30
"""Bounds the pieces of a slice and the elements of a state: twice an index plus one stays below 2**31."""
MAX_PROGRAMS = 2**31
"""Bounds the programs of a launch."""
MAX_WARPS = 4
"""Warps of 32 threads of a program."""


class SliceEntry(NamedTuple):
    """Where one slice lies: bytes and byte strides, multiples of 8. K's fields describe the whole cell where K and V of
    a token are one run; V's are then 0. Addresses are absolute, or offsets from the staging that a call names."""

    k_address: int
    k_block_stride: int
    k_token_stride: int
    k_bytes: int
    v_address: int = 0
    v_block_stride: int = 0
    v_token_stride: int = 0
    v_bytes: int = 0
    factor: int = 1
    """m, an odd uint64."""
    number: int = 0
    """The slice's number among its group's, in canonical order."""
    staging_offset: int = 0
    """Bytes from a staged block's start to the slice."""

    @property
    def form(self) -> tuple[int, int, int, int]:
        """What a launch is compiled for: slices of one form go in one launch."""
        return self.k_bytes, self.v_bytes, self.k_token_stride, self.v_token_stride

    @property
    def alignment(self) -> int:
        """A number that 16 divides if it divides every address of the slice, in the cache and in staging."""
        return self.staging_offset | self._alignment | (self.k_bytes + self.v_bytes)

    @property
    def _alignment(self) -> int:
        k = self.k_address | self.k_block_stride | self.k_token_stride | self.k_bytes
        return k | self.v_address | self.v_block_stride | self.v_token_stride | self.v_bytes


@dataclass(frozen=True, eq=False)
class SliceTable:
    """Slices of one form on a device.

    columns: (7, slices) int64: K's address, K's block stride, V's address, V's block stride, m, number,
    staging offset. group_slices: slices of the whole group, block_size: tokens of a page, block_bytes: bytes of
    a staged block, vector_bytes: the widest access that every address allows, 16 or 8.
    """

    columns: torch.Tensor
    k_bytes: int
    v_bytes: int
    k_token_stride: int
    v_token_stride: int
    group_slices: int
    block_size: int
    block_bytes: int
    vector_bytes: int

    @property
    def slices(self) -> int:
        return self.columns.shape[1]

    @property
    def pieces(self) -> int:
        """Pieces of a page in the larger plane."""
        return self.block_size * max(self.k_bytes, self.v_bytes) // PIECE_BYTES


def slice_tables(
    entries: Sequence[SliceEntry], block_size: int, block_bytes: int, device: torch.device
) -> list[SliceTable]:
    """The slices of a group, or of one of its ranks, as one table for each form, in the order given.

    Programs take neighbours side by side, so entries in the order of their addresses read memory in order.
    block_size: tokens of a page; block_bytes: bytes of a staged block.
    """
    forms: dict[tuple[int, int, int, int], list[SliceEntry]] = {}
    for entry in entries:
        _check_entry(entry, block_size, len(entries))
        forms.setdefault(entry.form, []).append(entry)
    return [_slice_table(e, len(entries), block_size, block_bytes, device) for e in forms.values()]


def _check_entry(entry: SliceEntry, block_size: int, group_slices: int) -> None:
    pieces = block_size * (entry.k_bytes + entry.v_bytes) // PIECE_BYTES
    assert entry.alignment % PIECE_BYTES == 0, f"{entry}: expected multiples of {PIECE_BYTES} bytes"
    assert 0 <= entry.number < group_slices, f"{entry}: expected numbers of 0 to {group_slices - 1}"
    assert 0 < pieces < MAX_INDEX, f"{entry}: a slice has 1 to {MAX_INDEX - 1} pieces"


def _slice_table(
    entries: Sequence[SliceEntry], group_slices: int, block_size: int, block_bytes: int, device: torch.device
) -> SliceTable:
    rows = [
        (e.k_address, e.k_block_stride, e.v_address, e.v_block_stride, e.factor, e.number, e.staging_offset)
        for e in entries
    ]
    alignment = block_bytes
    for entry in entries:
        alignment |= entry.alignment
    k_bytes, v_bytes, k_token_stride, v_token_stride = entries[0].form
    return SliceTable(
        columns=int64_columns(rows, device),
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        k_token_stride=k_token_stride,
        v_token_stride=v_token_stride,
        group_slices=group_slices,
        block_size=block_size,
        block_bytes=block_bytes,
        vector_bytes=VECTOR_BYTES if alignment % VECTOR_BYTES == 0 else PIECE_BYTES,
    )


def int64_columns(rows: Iterable[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Rows of integers as int64 (columns, rows) on a device; numbers from 2**63 on by their bits."""
    signed = [[v - 2**64 if v >= 2**63 else v for v in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64).t().contiguous().to(device)


def lanes() -> int:
    """Threads of a warp."""
    return 64 if torch.version.hip else 32


def slice_options(table: SliceTable, slices: int, vectors: int, warp: int) -> dict[str, int]:
    """The constants and warps of a kernel over slices; strides in pieces.

    As many warps as a page's pieces fill, and at most `slices` neighbouring slices side by side; where there are fewer,
    several vectors of each instead, at most `vectors` a thread. WIDTH is at least two pieces a thread, so that sums over
    slices stay in it. warp: threads of one.
    """
    slices = min(slices, power_of_two(table.slices))
    fill = power_of_two(-(-table.pieces // (2 * warp)))
    warps = min(MAX_WARPS * 32 // warp, fill)
    length = min(max(1, vectors // slices), fill // warps)
    return {
        "K_PIECES": table.k_bytes // PIECE_BYTES,
        "V_PIECES": table.v_bytes // PIECE_BYTES,
        "K_STRIDE": table.k_token_stride // PIECE_BYTES,
        "V_STRIDE": table.v_token_stride // PIECE_BYTES,
        "ALIGN": table.vector_bytes,
        "SLICES": slices,
        "WIDTH": 2 * warp * warps * length,
        "num_warps": warps,
    }


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device, *columns: int) -> None:
    """Assert a contiguous tensor (any, *columns) of a dtype on a device."""
    found, expected = (tensor.dtype, tensor.device, tensor.shape[1:]), (dtype, device, columns)
    assert found == expected, f"{name}: {found}, expected {expected}"
    assert tensor.is_contiguous(), f"{name}: strides {tensor.stride()}, expected a contiguous tensor"


def check_rows(table: SliceTable, rows: torch.Tensor) -> None:
    """Assert that rows are int64 (rows, ROW_COLUMNS), contiguous, on the table's device."""
    check_tensor("rows", rows, torch.int64, table.columns.device, ROW_COLUMNS)


def staging_address(table: SliceTable, staging: torch.Tensor) -> int:
    """The address of staging, uint8 (blocks, block_bytes), contiguous, on the table's device, aligned as it says."""
    check_tensor("staging", staging, torch.uint8, table.columns.device, table.block_bytes)
    address = staging.data_ptr()
    assert address % table.vector_bytes == 0, f"staging at {address}: expected a multiple of {table.vector_bytes}"
    return address
