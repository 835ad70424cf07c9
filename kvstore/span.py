"""Consecutive blocks of one request, as a call names them: positions, valid tokens and block ids, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.checksum import MAX_HASH_BYTES, MIN_HASH_BYTES, check_block_hash, num_valid_tokens
from kvstore.errors import (
    DuplicateBlockId,
    InvalidBlockHash,
    InvalidBlockId,
    InvalidPosition,
    LengthMismatch,
    NoValidTokens,
)

if TYPE_CHECKING:
    from kvstore.cache import AnyGroup

Ints = npt.NDArray[np.int64]
MAX_TOKENS = 2**62
"""Token numbers stay far inside int64."""


class Sized(Protocol):
    """What has a number of bytes."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""


class Blocks(Protocol):
    """What staged blocks are made of: block_size tokens of each slice, in canonical order."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    @property
    def slices(self) -> Sequence[Sized]:
        """The slices of a block."""

    @property
    def offsets(self) -> Ints:
        """Offset of each slice in a block, and their end: (slices + 1,) int64."""


@dataclass(frozen=True, eq=False)
class Span:
    """Blocks at the positions start, start + 1, ... of a request. All arrays int64, one entry a block."""

    start: int
    block_ids: Ints
    first_tokens: Ints
    valid: Ints

    def __len__(self) -> int:
        return self.block_ids.size

    def take(self, indices: Sequence[int] | Ints) -> Span:
        """The chosen blocks; `start` then no longer numbers them, first_tokens does."""
        at = np.asarray(indices, np.int64)
        return Span(self.start, self.block_ids[at], self.first_tokens[at], self.valid[at])


def check_span(group: AnyGroup, block_ids: Sequence[int], start: int = 0, num_tokens: int | None = None) -> Span:
    """The blocks of a call as a Span.

    Raises InvalidBlockId, DuplicateBlockId, InvalidPosition or NoValidTokens.
    """
    ids = _block_ids(block_ids, group.num_blocks)
    first, end = _whole(start, "start"), (_whole(start, "start") + ids.size) * group.block_size
    tokens = end if num_tokens is None else _whole(num_tokens, "num_tokens")
    if end > MAX_TOKENS:
        raise InvalidPosition(f"start {start}: its last block would end at token {end}: expected at most {MAX_TOKENS}")
    if tokens > end:
        tokens = end
    if ids.size and not num_valid_tokens(first + ids.size - 1, group.block_size, tokens):
        raise NoValidTokens(
            f"{ids.size} blocks from position {first} and num_tokens {tokens}: the block at position "
            f"{max(first, -(-tokens // group.block_size))} starts past the last token (block_size {group.block_size}); "
            "leave out blocks without a valid token"
        )
    first_tokens = (first + np.arange(ids.size, dtype=np.int64)) * group.block_size
    return Span(first, ids, first_tokens, np.minimum(group.block_size, tokens - first_tokens))


def as_hashes(block_hashes: Sequence[bytes]) -> list[bytes]:
    """The hashes as bytes; raises InvalidBlockHash."""
    if not isinstance(block_hashes, Iterable):
        raise InvalidBlockHash(f"block_hashes is a {type(block_hashes).__name__}: expected a list of bytes")
    hashes = list(block_hashes)
    # By sets, since a lookup checks a thousand of them: nearly always one type and one length.
    if set(map(type, hashes)) <= {bytes} and all(MIN_HASH_BYTES <= n <= MAX_HASH_BYTES for n in set(map(len, hashes))):
        return hashes
    return [check_block_hash(h, i) for i, h in enumerate(hashes)]


def check_hashes(block_hashes: Sequence[bytes], blocks: int | None = None) -> list[bytes]:
    """The hashes as bytes; raises InvalidBlockHash, or LengthMismatch where there are not `blocks` of them."""
    hashes = as_hashes(block_hashes)
    if blocks is not None and len(hashes) != blocks:
        raise LengthMismatch(f"{len(hashes)} block_hashes and {blocks} block_ids: expected one id for each hash")
    if len(set(hashes)) != len(hashes):
        twice = next(h for h in hashes if hashes.count(h) > 1)
        raise InvalidBlockHash(
            f"block hash {twice.hex()} is given twice: consecutive blocks of a request have different chained hashes"
        )
    return hashes


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise InvalidPosition(f"{name} is {value!r}: expected an integer of at least 0")
    return int(value)


def _block_ids(block_ids: Sequence[int], num_blocks: int) -> Ints:
    try:
        given = np.asarray(block_ids).copy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidBlockId(f"block_ids is {block_ids!r}: expected a list of integers ({error})") from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidBlockId(
            f"block_ids has the shape {given.shape} and dtype {given.dtype}: expected a list of integers"
        )
    outside = np.flatnonzero((given < 0) | (given >= num_blocks))
    if outside.size:
        at = int(outside[0])
        raise InvalidBlockId(f"block_ids[{at}] is {int(given[at])}: the cache has the blocks 0 to {num_blocks - 1}")
    ids = given.astype(np.int64)
    values, counts = np.unique(ids, return_counts=True)
    if values.size != ids.size:
        raise DuplicateBlockId(
            f"block id {int(values[counts > 1][0])} is given twice: each block of a call needs a place of its own"
        )
    return ids
