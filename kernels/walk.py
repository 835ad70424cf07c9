"""What the kernels over slices share: the columns of tables and rows, and the way to the pieces of a page."""

from __future__ import annotations

import triton
import triton.language as tl

K_PLANE = tl.constexpr(0)
V_PLANE = tl.constexpr(2)
"""A plane's two columns in a slice table: address, block stride."""
FACTOR = tl.constexpr(4)
NUMBER = tl.constexpr(5)
STAGING_OFFSET = tl.constexpr(6)
ROW_COLUMNS = tl.constexpr(5)


@triton.jit
def read_row(p_rows, i_row):  # type: ignore[no-untyped-def]
    """Block id, token offset in the page, tokens (int32), position of the first token, output index."""
    p_row = p_rows + i_row.to(tl.int64) * ROW_COLUMNS
    tokens = tl.load(p_row + 2).to(tl.int32)
    return tl.load(p_row), tl.load(p_row + 1), tokens, tl.load(p_row + 3), tl.load(p_row + 4)


@triton.jit
def read_column(p_table, slices, i_slices, m_slices, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A column of a slice table for some slices, 0 for those that do not exist."""
    return tl.load(p_table + COLUMN * slices + i_slices, mask=m_slices, other=0)


@triton.jit
def pointers(b_address, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses (slices,), multiples of ALIGN, as pointers to pieces (slices, 1)."""
    p_pieces = b_address.to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.multiple_of(p_pieces[:, None], (ALIGN, ALIGN))


@triton.jit
def plane_pointers(  # type: ignore[no-untyped-def]
    p_table,
    base,
    slices,
    i_slices,
    m_slices,
    i_block,
    o_token,
    PLANE: tl.constexpr,
    STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Pointers (slices, 1) to the token o_token of each slice's plane in a block; STRIDE counts pieces."""
    b_address = base + read_column(p_table, slices, i_slices, m_slices, PLANE)
    b_stride = read_column(p_table, slices, i_slices, m_slices, PLANE + 1)
    return pointers(b_address + i_block * b_stride + o_token * (STRIDE * 8), ALIGN)


@triton.jit
def split(i_piece, PIECES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Flat indices over a plane's tokens of PIECES pieces: (token, piece in the token)."""
    i_token = i_piece // PIECES
    return i_token, i_piece - i_token * PIECES
