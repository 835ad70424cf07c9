"""The CPU's loops over a group's blocks: compiled (kvstore.loops_numba), or numpy where numba is not installed or the
cache's bytes are no aligned runs. Checksums are passes of their own, apart from the copies.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore.checksum import UInt64Array
from kvstore.loops_numpy import NumpyLoops, NumpyStaging
from kvstore.span import Blocks, Span

if TYPE_CHECKING:
    from kvstore.cache import CacheGroup, LayerCache

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

CACHED_BYTES: Final = 2 * 2**20
"""Block bytes that are gathered, summed and hashed before the next ones, so that a core's cache serves the passes."""


STAGED_ONLY: Final = "this path moves staged blocks only; ask `direct` first"


class HostPath(Protocol):
    """What moves and sums a group's blocks on the CPU. Any thread may call it; blocks of concurrent calls must
    be different ones."""

    direct: bool
    """Whether scatter_from can take slices from wherever they lie."""

    def checksum(self, span: Span) -> UInt64Array:
        """s of each slice of the engine's blocks: (blocks, slices) uint64."""

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        """s of each slice of staged blocks: (blocks, slices) uint64."""

    def gather(self, span: Span, staging: Bytes) -> None:
        """Copy the engine's blocks to staging, (blocks, block bytes); slots past the valid tokens become zero."""

    def scatter(self, span: Span, staging: Bytes) -> None:
        """Copy staged blocks' valid tokens to the engine's blocks, and nothing past them."""

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        """Scatter, each slice taken from the address addresses[block, slice]; int64."""

    def land(
        self, span: Span, descriptor: int, head: UInt64Array, slots: Ints, taken: Bytes, received: Bytes, filled: int
    ) -> int:
        """Scatter what comes over a connection (kvstore.loops_numba.land). Where `direct`."""


class NumpyPath:
    """HostPath by numpy calls; releases the GIL only inside each of them."""

    direct = False

    def __init__(self, group: CacheGroup) -> None:
        self._loops = NumpyLoops(group)

    def checksum(self, span: Span) -> UInt64Array:
        return self._loops.checksum(span.block_ids, span.first_tokens, span.valid)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        return self._loops.staging_checksum(staging, span.first_tokens, span.valid)

    def gather(self, span: Span, staging: Bytes) -> None:
        self._loops.gather(span.block_ids, span.valid, staging)

    def scatter(self, span: Span, staging: Bytes) -> None:
        self._loops.scatter(span.block_ids, span.valid, staging)

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        raise TypeError(STAGED_ONLY)

    def land(self, *feed: object) -> int:
        raise TypeError(STAGED_ONLY)


class NumbaStaging:
    """Checksums of staged blocks by the compiled loops. Any thread may call it."""

    def __init__(self, blocks: Blocks, loops: ModuleType) -> None:
        self._num_slices, self._loops = len(blocks.slices), loops
        self._staging_table = _staging_table(blocks)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        """s of each slice of staged blocks: (blocks, slices) uint64."""
        return self._sums(_address(staging), self._staging_table, span, np.arange(len(span), dtype=np.int64))

    def _sums(self, base: int, table: Ints, span: Span, block_ids: Ints) -> UInt64Array:
        out = np.empty((len(span), self._num_slices), np.uint64)
        self._loops.checksum(base, table, block_ids, span.first_tokens, span.valid, out)
        return out


class NumbaPath(NumbaStaging):
    """HostPath by the compiled loops; releases the GIL for a whole batch. Holds addresses: the PagedKVCache that
    owns the group keeps their memory alive. Does not keep the group alive, which keeps it."""

    direct = True

    def __init__(self, group: CacheGroup, loops: ModuleType) -> None:
        super().__init__(group, loops)
        self._block_size, self._block_bytes, self._offsets = group.block_size, group.block_bytes, group.offsets[:-1]
        self._table = _engine_table(group)

    def checksum(self, span: Span) -> UInt64Array:
        return self._sums(0, self._table, span, span.block_ids)

    def gather(self, span: Span, staging: Bytes) -> None:
        targets = self._staged(span, staging)
        self._loops.gather(self._table, span.block_ids, span.valid, self._block_size, targets)

    def scatter(self, span: Span, staging: Bytes) -> None:
        self.scatter_from(span, self._staged(span, staging))

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        self._loops.scatter(self._table, span.block_ids, span.valid, addresses)

    def land(
        self, span: Span, descriptor: int, head: UInt64Array, slots: Ints, taken: Bytes, received: Bytes, filled: int
    ) -> int:
        offsets, places = self._offsets, (self._table, span.block_ids, span.valid)
        left: int = self._loops.land(
            *places, offsets, self._block_bytes, descriptor, head, slots, taken, received, filled
        )
        return left

    def _staged(self, span: Span, staging: Bytes) -> Ints:
        blocks = _address(staging) + np.arange(len(span), dtype=np.int64)[:, None] * self._block_bytes
        return np.asarray(blocks + self._offsets, np.int64)


