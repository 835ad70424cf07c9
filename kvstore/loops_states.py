"""The host loops over Mamba state, compiled by numba: one call a batch, without the GIL.

Memory is walked by address. A `table` has one row for each run of rows of a state, with these int64 columns: address of
the first row in slot 0, stride of slots, stride of rows, rows; which entries of `offsets` are its row's runs of elements
(first, how many); elements of such a run, and their stride; bytes of an element; m of the first row (uint64's bits), the
number of its first element, the slice that it belongs to, and where its bytes are in a block in canonical order.
Addresses need no alignment; the caller keeps the memory alive and has checked every block id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvstore.loops_numba import compiled, copy_bytes

U64 = np.uint64
ONE, TWO = U64(1), U64(2)
COLUMNS = 13


def _load(bits: int) -> Callable[..., Any]:
    """A function that gives the unsigned integer of so many bits at an address, widened to 64."""

    def load(context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return types.uint64(types.int64), emit

    return load


load16, load32 = intrinsic(_load(16)), intrinsic(_load(32))


@compiled("uint64(int64, int64[::1], int64, int64, int64, int64)")
def row_sum(address, offsets, count, stride, itemsize, index):  # type: ignore[no-untyped-def]
    """s of a row: sum of x * (2*j + 1), j from `index` on, over runs of `count` elements at the offsets."""
    total, weight = U64(0), TWO * U64(index) + ONE
    for run in range(offsets.size):
        at = address + offsets[run]
        if itemsize == 2:
            for i in range(count):
                total += load16(at + i * stride) * (weight + TWO * U64(i))
        else:
            for i in range(count):
                total += load32(at + i * stride) * (weight + TWO * U64(i))
        weight += TWO * U64(count)
    return total


@compiled("void(int64, int64[:, ::1], int64[::1], int64[::1], uint64[:, ::1])")
def checksum(base, table, offsets, block_ids, out):  # type: ignore[no-untyped-def]
    """out[b, slice] = sum of m*s over the slice's rows in slot block_ids[b].

    base is added to every address of the table: 0 for engine memory, a buffer's address for staging.
    """
    out[:] = U64(0)
    for b in range(block_ids.size):
        for t in range(table.shape[0]):
            address = base + table[t, 0] + block_ids[b] * table[t, 1]
            runs = offsets[table[t, 4] : table[t, 4] + table[t, 5]]
            factor, total = U64(table[t, 9]), U64(0)
            for row in range(table[t, 3]):
                at = address + row * table[t, 2]
                total += factor * row_sum(at, runs, table[t, 6], table[t, 7], table[t, 8], table[t, 10])
                factor += TWO
            out[b, table[t, 11]] += total


@compiled("void(int64, int64, int64, int64, int64, boolean)")
def copy_run(engine, staged, count, stride, itemsize, inwards):  # type: ignore[no-untyped-def]
    """Copy a run of elements between the engine's memory and staging."""
    if stride == itemsize:
        if inwards:
            copy_bytes(engine, staged, count * itemsize)
        else:
            copy_bytes(staged, engine, count * itemsize)
    elif inwards:
        for i in range(count):
            if itemsize == 2:
                copy_bytes(engine + i * stride, staged + i * 2, 2)
            else:
                copy_bytes(engine + i * stride, staged + i * 4, 4)
    else:
        for i in range(count):
            if itemsize == 2:
                copy_bytes(staged + i * 2, engine + i * stride, 2)
            else:
                copy_bytes(staged + i * 4, engine + i * stride, 4)


@compiled("void(int64, int64[:, ::1], int64[::1], int64[::1], int64, boolean)")
def move(base, table, offsets, block_ids, block_bytes, inwards):  # type: ignore[no-untyped-def]
    """Copy slots block_ids[b] to the staged blocks at base + b * block_bytes, or from there to the slots (inwards)."""
    for b in range(block_ids.size):
        for t in range(table.shape[0]):
            count, stride, itemsize = table[t, 6], table[t, 7], table[t, 8]
            engine, staged = table[t, 0] + block_ids[b] * table[t, 1], base + b * block_bytes + table[t, 12]
            runs, rows = offsets[table[t, 4] : table[t, 4] + table[t, 5]], table[t, 3]
            if runs.size == 1 and stride == itemsize and table[t, 2] == count * itemsize:
                count, rows = count * rows, 1
            for row in range(rows):
                for run in range(runs.size):
                    copy_run(engine + row * table[t, 2] + runs[run], staged, count, stride, itemsize, inwards)
                    staged += count * itemsize
