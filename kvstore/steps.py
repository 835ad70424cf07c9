"""Hashes of a request in smaller steps than its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError, LengthMismatch
from kvstore.messages import as_words, pack_strings, signed_words, unpack_strings
from kvstore.span import Span


@dataclass(frozen=True, eq=False)
class Finer:
    """Hashes of a request at more places than its blocks' ends: after every `tokens` tokens from the first block's beginning
    on, and at the last block's end."""

    tokens: int
    hashes: list[bytes]


def whole_blocks(steps: list[bytes], block_size: int, hash_block_size: int | None) -> tuple[list[bytes], Finer | None]:
    """The hashes of the whole blocks of a request, from hashes after every hash_block_size tokens, and those. Raises
    ConfigError."""
    if hash_block_size is None or hash_block_size == block_size:
        return steps, None
    times = _times(block_size, hash_block_size)
    whole = len(steps) // times * times
    return steps[times - 1 : whole : times], Finer(hash_block_size, steps[:whole])


def blocks_of(
    steps: list[bytes], span: Span, block_size: int, hash_block_size: int
) -> tuple[list[bytes], Finer | None]:
    """The hashes of a span's blocks, from hashes after every hash_block_size tokens, and those. Raises ConfigError, or
    LengthMismatch where there are not as many as the span's tokens have steps."""
    times, tokens = _times(block_size, hash_block_size), int(span.valid.sum())
    expected = -(-tokens // hash_block_size)
    if len(steps) != expected:
        raise LengthMismatch(
            f"{len(steps)} block_hashes for {tokens} tokens and a hash_block_size of {hash_block_size}: expected {expected}"
        )
    hashes = [steps[min((i + 1) * times, len(steps)) - 1] for i in range(len(span))]
    return hashes, Finer(hash_block_size, steps) if times > 1 else None


def _times(block_size: int, hash_block_size: object) -> int:
    whole = isinstance(hash_block_size, int) and not isinstance(hash_block_size, bool) and hash_block_size > 0
    if not isinstance(hash_block_size, int) or not whole or block_size % hash_block_size:
        raise ConfigError(
            f"hash_block_size is {hash_block_size!r}: expected a number of tokens that divides the block size {block_size}"
        )
    return block_size // hash_block_size


def finer_blobs(finer: Finer | None) -> list[Any]:
    """The blobs of a question's finer hashes, empty ones where it has none."""
    return [b"", b"", b""] if finer is None else [as_words([finer.tokens]), *pack_strings(finer.hashes)]


def finer_hashes(tokens: bytes | memoryview, lengths: bytes | memoryview, strings: bytes | memoryview) -> Finer | None:
    """What `finer_blobs` made blobs of. Raises ValueError."""
    if not len(tokens):
        return None
    found = Finer(int(signed_words(tokens)[0]), unpack_strings(lengths, strings))
    if found.tokens < 1:
        raise ValueError(f"hashes after every {found.tokens} tokens")
    return found
