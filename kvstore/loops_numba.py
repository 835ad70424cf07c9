"""The host loops, compiled by numba: one call a batch, without the GIL, at memory speed.

Engine memory is walked by address. A `table` has one row for each slice, in the order in which the engine's
memory lies, and these int64 columns: K's address, block stride, token stride and bytes; the same for V; the
slice's canonical index; the row with which the next layer begins (the first row after the last one's), and
how many bytes of that layer's K and V the rows before this one ask for ahead. Where K and V of a cell are one run, K's
columns describe the cell and V has no bytes.
Addresses, strides and bytes are multiples of 8 (`Plane.regular`); the caller keeps the memory alive and has
checked every block id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

USABLE = not config.DISABLE_JIT
"""Whether the loops are compiled: the intrinsics exist in compiled code alone."""
U64 = np.uint64
ONE, TWO, LANES, TWICE_LANES = U64(1), U64(2), U64(8), U64(16)
VECTOR_BYTES = 64
PREFETCH_BYTES = 4096
"""How far ahead of a run the checksum asks for memory: the hardware's prefetch stops at each 4 KiB page. Where a slice
lies in short runs between those of other heads, it asks for the next layer's memory instead, each head for its share in
the order of addresses: no prefetcher follows the strides themselves."""


@intrinsic
def load64(context: Any, address: Any) -> Any:
    """The little-endian uint64 at an 8-byte aligned address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.uint64(types.int64), emit


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; never faults, whatever the address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(args[0], pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def copy_bytes(context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """memcpy between addresses that do not overlap."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(a, pointer) for a in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def zero_bytes(context: Any, target: Any, nbytes: Any) -> Any:
    """memset to zero."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def stream_bytes(context: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """memcpy whose stores bypass the caches, so that the target's old lines are not read first.

    The target's address and nbytes are multiples of 64. `store_fence` must follow before anyone else reads.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source, nbytes = args
        word = ir.IntType(64)
        pointer = ir.VectorType(word, 8).as_pointer()
        with cgutils.for_range_slice(builder, word(0), nbytes, word(VECTOR_BYTES)) as (offset, _):
            value = builder.load(builder.inttoptr(builder.add(source, offset), pointer), align=1)
            store = builder.store(value, builder.inttoptr(builder.add(target, offset), pointer), align=VECTOR_BYTES)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def store_fence(context: Any) -> Any:
    """Make all earlier stores, streamed ones too, visible to every thread."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


HEAD_BYTES = 32
receive_bytes = types.ExternalFunction("recv", types.int64(types.int32, types.int64, types.int64, types.int32))
"""recv(2): descriptor, address, bytes, flags. A symbol of the C library, which a cached loop finds again."""
send_bytes = types.ExternalFunction("send", types.int64(types.int32, types.int64, types.int64, types.int32))
"""send(2), as recv."""
NO_SIGNAL = 0x4000
"""MSG_NOSIGNAL of Linux: a closed connection is an error, and no SIGPIPE."""


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """njit for one signature without the GIL, cached on disk where that works.

    A cache that is damaged, full or cannot be written raises whatever its reading or writing does: then without it.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if not USABLE:
            return function
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:
            return njit(signature, nogil=True)(function)

    return decorate


@compiled("uint64(int64, int64, int64, int64, uint64, uint64, int64)")
def plane_sum(address, token_stride, tokens, pieces, cell_pieces, index, ahead):  # type: ignore[no-untyped-def]
    """sum of x * (2*j + 1) over `tokens` runs of `pieces`, j = index + token*cell_pieces + piece. Meanwhile as many
    bytes from `ahead` on are asked for: a hint, any address will do.

    Eight lanes run without a multiplication: `a` sums the vectors, `b` sums a after each vector, `c` sums a
    after each token; then sum(q*x) = vectors*a - b and sum(t*x) = tokens*a - c (docs/checksum.md).
    """
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = U64(0)
    b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = U64(0)
    c = U64(0)
    rest = U64(0)
    vectors = pieces // 8
    for token in range(tokens):
        at = address + token * token_stride
        for _ in range(vectors):
            prefetch(ahead)
            a0 += load64(at)
            a1 += load64(at + 8)
            a2 += load64(at + 16)
            a3 += load64(at + 24)
            a4 += load64(at + 32)
            a5 += load64(at + 40)
            a6 += load64(at + 48)
            a7 += load64(at + 56)
            b0 += a0
            b1 += a1
            b2 += a2
            b3 += a3
            b4 += a4
            b5 += a5
            b6 += a6
            b7 += a7
            at += 64
            ahead += 64
        c += a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7
        weight = TWO * (index + U64(token) * cell_pieces + LANES * U64(vectors)) + ONE
        for piece in range(pieces - vectors * 8):
            rest += load64(at + piece * 8) * (weight + TWO * U64(piece))
    a = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7
    b = b0 + b1 + b2 + b3 + b4 + b5 + b6 + b7
    lanes = a1 + U64(2) * a2 + U64(3) * a3 + U64(4) * a4 + U64(5) * a5 + U64(6) * a6 + U64(7) * a7
    by_vector = U64(tokens) * U64(vectors) * a - b
    by_token = U64(tokens) * a - c
    skipped = cell_pieces - LANES * U64(vectors)
    return rest + (TWO * index + ONE) * a + TWO * lanes + TWICE_LANES * by_vector + TWO * skipped * by_token


@compiled("void(int64, int64[:, ::1], int64[::1], int64[::1], int64[::1], uint64[:, ::1])")
def checksum(base, table, block_ids, first_tokens, valid, out):  # type: ignore[no-untyped-def]
    """out[b, slice] = s of the valid tokens in block block_ids[b], numbered from first_tokens[b].

    base is added to every address of the table: 0 for engine memory, a buffer's address for staging.
    """
    for b in range(block_ids.size):
        block, tokens, first = block_ids[b], valid[b], U64(first_tokens[b])
        after = block_ids[b + 1] if b + 1 < block_ids.size else block
        for row in range(table.shape[0]):
            k, k_stride, k_bytes = base + table[row, 0] + block * table[row, 1], table[row, 2], table[row, 3]
            v, v_stride, v_bytes = base + table[row, 4] + block * table[row, 5], table[row, 6], table[row, 7]
            cell = U64((k_bytes + v_bytes) // 8)
            if v_bytes == 0 and k_stride == k_bytes:
                total = plane_sum(k, 0, 1, tokens * k_bytes // 8, U64(0), first * cell, k + PREFETCH_BYTES)
            else:
                layer = table[row, 9]
                coming = block if layer > row else after
                ahead = base + table[layer, 0] + coming * table[layer, 1] + table[row, 10]
                total = plane_sum(k, k_stride, tokens, k_bytes // 8, cell, first * cell, ahead)
                if v_bytes > 0:
                    v_index, ahead = first * cell + U64(k_bytes // 8), base + table[layer, 4] + coming * table[layer, 5]
                    total += plane_sum(v, v_stride, tokens, v_bytes // 8, cell, v_index, ahead + table[row, 11])
            out[b, table[row, 8]] = total


@compiled("void(int64[:, ::1], int64[::1], int64[::1], int64, int64[:, ::1])")
def gather(table, block_ids, valid, block_size, targets):  # type: ignore[no-untyped-def]
    """Copy block block_ids[b]'s slices to the addresses targets[b, slice], token by token, K then V; slots past
    the valid tokens become zero."""
    for b in range(block_ids.size):
        block, tokens = block_ids[b], valid[b]
        for row in range(table.shape[0]):
            k, k_stride, k_bytes = table[row, 0] + block * table[row, 1], table[row, 2], table[row, 3]
            v, v_stride, v_bytes = table[row, 4] + block * table[row, 5], table[row, 6], table[row, 7]
            target, cell = targets[b, table[row, 8]], k_bytes + v_bytes
            if v_bytes == 0 and k_stride == k_bytes:
                copy_bytes(target, k, tokens * k_bytes)
            else:
                for token in range(tokens):
                    copy_bytes(target + token * cell, k + token * k_stride, k_bytes)
                    if v_bytes > 0:
                        copy_bytes(target + token * cell + k_bytes, v + token * v_stride, v_bytes)
            if tokens < block_size:
                zero_bytes(target + tokens * cell, (block_size - tokens) * cell)


@compiled("void(int64, int64, int64)")
def place(target, source, nbytes):  # type: ignore[no-untyped-def]
    """Copy to engine memory, streaming where whole cache lines are written."""
    if target % VECTOR_BYTES == 0 and nbytes % VECTOR_BYTES == 0:
        stream_bytes(target, source, nbytes)
    else:
        copy_bytes(target, source, nbytes)


@compiled("void(int64[:, ::1], int64[::1], int64[::1], int64[:, ::1])")
def scatter(table, block_ids, valid, sources):  # type: ignore[no-untyped-def]
    """Copy the valid tokens at the addresses sources[b, slice] into block block_ids[b], and nothing past them."""
    for b in range(block_ids.size):
        block, tokens = block_ids[b], valid[b]
        for row in range(table.shape[0]):
            k, k_stride, k_bytes = table[row, 0] + block * table[row, 1], table[row, 2], table[row, 3]
            v, v_stride, v_bytes = table[row, 4] + block * table[row, 5], table[row, 6], table[row, 7]
            source, cell = sources[b, table[row, 8]], k_bytes + v_bytes
            if v_bytes == 0 and k_stride == k_bytes:
                place(k, source, tokens * k_bytes)
            else:
                for token in range(tokens):
                    place(k + token * k_stride, source + token * cell, k_bytes)
                    if v_bytes > 0:
                        place(v + token * v_stride, source + token * cell + k_bytes, v_bytes)
    store_fence()


@compiled("int64(int64, uint8[::1], int64, int64)")
def receive_until(descriptor, received, filled, wanted):  # type: ignore[no-untyped-def]
    """Fill `received` up to `wanted` bytes at least; how many there are then, fewer where nothing comes."""
    while filled < wanted:
        got = receive_bytes(descriptor, received.ctypes.data + filled, received.size - filled, 0)
        if got <= 0:
            return filled
        filled += got
    return filled


@compiled(
    "int64(int64[:, ::1], int64[::1], int64[::1], int64[::1], int64, "
    "int64, uint64[::1], int64[::1], uint8[:, ::1], uint8[::1], int64)"
)
def land(table, block_ids, valid, offsets, block_bytes, descriptor, head, slots, taken, received, filled):  # type: ignore[no-untyped-def]
    """Take parts of a get from a connection, scatter each, and say that its slot is free again, until what comes is no
    part, or nothing comes. Returns how many bytes of `received` are filled then: they begin with what came instead.

    A part is a head of HEAD_BYTES, which begins with `head`, two words, and has its body's length as third; then words of 64
    bits: a slot, and the index of each block that lies there, block_bytes each from slots[slot] on, with slices at
    `offsets`. One that names a slot or a block out of range is left for the caller. taken: what says that a slot is free.
    """
    start = received.ctypes.data
    ids, tokens = np.empty_like(block_ids), np.empty_like(block_ids)
    sources = np.empty((block_ids.size, offsets.size), np.int64)
    while True:
        filled = receive_until(descriptor, received, filled, HEAD_BYTES)
        if filled < HEAD_BYTES or load64(start) != head[0] or load64(start + 8) != head[1]:
            return filled
        length = np.int64(load64(start + 16))
        blocks, end = length // 8 - 1, HEAD_BYTES + length
        if length % 8 != 0 or blocks < 1 or blocks > block_ids.size or end > received.size:
            return filled
        filled = receive_until(descriptor, received, filled, end)
        if filled < end:
            return filled
        slot = np.int64(load64(start + HEAD_BYTES))
        if slot < 0 or slot >= slots.size:
            return filled
        for b in range(blocks):
            index = np.int64(load64(start + HEAD_BYTES + 8 + 8 * b))
            if index < 0 or index >= block_ids.size:
                return filled
            ids[b], tokens[b] = block_ids[index], valid[index]
            for s in range(offsets.size):
                sources[b, s] = slots[slot] + b * block_bytes + offsets[s]
        scatter(table, ids[:blocks], tokens[:blocks], sources[:blocks])
        send_bytes(descriptor, taken.ctypes.data + slot * taken.shape[1], taken.shape[1], NO_SIGNAL)
        received[: filled - end] = received[end:filled]
        filled -= end
