"""Which bytes of a stored record make a block of another split over ranks, or of another block size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.shape import GroupShape

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
CUTS: Final = 64
"""Kept for the next record: those of one store have few geometries."""


class Piece(NamedTuple):
    """Slices of one cell size that follow each other on both sides. at: offset of the first in the source's raw bytes; to: in
    the block's canonical bytes; slices: how many; cell: bytes of a token in each."""

    at: int
    to: int
    slices: int
    cell: int


class Source(NamedTuple):
    """Payload chunks first to end - 1 of a record, counted from 0, that hold whole slices together, and what to take from
    them: one chunk, or those of a slice that is larger than a chunk."""

    first: int
    end: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """What a record of the shape `stored` gives a block of the shape `own`: slices own_slices, in the order of its table
    stored_slices. sources: where they lie."""

    stored: GroupShape
    own: GroupShape
    own_slices: Ints
    stored_slices: Ints
    sources: tuple[Source, ...]

    @property
    def chunks(self) -> Iterator[int]:
        """The payload chunks that must be read, from 0."""
        for source in self.sources:
            yield from range(source.first, source.end)

    def copy(self, source: Source, raw: Bytes, block: Bytes, tokens_before: int) -> None:
        """Copy what both hold of the tokens. raw: the source's raw bytes; block: canonical bytes of a block of `own`;
        tokens_before: how many tokens the block begins before the record, below 0 where it begins after it."""
        stored, own = self.stored.tokens, self.own.tokens
        first, end = max(0, tokens_before), min(own, tokens_before + stored)
        for at, to, slices, cell in source.pieces:
            there = raw[at : at + slices * stored * cell].reshape(slices, stored, cell)
            here = block[to : to + slices * own * cell].reshape(slices, own, cell)
            here[:, first:end] = there[:, first - tokens_before : end - tokens_before]


@lru_cache(maxsize=CUTS)
def shared_slices(own: GroupShape, block_size: int, geometry: bytes) -> Ints:
    """For each slice of `own` its number in the table of a record of that block size and geometry, -1 where that does not
    have it: (slices,) int64. The geometry must be one of a block's (kvstore.audit.unlikely), of the kind of `own`."""
    stored = GroupShape(block_size, geometry, 0, b"", own.flags)
    numbers = {place: number for number, place in enumerate(stored.places)}
    return np.array([numbers.get(place, -1) for place in own.places], np.int64)


@lru_cache(maxsize=CUTS)
def cut_of(own: GroupShape, block_size: int, geometry: bytes, needed: bytes) -> Cut:
    """What a record gives a block. needed: a byte for each slice of `own`, 1 where it shall come from this record; the record
    must have it."""
    stored = GroupShape(block_size, geometry, own.fingerprint, own.prefix, own.flags)
    own_slices = np.flatnonzero(np.frombuffer(needed, np.uint8))
    stored_slices = shared_slices(own, block_size, geometry)[own_slices]
    order = np.argsort(stored_slices, kind="stable")
    own_slices, stored_slices = own_slices[order], stored_slices[order]
    return Cut(stored, own, own_slices, stored_slices, tuple(_sources(stored, own, own_slices, stored_slices)))


def _sources(stored: GroupShape, own: GroupShape, own_slices: Ints, stored_slices: Ints) -> Iterator[Source]:
    """In the order of the record's chunks."""
    bounds, offsets = np.array(stored.plan.bounds, np.int64), stored.offsets
    first_chunks = np.searchsorted(bounds, offsets[:-1], side="right") - 1
    end_chunks = np.searchsorted(bounds, offsets[1:], side="left")
    sources: dict[tuple[int, int], list[Piece]] = {}
    for here, there in zip(own_slices.tolist(), stored_slices.tolist(), strict=True):
        span = int(first_chunks[there]), int(end_chunks[there])
        cell = stored.slices[there].nbytes // stored.tokens
        piece = Piece(int(offsets[there] - bounds[span[0]]), int(own.offsets[here]), 1, cell)
        _add(sources.setdefault(span, []), piece, stored.tokens, own.tokens)
    for (first, end), pieces in sources.items():
        yield Source(first, end, tuple(pieces))


def _add(pieces: list[Piece], piece: Piece, stored_tokens: int, own_tokens: int) -> None:
    """Add a slice to the last piece where it follows that on both sides."""
    if pieces:
        last = pieces[-1]
        follows = (last.at + last.slices * stored_tokens * last.cell, last.to + last.slices * own_tokens * last.cell)
        if last.cell == piece.cell and follows == (piece.at, piece.to):
            pieces[-1] = last._replace(slices=last.slices + 1)
            return
    pieces.append(piece)
