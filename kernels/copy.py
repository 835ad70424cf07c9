"""Paged blocks to staging and back, over all layers of a group in one launch.

Staging is uint8 (blocks, block_bytes): each row one block in canonical order, the slices where the table's offsets
say, in each of them token by token, K then V. A thread makes all loads of a step before its first store, so
that they are in flight together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvstore.kernels.tables import (
    MAX_PROGRAMS,
    SliceTable,
    check_rows,
    lanes,
    slice_options,
    staging_address,
)
from kvstore.kernels.walk import (
    K_PLANE,
    STAGING_OFFSET,
    V_PLANE,
    plane_pointers,
    pointers,
    read_column,
    read_row,
    split,
)

MAX_SLICES = 4
"""Slices that a program takes side by side, and vectors that a thread has in flight: masks too need registers."""


@triton.jit
def gather_plane(  # type: ignore[no-untyped-def]
    p_plane,
    p_staged,
    b_tokens,
    b_slots,
    slots,
    PIECES: tl.constexpr,
    CELL: tl.constexpr,
    FIRST: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy tokens of PIECES pieces to the pieces FIRST and on of staged cells of CELL, and zeros to the other slots."""
    for start in range(0, slots * PIECES, WIDTH):
        i_piece = (start + tl.arange(0, WIDTH))[None, :]
        i_token, i_in_token = split(i_piece, PIECES)
        o_plane = i_token.to(tl.int64) * STRIDE + i_in_token
        o_staged = i_token * CELL + FIRST + i_in_token
        b_x = tl.load(p_plane + o_plane, mask=i_piece < b_tokens * PIECES, other=0)
        tl.store(p_staged + o_staged, b_x, mask=i_piece < b_slots * PIECES)


