"""Sums of the pieces of KV blocks, for each block or for each slice, over all layers of a group in one launch.

With q the number of a piece among its row's, and j0 that of the row's first piece in the request, its weight is
2*(j0 + q) + 1. So s = sum of x*(2*q + 1) + 2*j0 * sum of x: weights of any position stay small, and the position
enters once, in 64 bits. Sums over slices come first: weights are then computed once for all slices side by side.
Additions mod 2**64 commute, so relaxed atomics give the same bits in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvstore.kernels.tables import (
    MAX_PROGRAMS,
    SliceTable,
    check_rows,
    check_tensor,
    lanes,
    slice_options,
    staging_address,
)
from kvstore.kernels.walk import FACTOR, K_PLANE, NUMBER, V_PLANE, plane_pointers, read_column, read_row, split

MAX_SLICES = 8
"""Slices that a program of a block's sum takes side by side."""
MAX_VECTORS = 4
"""Vectors of one slice that a thread has in flight, where a program takes few slices."""


@triton.jit
def add_plane(  # type: ignore[no-untyped-def]
    b_weighted,
    b_plain,
    p_plane,
    b_tokens,
    b_factor,
    tokens,
    PIECES: tl.constexpr,
    CELL: tl.constexpr,
    FIRST: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add m*x*(2*q + 1) and m*x, summed over slices, of tokens of PIECES pieces, pieces FIRST and on of CELL.

    p_plane: (slices, 1) to each slice's first token; b_tokens: (slices, 1), 0 where there is no slice.
    """
    for start in range(0, tokens * PIECES, WIDTH):
        i_piece = start + tl.arange(0, WIDTH)
        i_token, i_in_token = split(i_piece, PIECES)
        o_plane = (i_token.to(tl.int64) * STRIDE + i_in_token)[None, :]
        b_x = tl.load(p_plane + o_plane, mask=i_piece[None, :] < b_tokens * PIECES, other=0)
        b_sum = tl.sum(b_x * b_factor, 0)
        b_weighted += b_sum * ((i_token * CELL + FIRST + i_in_token) * 2 + 1).to(tl.int64)
        b_plain += b_sum
    return b_weighted, b_plain


@triton.jit(do_not_specialize=["p_table", "p_rows", "p_out", "base", "slices", "chunks", "out_stride"])
def checksum_kernel(  # type: ignore[no-untyped-def]
    p_table,
    p_rows,
    p_out,
    base: tl.int64,
    slices: tl.int32,
    chunks: tl.int32,
    out_stride: tl.int64,
    K_PIECES: tl.constexpr,
    V_PIECES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    BY_SLICE: tl.constexpr,
):
    """Add m*s of SLICES slices of one row to p_out[output index], or s of one slice to its column of that row.

    Strides count pieces. Program: row * chunks + chunk of SLICES slices.
    """
    i_row = tl.program_id(0) // chunks
    i_slices = tl.program_id(0) % chunks * SLICES + tl.arange(0, SLICES)
    m_slices = i_slices < slices
    i_block, o_token, tokens, first, i_out = read_row(p_rows, i_row)
    b_tokens = tl.where(m_slices, tokens, 0)[:, None]
    CELL: tl.constexpr = K_PIECES + V_PIECES
    b_factor = 1
    if not BY_SLICE:
        b_factor = read_column(p_table, slices, i_slices, m_slices, FACTOR)[:, None]

    b_weighted = tl.zeros([WIDTH], tl.int64)
    b_plain = tl.zeros([WIDTH], tl.int64)
    p_k = plane_pointers(p_table, base, slices, i_slices, m_slices, i_block, o_token, K_PLANE, K_STRIDE, ALIGN)
    b_weighted, b_plain = add_plane(
        b_weighted, b_plain, p_k, b_tokens, b_factor, tokens, K_PIECES, CELL, 0, K_STRIDE, WIDTH
    )
    if V_PIECES > 0:
        p_v = plane_pointers(p_table, base, slices, i_slices, m_slices, i_block, o_token, V_PLANE, V_STRIDE, ALIGN)
        b_weighted, b_plain = add_plane(
            b_weighted, b_plain, p_v, b_tokens, b_factor, tokens, V_PIECES, CELL, K_PIECES, V_STRIDE, WIDTH
        )

    total = tl.sum(b_weighted + b_plain * (first * (2 * CELL)), 0)
    p_total = p_out + i_out * out_stride
    if BY_SLICE:
        p_total += tl.load(p_table + NUMBER * slices + tl.program_id(0) % chunks)
    tl.atomic_add(p_total, total, sem="relaxed")


def checksum_blocks(
    table: SliceTable, rows: torch.Tensor, out: torch.Tensor, staging: torch.Tensor | None = None
) -> None:
    """Add each row's sum of m*s over the table's slices to out[its output index], mod 2**64.

    rows: (rows, 5) int64, see kvstore.kernels.tables. out: (outputs,) int64, the uint64 sums' bits, which the
    caller has set to zero; rows and tables with one output index add up. staging: (blocks, block_bytes) uint8
    where the table's addresses are offsets in a staged block; block ids then number its rows.
    """
    check_tensor("out", out, torch.int64, table.columns.device)
    _launch(table, rows, out, staging, MAX_SLICES)


def checksum_slices(
    table: SliceTable, rows: torch.Tensor, out: torch.Tensor, staging: torch.Tensor | None = None
) -> None:
    """Add each row's s of each of the table's slices to out[its output index, the slice's number], mod 2**64.

    out: (outputs, group_slices) int64, set to zero by the caller; the rest as `checksum_blocks`.
    """
    check_tensor("out", out, torch.int64, table.columns.device, table.group_slices)
    _launch(table, rows, out, staging, 1)


def _launch(
    table: SliceTable, rows: torch.Tensor, out: torch.Tensor, staging: torch.Tensor | None, most_slices: int
) -> None:
    check_rows(table, rows)
    base = 0 if staging is None else staging_address(table, staging)
    options = checksum_options(table, most_slices, lanes())
    chunks = -(-table.slices // options["SLICES"])
    programs = rows.shape[0] * chunks
    assert programs < MAX_PROGRAMS, f"{programs} programs: give fewer rows"
    if programs:
        checksum_kernel[(programs,)](table.columns, rows, out, base, table.slices, chunks, out.stride(0), **options)


def checksum_options(table: SliceTable, most_slices: int, warp: int) -> dict[str, int]:
    """The kernel's constants and warps for a table. most_slices: 1 for sums of slices; warp: threads of one."""
    return {**slice_options(table, most_slices, MAX_VECTORS, warp), "BY_SLICE": most_slices == 1}
