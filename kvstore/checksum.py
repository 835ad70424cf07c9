"""The checksum of KV blocks: constants, tags and the plain numpy reference; the record classes of kvstore.protocol.

docs/checksum.md has the mathematics. The fast implementations live behind `kvstore.transfer`; this module
is what they are tested against, and depends on numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidBlockHash, InvalidPosition
from kvstore.protocol import KVChecksumBlocks as KVChecksumBlocks
from kvstore.protocol import KVChecksumGroup as KVChecksumGroup
from kvstore.protocol import KVChecksumRecord as KVChecksumRecord
from kvstore.protocol import KVChecksumScheduled as KVChecksumScheduled
from kvstore.protocol import ReplicaKey as ReplicaKey
from kvstore.protocol_wire import UInt64Array as UInt64Array

MAX_KV_HEADS_PER_LAYER = 2**16
"""Heads a layer may have: layer and head share one odd factor (vLLM's kv_checksum)."""
BLOCK_CHECKSUM_BYTES = 8
"""Bytes of one block's checksum."""
PIECE_BYTES = 8
"""Bytes of a piece, the unit that the sum weighs: 8 bytes, little-endian."""
MIN_HASH_BYTES = 8
MAX_HASH_BYTES = 64
"""A block hash is opaque and has 8 to 64 bytes."""
MASK64 = 2**64 - 1


def num_valid_tokens(position: int, block_size: int, num_tokens: int) -> int:
    """Tokens of a request of `num_tokens` that lie in its block at `position`.

    Raises InvalidPosition where an argument is no integer or negative, or block_size is not positive.
    """
    whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in (position, block_size, num_tokens))
    if not whole or position < 0 or block_size <= 0 or num_tokens < 0:
        raise InvalidPosition(
            f"position {position}, block_size {block_size}, num_tokens {num_tokens}: expected integers, position and "
            "num_tokens of at least 0 and a block_size of at least 1"
        )
    return min(block_size, max(0, num_tokens - position * block_size))


def slice_factor(layer: int, head: int) -> int:
    """The odd factor m = 2*(layer*MAX_KV_HEADS_PER_LAYER + head) + 1 of a slice, mod 2**64."""
    return (2 * (layer * MAX_KV_HEADS_PER_LAYER + head) + 1) & MASK64


def slice_factors(layers: npt.ArrayLike, heads: npt.ArrayLike) -> UInt64Array:
    """`slice_factor` over arrays of global layer and head numbers (broadcast): uint64."""
    layer, head = np.asarray(layers, np.uint64), np.asarray(heads, np.uint64)
    return np.asarray(np.uint64(2) * (layer * np.uint64(MAX_KV_HEADS_PER_LAYER) + head) + np.uint64(1), np.uint64)


def reference_slice_checksum(cells: npt.NDArray[np.uint8], first_token: int) -> int:
    """s = sum of x_j * (2*j + 1) mod 2**64 over the 8-byte pieces of one slice.

    cells: (tokens, cell bytes) uint8, K then V of each token, a whole number of pieces; first_token: the
    number of the first one in its request, so that j = token*pieces + piece counts from the request's start.
    """
    pieces = np.ascontiguousarray(cells).view("<u8").astype(np.uint64)
    index = np.arange(pieces.size, dtype=np.uint64) + np.uint64(first_token * pieces.shape[1] & MASK64)
    return int(np.sum(pieces.reshape(-1) * (np.uint64(2) * index + np.uint64(1)), dtype=np.uint64))


def reference_state_row_checksum(row: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> int:
    """s of one row of a Mamba state: its 2- or 4-byte elements, read unsigned, are the pieces, at position 0."""
    elements = row.astype(np.uint64)
    index = np.arange(elements.size, dtype=np.uint64)
    return int(np.sum(elements * (np.uint64(2) * index + np.uint64(1)), dtype=np.uint64))


def reference_block_checksum(slices: Iterable[tuple[int, int, int]]) -> int:
    """c = sum of m*s mod 2**64 over (layer, head, s) of a block's slices, or over the parts that a rank has."""
    return sum(slice_factor(layer, head) * s for layer, head, s in slices) & MASK64


def weighted_sums(slice_sums: UInt64Array, factors: UInt64Array) -> UInt64Array:
    """c of each block: (blocks, slices) of s and (slices,) of m give (blocks,) uint64, mod 2**64."""
    return np.asarray((slice_sums * factors).sum(axis=1, dtype=np.uint64), np.uint64)


def check_block_hash(block_hash: object, index: int | None = None) -> bytes:
    """The hash as bytes; raises InvalidBlockHash unless it is bytes of MIN_HASH_BYTES to MAX_HASH_BYTES.

    index: its place in block_hashes, None for a parent.
    """
    name = "parent" if index is None else f"block_hashes[{index}]"
    if not isinstance(block_hash, bytes | bytearray | memoryview):
        raise InvalidBlockHash(f"{name} is a {type(block_hash).__name__}: expected bytes")
    try:
        value = bytes(block_hash)
    except ValueError as error:
        raise InvalidBlockHash(f"{name} cannot be read: {error}: expected bytes") from None
    if not MIN_HASH_BYTES <= len(value) <= MAX_HASH_BYTES:
        raise InvalidBlockHash(
            f"{name} has {len(value)} bytes: expected {MIN_HASH_BYTES} to {MAX_HASH_BYTES}; "
            "pass the engine's chained hash unchanged"
        )
    return value


def block_checksum_tags(block_hashes: Sequence[bytes], fingerprint: int) -> UInt64Array:
    """The tag of each block, (blocks,) uint64: the hash's first 8 bytes, little-endian, XOR the group's fingerprint.

    A stored checksum is XORed with the tag, so that it matches only under the hash and layers it was stored
    for (vLLM's kv_checksum). Raises InvalidBlockHash.
    """
    heads = b"".join(check_block_hash(h, i)[:MIN_HASH_BYTES] for i, h in enumerate(block_hashes))
    return np.frombuffer(heads, "<u8").astype(np.uint64) ^ np.uint64(fingerprint & MASK64)
