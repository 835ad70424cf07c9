"""One cache group as records describe it: what their headers must say, and the chunks and sums that follow from that.

It names no tensor: whoever reads and writes records needs no engine.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array, block_checksum_tags, slice_factors
from kvstore.geometry import ChunkPlan, chunk_plan, decode_geometry, describe
from kvstore.record import Header
from kvstore.results import Rejection
from kvstore.stategeometry import STATES, Segment, StateRows, decode_states, describe_states, segments_of, slice_bytes

FORM: Final = struct.Struct("<IQHB")
"""Block size, fingerprint, flags, length of the prefix; prefix and geometry follow."""


class SlicePlace(NamedTuple):
    """One slice of a block: the layer's and the head's number in the model, its bytes. rows: of states, how many rows it has,
    the first of which takes the head's place."""

    layer: int
    head: int
    nbytes: int
    rows: int = 0

    def __str__(self) -> str:
        if not self.rows:
            return f"layer {self.layer} head {self.head}"
        return f"layer {self.layer} state rows {self.head} to {self.head + self.rows - 1}"


@dataclass(frozen=True)
class GroupShape:
    """block_size: tokens a block; geometry: layers and heads (kvstore.geometry); fingerprint: of the group's layers in the
    model; prefix: what the group's index keys begin with, identity id and group; flags: its records' headers', which say what
    the geometry is of. Immutable: any thread may use it."""

    block_size: int
    geometry: bytes
    fingerprint: int
    prefix: bytes
    flags: int = 0

    @property
    def of_states(self) -> bool:
        """Whether blocks are Mamba states."""
        return bool(self.flags & STATES)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Of states: the parts of the slices, in canonical order."""
        return tuple(segments_of(decode_states(self.geometry)))

    @cached_property
    def slices(self) -> tuple[SlicePlace, ...]:
        """The slices of a block in canonical order: head by head, in it layer by layer; of states layer by layer, in it
        row by row."""
        if self.of_states:
            return _state_slices(self.segments)
        found = [
            SlicePlace(shape.layer, shape.first_head + h, (shape.k_bytes + shape.v_bytes) * self.block_size)
            for shape in decode_geometry(self.geometry)
            for h in range(shape.heads)
        ]
        return tuple(sorted(found, key=lambda s: (s.head, s.layer)))

    @property
    def tokens(self) -> int:
        """Into how many equal parts a slice's bytes fall, one after the other: its tokens; a state is one."""
        return 1 if self.of_states else self.block_size

    @cached_property
    def places(self) -> tuple[Hashable, ...]:
        """What each slice is in the unsharded model: layer, head, K and V bytes; of states its rows. Equal places of two
        shapes of one group hold the same of a block."""
        if self.of_states:
            parts: dict[int, tuple[StateRows, ...]] = {}
            for segment in self.segments:
                parts[segment.slice] = (*parts.get(segment.slice, ()), segment.part)
            return tuple(parts[number] for number in range(len(self.slices)))
        sizes = {
            (shape.layer, shape.first_head + head): (shape.k_bytes, shape.v_bytes)
            for shape in decode_geometry(self.geometry)
            for head in range(shape.heads)
        }
        return tuple((s.layer, s.head, *sizes[s.layer, s.head]) for s in self.slices)

    @cached_property
    def factors(self) -> UInt64Array:
        """m of each slice, (slices,) uint64; of states 1, since the sum of a range of rows has their factors inside."""
        if self.of_states:
            return np.ones(len(self.slices), np.uint64)
        return slice_factors([s.layer for s in self.slices], [s.head for s in self.slices])

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Offset of each slice in a block's canonical bytes, and their end: (slices + 1,) int64."""
        return np.concatenate(([0], np.cumsum([s.nbytes for s in self.slices]))).astype(np.int64)

    @cached_property
    def plan(self) -> ChunkPlan:
        """The chunks of a record. Raises UnsupportedCache."""
        return chunk_plan(s.nbytes for s in self.slices)

    def keys(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """The index keys of block hashes."""
        return [self.prefix + h for h in block_hashes]

    def tags(self, block_hashes: Sequence[bytes]) -> UInt64Array:
        """The tags of block hashes: (blocks,) uint64."""
        return block_checksum_tags(block_hashes, self.fingerprint)

    def same_shape(self, header: Header) -> bool:
        """Whether a record has this group's geometry and lengths."""
        return (
            header.geometry == self.geometry
            and header.block_size == self.block_size
            and header.raw_length == self.plan.raw_length
            and header.flags == self.flags
        )

    def misfit(self, header: Header, position: int) -> Rejection | None:
        """Why an intact record cannot answer for a block at this position, None where it can."""
        if header.fingerprint != self.fingerprint:
            return Rejection(
                "fingerprint", f"stored for layers {header.fingerprint:016x}, asked {self.fingerprint:016x}"
            )
        if not self.same_shape(header):
            stored = described(header.block_size, header.geometry, header.flags)
            asked = described(self.block_size, self.geometry, self.flags)
            return Rejection("geometry", f"stored: {stored}; asked: {asked}")
        if header.position != position:
            return Rejection("position", f"stored at position {header.position}, asked at {position}")
        return None

    def encode(self) -> bytes:
        """The shape's bytes, for another process: equal bytes mean equal shapes."""
        return FORM.pack(self.block_size, self.fingerprint, self.flags, len(self.prefix)) + self.prefix + self.geometry

    @classmethod
    def decode(cls, data: bytes) -> GroupShape:
        """The shape that `encode` gave these bytes. Raises ValueError."""
        if len(data) < FORM.size:
            raise ValueError(f"{len(data)} bytes are no group's shape")
        block_size, fingerprint, flags, prefix = FORM.unpack_from(data)
        end = FORM.size + prefix
        return cls(block_size, data[end:], fingerprint, data[FORM.size : end], flags)


def described(block_size: int, geometry: bytes, flags: int) -> str:
    """A geometry in words, for a rejection's detail."""
    if flags & STATES:
        return f"{block_size} tokens, {describe_states(geometry)}"
    return describe(block_size, geometry)


def _state_slices(segments: Sequence[Segment]) -> tuple[SlicePlace, ...]:
    sizes = slice_bytes(segments)
    firsts = {segment.slice: segment.part for segment in reversed(segments)}
    return tuple(
        SlicePlace(firsts[i].layer, firsts[i].first_row, nbytes, firsts[i].rows) for i, nbytes in enumerate(sizes)
    )