@triton.jit(do_not_specialize=["p_table", "p_rows", "staging", "block_bytes", "slices", "chunks"])
def gather_kernel(  # type: ignore[no-untyped-def]
    p_table,
    p_rows,
    staging: tl.int64,
    block_bytes: tl.int64,
    slices: tl.int32,
    chunks: tl.int32,
    K_PIECES: tl.constexpr,
    V_PIECES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copy SLICES slices of one row to its staged block, zeros past its tokens.

    Strides count pieces. Program: row * chunks + chunk of SLICES slices.
    """
    i_slices = tl.program_id(0) % chunks * SLICES + tl.arange(0, SLICES)
    m_slices = i_slices < slices
    i_block, o_token, tokens, _, i_out = read_row(p_rows, tl.program_id(0) // chunks)
    b_tokens = tl.where(m_slices, tokens, 0)[:, None]
    slots = tl.where(tokens > 0, BLOCK_SIZE, 0)
    b_slots = tl.where(m_slices, slots, 0)[:, None]
    b_offset = read_column(p_table, slices, i_slices, m_slices, STAGING_OFFSET)
    p_staged = pointers(staging + i_out * block_bytes + b_offset, ALIGN)
    CELL: tl.constexpr = K_PIECES + V_PIECES

    p_k = plane_pointers(p_table, 0, slices, i_slices, m_slices, i_block, o_token, K_PLANE, K_STRIDE, ALIGN)
    gather_plane(p_k, p_staged, b_tokens, b_slots, slots, K_PIECES, CELL, 0, K_STRIDE, WIDTH)
    if V_PIECES > 0:
        p_v = plane_pointers(p_table, 0, slices, i_slices, m_slices, i_block, o_token, V_PLANE, V_STRIDE, ALIGN)
        gather_plane(p_v, p_staged, b_tokens, b_slots, slots, V_PIECES, CELL, K_PIECES, V_STRIDE, WIDTH)


def gather(table: SliceTable, rows: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy each row's tokens to the first slots of staging[its output index]; the table's slices' other slots become
    zero. Rows of no tokens change nothing.

    rows: (rows, 5) int64, see kvstore.kernels.tables; output indices differ. staging: (blocks, block_bytes) uint8.
    """
    _launch(gather_kernel, table, rows, staging, gather_options(table, lanes()))


@triton.jit
def scatter_plane(  # type: ignore[no-untyped-def]
    p_plane,
    p_staged,
    b_tokens,
    tokens,
    PIECES: tl.constexpr,
    CELL: tl.constexpr,
    FIRST: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy the pieces FIRST and on of staged cells of CELL to tokens of PIECES pieces."""
    for start in range(0, tokens * PIECES, WIDTH):
        i_piece = (start + tl.arange(0, WIDTH))[None, :]
        i_token, i_in_token = split(i_piece, PIECES)
        o_plane = i_token.to(tl.int64) * STRIDE + i_in_token
        o_staged = i_token * CELL + FIRST + i_in_token
        m_x = i_piece < b_tokens * PIECES
        b_x = tl.load(p_staged + o_staged, mask=m_x, other=0)
        tl.store(p_plane + o_plane, b_x, mask=m_x)


@triton.jit(do_not_specialize=["p_table", "p_rows", "staging", "block_bytes", "slices", "chunks"])
def scatter_kernel(  # type: ignore[no-untyped-def]
    p_table,
    p_rows,
    staging: tl.int64,
    block_bytes: tl.int64,
    slices: tl.int32,
    chunks: tl.int32,
    K_PIECES: tl.constexpr,
    V_PIECES: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy SLICES slices of one row from its staged block, its tokens alone.

    Strides count pieces. Program: row * chunks + chunk of SLICES slices.
    """
    i_slices = tl.program_id(0) % chunks * SLICES + tl.arange(0, SLICES)
    m_slices = i_slices < slices
    i_block, o_token, tokens, _, i_out = read_row(p_rows, tl.program_id(0) // chunks)
    b_tokens = tl.where(m_slices, tokens, 0)[:, None]
    b_offset = read_column(p_table, slices, i_slices, m_slices, STAGING_OFFSET)
    p_staged = pointers(staging + i_out * block_bytes + b_offset, ALIGN)
    CELL: tl.constexpr = K_PIECES + V_PIECES

    p_k = plane_pointers(p_table, 0, slices, i_slices, m_slices, i_block, o_token, K_PLANE, K_STRIDE, ALIGN)
    scatter_plane(p_k, p_staged, b_tokens, tokens, K_PIECES, CELL, 0, K_STRIDE, WIDTH)
    if V_PIECES > 0:
        p_v = plane_pointers(p_table, 0, slices, i_slices, m_slices, i_block, o_token, V_PLANE, V_STRIDE, ALIGN)
        scatter_plane(p_v, p_staged, b_tokens, tokens, V_PIECES, CELL, K_PIECES, V_STRIDE, WIDTH)


def scatter(table: SliceTable, rows: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy the first slots of staging[each row's output index] to its tokens in the paged cache, and nothing past them.

    rows: (rows, 5) int64, see kvstore.kernels.tables; no two name one token of one block. staging: (blocks,
    block_bytes) uint8.
    """
    _launch(scatter_kernel, table, rows, staging, scatter_options(table, lanes()))


def _launch(kernel: Any, table: SliceTable, rows: torch.Tensor, staging: torch.Tensor, options: dict[str, int]) -> None:
    check_rows(table, rows)
    address = staging_address(table, staging)
    chunks = -(-table.slices // options["SLICES"])
    programs = rows.shape[0] * chunks
    assert programs < MAX_PROGRAMS, f"{programs} programs: give fewer rows"
    if programs:
        kernel[(programs,)](table.columns, rows, address, table.block_bytes, table.slices, chunks, **options)


def scatter_options(table: SliceTable, warp: int) -> dict[str, int]:
    """scatter_kernel's constants and warps for a table; warp: threads of one."""
    return slice_options(table, MAX_SLICES, MAX_SLICES, warp)


def gather_options(table: SliceTable, warp: int) -> dict[str, int]:
    """gather_kernel's constants and warps for a table; warp: threads of one."""
    return {**slice_options(table, MAX_SLICES, MAX_SLICES, warp), "BLOCK_SIZE": table.block_size}
