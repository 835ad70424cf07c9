"""A group's way on a device that Triton serves: kernels gather, scatter and sum, copy engines move staged blocks.

A batch is a few operations on a lane (kvstore.streams): rows of block ids go over, the kernels run, the bytes go one way
and the sums come back; the host waits once, when it needs the result. In steady state nothing is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import CacheGroup
from kvstore.checksum import UInt64Array
from kvstore.hostpath import CACHED_BYTES, compiled_loops
from kvstore.launches import ROW_COLUMNS, Launches, write_rows
from kvstore.route import Feed, Gathered, Staged, Transfer
from kvstore.span import Span
from kvstore.staging import Buffer, StagingPool
from kvstore.streams import Device, Lane

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

MIN_HEADER_BYTES: Final = 256 * 1024
UNWRITTEN: Final = int.from_bytes(os.urandom(8), "little") >> 1
"""What the host's sums hold until the device's arrive: a copy that never happened leaves a number that matches nothing,
and not the sums of an earlier batch."""

Launch = Callable[[torch.Tensor, torch.Tensor], None]


class Header:
    """Memory on both sides for rows and sums; `done` is behind the last operation on it."""

    def __init__(self, device: Device, words: int) -> None:
        self.host_words = device.pinned(8 * words).view(torch.int64)
        self.device_words = device.memory(8 * words).view(torch.int64)
        self.done = device.event()

    def ready(self) -> None:
        """Wait until the device is done with it."""
        self.done.synchronize()


class DeviceBuffer(Header):
    """Pinned host memory for blocks, its twin on the device, and a header."""

    def __init__(self, device: Device, nbytes: int, words: int, memory: Bytes | None = None) -> None:
        super().__init__(device, words)
        self.host = device.pinned(nbytes) if memory is None else device.pin(memory)
        self.device = device.memory(nbytes)
        self.memory: Bytes = self.host.numpy()


class Table:
    """`rows` rows and `columns` sums for each in a header, on the host and on the device; columns 0: one sum a row."""

    def __init__(self, header: Header, rows: int, columns: int) -> None:
        end, words = rows * ROW_COLUMNS, rows * (ROW_COLUMNS + max(1, columns))
        host, device = header.host_words[:words], header.device_words[:words]
        self._host_rows, self._rows = host[:end].view(rows, ROW_COLUMNS), device[:end].view(rows, ROW_COLUMNS)
        shape = (rows, columns) if columns else (rows,)
        self._host_sums, self._sums = host[end:].view(shape), device[end:].view(shape)

    def fill(self, span: Span) -> None:
        """Write the host's rows, and forget the host's sums."""
        write_rows(span, self._host_rows.numpy())
        self._host_sums.numpy()[...] = UNWRITTEN

    def send(self) -> torch.Tensor:
        """Enqueue the rows' way to the device; returns them there."""
        self._rows.copy_(self._host_rows, non_blocking=True)
        return self._rows

    def cleared_sums(self) -> torch.Tensor:
        """Enqueue zeros for the device's sums; returns them."""
        return self._sums.zero_()

    def fetch(self) -> None:
        """Enqueue the sums' way to the host."""
        self._host_sums.copy_(self._sums, non_blocking=True)

    @property
    def sums(self) -> UInt64Array:
        """The host's sums, once they are there."""
        return self._host_sums.numpy().view(np.uint64)


class DeviceStaged:
    """Room for blocks in a DeviceBuffer."""

    def __init__(self, buffer: DeviceBuffer, blocks: int, block_bytes: int) -> None:
        self.buffer = buffer
        self.host = buffer.host[: blocks * block_bytes].view(blocks, block_bytes)
        self.device = buffer.device[: blocks * block_bytes].view(blocks, block_bytes)
        self.bytes: Bytes = self.host.numpy()


class DeviceGathered:
    """Blocks that are on their way to the host, with the sums of their slices."""

    def __init__(self, transfer: DeviceTransfer, buffer: DeviceBuffer, table: Table) -> None:
        self._transfer, self._buffer, self._table, self._waited = transfer, buffer, table, False

    def take(self, first: int, end: int) -> UInt64Array:
        if not self._waited:
            self._buffer.ready()
            self._waited = True
            self._transfer.pending -= 1
        return self._table.sums[first:end].copy()


