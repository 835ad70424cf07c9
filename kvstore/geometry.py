"""A record's geometry in its compact form, and the chunks that it implies. docs/format.md is the specification."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import UnsupportedCache
from kvstore.runs import MAX_RUNS as MAX_RUNS
from kvstore.runs import stepped_runs

if TYPE_CHECKING:
    from kvstore.cache import CacheGroup

CHUNK_BYTES = 262_144
"""Raw bytes that a chunk holds at most."""
MAX_CHUNKS = 2**16 - 1
RUN = struct.Struct("<IHHHHII")
"""First layer, count, step, first head, heads - 1, K bytes, V bytes."""


class LayerShape(NamedTuple):
    """What a record says of one layer: its number, its heads in this shard, K and V bytes a token and head."""

    layer: int
    first_head: int
    heads: int
    k_bytes: int
    v_bytes: int


def encode_geometry(group: CacheGroup) -> bytes:
    """The group's layers as runs of 20 bytes: equal geometry gives equal bytes.

    Layers of one shape whose numbers step evenly are one run. Raises UnsupportedCache above MAX_RUNS runs.
    """
    shapes = sorted(
        (layer.first_head, layer.heads, layer.k.nbytes, layer.v.nbytes, layer.number) for layer in group.layers
    )
    runs = [
        (number, count, step, first_head, heads - 1, k_bytes, v_bytes)
        for number, count, step, first_head, heads, k_bytes, v_bytes in stepped_runs(shapes)
    ]
    if len(runs) > MAX_RUNS:
        raise UnsupportedCache(
            f"group {group.number}: its layers form {len(runs)} runs of equal shape, a record's header has room for "
            f"{MAX_RUNS}: split the group"
        )
    return b"".join(RUN.pack(*run) for run in runs)


def decode_geometry(data: bytes) -> list[LayerShape]:
    """The layers of an intact header, by number. A crafted header may name 65,535 layers a run: ask for the layers of
    headers that fit a known geometry, or whose counts were summed before."""
    shapes = [
        LayerShape(first + i * step, head, heads + 1, k_bytes, v_bytes)
        for first, count, step, head, heads, k_bytes, v_bytes in RUN.iter_unpack(data)
        for i in range(count)
    ]
    return sorted(shapes)


def describe(block_size: int, data: bytes) -> str:
    """A geometry in words, for a rejection's detail."""
    runs = list(RUN.iter_unpack(data))
    layers = sum(run[1] for run in runs)
    heads = sorted({(run[3], run[3] + run[4]) for run in runs})
    cells = sorted({run[5:] for run in runs})
    return f"{block_size} tokens, {layers} layers, heads {heads}, K and V bytes {cells}"


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Which raw bytes each payload chunk of a block holds: whole slices, as many as fit CHUNK_BYTES; a larger
    slice takes several chunks of its own. bounds: the chunks' raw offsets and the block's end."""

    slice_bytes: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def num_slices(self) -> int:
        return len(self.slice_bytes)

    @property
    def num_chunks(self) -> int:
        """Payload chunks, the directory not counted."""
        return len(self.bounds) - 1

    @property
    def raw_length(self) -> int:
        return self.bounds[-1]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Raw bytes of each chunk."""
        bounds = np.array(self.bounds, np.int64)
        return np.asarray(bounds[1:] - bounds[:-1], np.int64)

    @cached_property
    def whole_slices(self) -> bool:
        """Whether every slice lies in one chunk."""
        return max(self.slice_bytes) <= CHUNK_BYTES

    @cached_property
    def slice_places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each slice its chunk (0 for the first payload chunk) and its offset there; where whole_slices."""
        offsets = np.concatenate(([0], np.cumsum(self.slice_bytes)))[:-1].astype(np.int64)
        bounds = np.array(self.bounds, np.int64)
        chunk = np.searchsorted(bounds, offsets, side="right") - 1
        return chunk.astype(np.int64), offsets - bounds[chunk]


def chunk_plan(slice_bytes: Iterable[int]) -> ChunkPlan:
    """The plan for slices of these bytes in canonical order; raises UnsupportedCache above MAX_CHUNKS."""
    sizes = tuple(slice_bytes)
    bounds, end = [0], 0
    for size in sizes:
        if end > bounds[-1] and end + size - bounds[-1] > CHUNK_BYTES:
            bounds.append(end)
        for _ in range((size - 1) // CHUNK_BYTES):
            bounds.append(bounds[-1] + CHUNK_BYTES)
        end += size
        if size > CHUNK_BYTES:
            bounds.append(end)
    if bounds[-1] != end:
        bounds.append(end)
    if len(bounds) - 1 > MAX_CHUNKS:
        raise UnsupportedCache(
            f"a block of {end} bytes makes {len(bounds) - 1} chunks: a record has at most {MAX_CHUNKS}"
        )
    return ChunkPlan(sizes, tuple(bounds))