def _address(staging: Bytes) -> int:
    if not staging.flags.c_contiguous:
        raise ValueError("staging must be contiguous")
    return int(staging.ctypes.data)


def _engine_row(layer: LayerCache, head: int, index: int) -> list[int]:
    row: list[int] = []
    for plane in layer.planes:
        row += [plane.address + head * plane.head_stride, plane.block_stride, plane.token_stride, plane.nbytes]
    return [*row, *[0] * (8 - len(row)), index]


def _engine_table(group: CacheGroup) -> Ints:
    slices = enumerate(group.slices)
    rows = [_engine_row(group.layers[s.row], s.local_head, index) for index, s in slices]
    order = sorted(range(len(rows)), key=lambda i: (group.slices[i].row, rows[i][0]))
    table, first = [], 0
    for layer in group.layers:
        after = (first + layer.heads) % len(rows)
        for number, row in enumerate(rows[i] for i in order[first : first + layer.heads]):
            shares = (number * group.block_size * nbytes for nbytes in (row[3], row[7]))
            table.append([*row, after, *shares])
        first += layer.heads
    return np.array(table, np.int64)


def _staging_table(blocks: Blocks) -> Ints:
    cells = [s.nbytes // blocks.block_size for s in blocks.slices]
    *offsets, block_bytes = blocks.offsets.tolist()
    rows = [
        [offset, block_bytes, cell, cell, offset, 0, 0, 0, index, index, 0, 0]
        for index, (offset, cell) in enumerate(zip(offsets, cells, strict=True))
    ]
    return np.array(rows, np.int64)


@cache
def compiled_loops() -> ModuleType | None:
    """The compiled loops, or None where numba is not there or does not work, which is said once in the log."""
    try:
        if importlib.util.find_spec("numba") is None:
            reason = "is not installed"
        elif (loops := importlib.import_module("kvstore.loops_numba")).USABLE:
            return loops
        else:
            reason = "is switched off (NUMBA_DISABLE_JIT)"
    except Exception as error:
        # Whatever keeps numba from loading or compiling (an unfit numpy, a missing llvmlite), numpy does the work.
        reason = f"does not work ({type(error).__name__}: {error})"
    log.warning(
        "numba %s: copies and checksums run in numpy, three to ten times slower; the extra `cpu` of kvstore brings it, "
        "or `pip install numba`",
        reason,
    )
    return None


StagingSums = Callable[[Span, Bytes], UInt64Array]
"""s of each slice of staged blocks in host memory: (blocks, slices) uint64."""


def staging_sums(blocks: Blocks) -> StagingSums:
    """Checksums of a group's staged blocks, wherever its cache lies."""
    loops = compiled_loops()
    if loops is not None:
        return NumbaStaging(blocks, loops).staging_checksum
    staging = NumpyStaging(blocks)
    return lambda span, staged: staging.staging_checksum(staged, span.first_tokens, span.valid)


# No path refers to its group: an entry goes with its key.
_paths: WeakKeyDictionary[CacheGroup, HostPath] = WeakKeyDictionary()


def host_path(group: CacheGroup) -> HostPath:
    """The group's path on the CPU, made once a group."""
    path = _paths.get(group)
    if path is None:
        loops = compiled_loops() if group.regular else None
        if not group.regular:
            log.warning(
                "group %d: its cells are no runs of aligned 8-byte words, so copies and checksums run in numpy, several "
                "times slower: keep the channels last, and strides in multiples of 8 bytes",
                group.number,
            )
        path = NumpyPath(group) if loops is None else NumbaPath(group, loops)
        _paths[group] = path
    return path