class DeviceTransfer:
    """One put's or get's moves, all on one lane, so in order. `pending` counts what was started and not waited for."""

    ahead = True

    def __init__(self, route: DeviceRoute, lane: Lane) -> None:
        self._route, self._lane, self._launches = route, lane, route.launches
        self._by_block = self._launches.checksum_blocks
        self._after = route.device.mark()
        self.pending = 0

    def gather(self, span: Span, staged: Staged) -> Gathered:
        assert isinstance(staged, DeviceStaged)
        blocks = len(span)
        table = Table(staged.buffer, blocks, self._launches.num_slices)
        table.fill(span)

        def work() -> None:
            rows = table.send()
            self._launches.checksum_slices(rows, table.cleared_sums())
            self._launches.gather(rows, staged.device[:blocks])
            table.fetch()
            staged.host[:blocks].copy_(staged.device[:blocks], non_blocking=True)

        self._enqueue(work, staged.buffer)
        return DeviceGathered(self, staged.buffer, table)

    def scatter(self, span: Span, staged: Staged) -> None:
        assert isinstance(staged, DeviceStaged)
        blocks = len(span)
        table = Table(staged.buffer, blocks, 0)
        table.fill(span)

        def work() -> None:
            rows = table.send()
            staged.device[:blocks].copy_(staged.host[:blocks], non_blocking=True)
            self._launches.scatter(rows, staged.device[:blocks])

        self._enqueue(work, staged.buffer)

    def scatter_from(self, span: Span, addresses: Ints) -> None:
        raise TypeError("a device's blocks go through staging: ask `direct` first")

    def land(self, span: Span, feed: Feed, filled: int) -> int:
        raise TypeError("a device's blocks go through staging: ask `direct` first")

    def checksum(self, span: Span) -> UInt64Array:
        columns = self._launches.num_slices
        header = Header(self._route.device, len(span) * (ROW_COLUMNS + columns))
        return self._sums(span, header, columns, self._launches.checksum_slices)

    def block_checksums(self, span: Span, pool: StagingPool | None = None) -> UInt64Array:
        if pool is None:
            return self._sums(span, Header(self._route.device, len(span) * (ROW_COLUMNS + 1)), 0, self._by_block)
        borrower, found = object(), [np.empty(0, np.uint64)]
        try:
            buffer = pool.borrow(borrower)
            assert isinstance(buffer, DeviceBuffer)
            step = buffer.host_words.numel() // (ROW_COLUMNS + 1)
            for first in range(0, len(span), step):
                part = span.take(np.arange(first, min(first + step, len(span))))
                found.append(self._sums(part, buffer, 0, self._by_block))
        finally:
            pool.borrowed.pop(borrower, None)
        return np.concatenate(found)

    def finish(self) -> None:
        self._lane.wait()
        self.pending = 0

    def _sums(self, span: Span, header: Header, columns: int, launch: Launch) -> UInt64Array:
        """A pass over the engine's blocks by the caller's ids, and its sums; everything before it has ended then."""
        table = Table(header, len(span), columns)
        table.fill(span)

        def work() -> None:
            launch(table.send(), table.cleared_sums())
            table.fetch()

        self._enqueue(work, header)
        header.ready()
        self.pending = 0
        return table.sums.copy()

    def _enqueue(self, work: Callable[[], None], header: Header) -> None:
        self.pending += 1
        self._lane.run(work, self._after, header.done)
        self._after = None


class DeviceRoute:
    """The way of a group of a device. Holds addresses, as Launches does. Any thread may use it."""

    direct = False
    get_bytes = 16 * 2**20

    def __init__(self, group: CacheGroup, device: Device) -> None:
        self.device = device
        self.launches = Launches(group, device.device)
        self.part_bytes = CACHED_BYTES if compiled_loops() is not None else None
        self.buffer_key: Hashable = (device.device, len(group.slices), group.block_bytes)
        self._compile()

    def new_buffer(self, nbytes: int, memory: Bytes | None = None) -> Buffer:
        blocks = max(1, nbytes // self.launches.block_bytes)
        words = blocks * (ROW_COLUMNS + self.launches.num_slices)
        return DeviceBuffer(self.device, nbytes, max(words, MIN_HEADER_BYTES // 8), memory)

    def stage(self, buffer: Buffer, blocks: int) -> DeviceStaged:
        assert isinstance(buffer, DeviceBuffer)
        return DeviceStaged(buffer, blocks, self.launches.block_bytes)

    def begin_put(self) -> Transfer:
        return DeviceTransfer(self, self.device.puts)

    def begin_get(self) -> Transfer:
        return DeviceTransfer(self, self.device.gets)

    def _compile(self) -> None:
        """Launch every kernel with a row of no tokens, which does nothing: compiling takes a second or two, and belongs
        to the opening of a store and not to an engine's first request."""
        launches, span = self.launches, Span(0, *np.zeros((3, 1), np.int64))
        buffer = DeviceBuffer(self.device, launches.block_bytes, ROW_COLUMNS + 2 * launches.num_slices)
        table, blocks = Table(buffer, 1, launches.num_slices), Table(buffer, 1, 0)
        table.fill(span)

        def work() -> None:
            rows, staging = table.send(), buffer.device.view(1, -1)
            launches.checksum_slices(rows, table.cleared_sums())
            launches.gather(rows, staging)
            launches.scatter(rows, staging)
            launches.checksum_blocks(rows, blocks.cleared_sums())

        self.device.gets.run(work, done=buffer.done)
        buffer.ready()
