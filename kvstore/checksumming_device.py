"""The sums of a step on a device: enqueued on a lane of kvstore's, fetched from there, and waited for by who needs them.

The engine's stream is never entered, and the host does not wait while a step is enqueued: one copy takes rows and tags over,
the kernels run, one copy brings sums and stored checksums back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from kvstore.checksumming_plan import GroupPlan, SumsTaken, Way
from kvstore.devicepath import UNWRITTEN, DeviceRoute, Header, Launch
from kvstore.launches import ROW_COLUMNS, write_rows
from kvstore.route import Route
from kvstore.streams import Device

MIN_WORDS: Final = 4096


class HeaderPool:
    """Headers that are used again. Any thread may borrow and give back."""

    def __init__(self, device: Device) -> None:
        self._device, self._lock, self._free = device, threading.Lock(), list[Header]()

    def borrow(self, words: int) -> Header:
        """A header of at least so many words that nobody uses. One whose sums nobody took is waited for. Raises
        StagingMemoryError."""
        with self._lock:
            fitting = next((header for header in self._free if header.host_words.numel() >= words), None)
            if fitting is not None:
                self._free.remove(fitting)
        if fitting is None:
            return Header(self._device, max(MIN_WORDS, 1 << (words - 1).bit_length()))
        fitting.ready()
        return fitting

    def give(self, header: Header) -> None:
        """Take one back, which the device may still be using. Without the lock: the garbage collector may call it in a
        thread that holds it."""
        self._free.append(header)


def device_of_ways(ways: Sequence[Way]) -> Device:
    """The device of a group whose ways are all DeviceRoutes."""
    return _device_route(ways[0][1]).device


def _launch(route: Route) -> Launch:
    return _device_route(route).launches.checksum_blocks


def _device_route(route: Route) -> DeviceRoute:
    assert isinstance(route, DeviceRoute)
    return route


class DeviceSums:
    """One group's sums of a step, on their way. Its header goes back to the pool when nobody refers to it any more, taken
    or not. ways: of DeviceRoutes alone."""

    def __init__(self, plan: GroupPlan, ways: Sequence[Way], pool: HeaderPool) -> None:
        self._plan, self._columns, rows = plan, len(ways), len(plan.span)
        self._sent, self._fetched = rows * (ROW_COLUMNS + 1), rows * (self._columns + 1)
        device = device_of_ways(ways)
        self._launches = [(_launch(route), plan.wanted(key)) for key, route in ways]
        after = device.mark()
        self._header = pool.borrow(self._sent + self._fetched)
        weakref.finalize(self, pool.give, self._header).atexit = False
        self._fill()
        device.gets.run(self._work, after, self._header.done)

    def take(self) -> SumsTaken:
        self._header.ready()
        rows = len(self._plan.span)
        words = self._header.host_words[self._sent : self._sent + self._fetched].numpy().view(np.uint64)
        found = words.reshape(self._columns + 1, rows).copy()
        return SumsTaken(np.ascontiguousarray(found[:-1].T), found[-1, : self._plan.loads])

    def wait_on(self, stream: torch.Stream) -> None:
        stream.wait_event(self._header.done)

    def _fill(self) -> None:
        words, rows = self._header.host_words.numpy(), len(self._plan.span)
        write_rows(self._plan.span, words[: rows * ROW_COLUMNS].reshape(rows, ROW_COLUMNS))
        tags = self._plan.tags
        words[rows * ROW_COLUMNS : rows * ROW_COLUMNS + len(tags)] = tags.view(np.int64)
        words[self._sent : self._sent + self._fetched] = UNWRITTEN

    def _work(self) -> None:
        rows, end = len(self._plan.span), self._sent + self._fetched
        host, device = self._header.host_words, self._header.device_words
        device[: self._sent].copy_(host[: self._sent], non_blocking=True)
        table = device[: rows * ROW_COLUMNS].view(rows, ROW_COLUMNS)
        sums = device[self._sent : end].view(self._columns + 1, rows).zero_()
        for column, (launch, wanted) in enumerate(self._launches):
            if wanted:
                launch(table[:wanted], sums[column, :wanted])
        self._exchange(table[:, 0], device[rows * ROW_COLUMNS : self._sent], sums)
        host[self._sent : end].copy_(device[self._sent : end], non_blocking=True)

    def _exchange(self, block_ids: torch.Tensor, tags: torch.Tensor, sums: torch.Tensor) -> None:
        """Read the stored checksums of what is loaded, write those of what is offloaded."""
        kept, loads, offloaded = self._plan.block_checksums, self._plan.loads, self._plan.offloaded
        if kept is None:
            return
        if loads:
            sums[-1, :loads] = kept[block_ids[:loads]]
        if offloaded.start < offloaded.stop:
            tagged = sums[:-1, offloaded].sum(0) ^ tags[offloaded]
            kept.index_copy_(0, block_ids[offloaded], tagged)
