"""A group of states on a device that Triton serves: torch copies slots to the host and back, a kernel verifies them where
they lie, in one launch for each form of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from kvstore.cache import PagedKVCache, StateGroup, StateTensor
from kvstore.checksum import UInt64Array
from kvstore.devicepath import UNWRITTEN, Header
from kvstore.errors import GraphCapture, StagingMemoryError
from kvstore.launches import StateLaunches, states_unserved
from kvstore.route import HostRoute, HostTransfer, Transfer
from kvstore.span import Span
from kvstore.staging import StagingPool
from kvstore.statecopy import StateCopyPath
from kvstore.statepath import state_path
from kvstore.streams import Device

SLOTS_AT_ONCE: Final = 256
"""Of one launch: programs are counted in 31 bits."""
TRIAL: Final = Span(0, np.array([2, 0]), *np.zeros((2, 2), np.int64))
"""The slots by which the kernel is tried."""


class StateSums:
    """c of slots of a group, summed on the device. Any thread may use it."""

    def __init__(self, group: StateGroup, device: Device) -> None:
        self._device, self._launches = device, StateLaunches(group, device.device)

    def __call__(self, span: Span) -> UInt64Array:
        """(blocks,) uint64, behind all that the calling thread's current stream has been given."""
        found = [np.empty(0, np.uint64)]
        for first in range(0, len(span), SLOTS_AT_ONCE):
            found.append(self._sums(span.block_ids[first : first + SLOTS_AT_ONCE]))
        return np.concatenate(found)

    def _sums(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> UInt64Array:
        count, header = slots.size, Header(self._device, 3 * slots.size)
        host, device = (
            (words[: 2 * count].view(count, 2), words[2 * count : 3 * count])
            for words in (header.host_words, header.device_words)
        )
        host[0].numpy()[:] = np.stack((slots, np.arange(count)), axis=1)
        host[1].numpy()[:] = UNWRITTEN

        def work() -> None:
            device[0].copy_(host[0], non_blocking=True)
            self._launches.checksum_blocks(device[0], device[1].zero_())
            host[1].copy_(device[1], non_blocking=True)

        self._device.gets.run(work, self._device.mark(), header.done)
        header.ready()
        return host[1].numpy().view(np.uint64).copy()


class StateTransfer(HostTransfer):
    """Moves of the host, whose blocks' sums the device takes."""

    def __init__(self, path: StateCopyPath, factors: UInt64Array, sums: StateSums) -> None:
        super().__init__(path, factors)
        self._sums = sums

    def block_checksums(self, span: Span, pool: StagingPool | None = None) -> UInt64Array:
        return self._sums(span)


class StateRoute(HostRoute):
    """The way of a group of states of a device. ready: as HostRoute's."""

    def __init__(self, path: StateCopyPath, group: StateGroup, ready: Callable[[], None], device: Device) -> None:
        super().__init__(path, group, ready)
        self._copies, self._sums = path, StateSums(group, device)
        # Compiles the kernels, so that an engine's first request need not.
        self._sums(Span(0, *np.zeros((3, 1), np.int64)))

    def begin_put(self) -> Transfer:
        self._ready()
        return StateTransfer(self._copies, self._factors, self._sums)


def unfit_states(group: StateGroup, device: Device) -> str | None:
    """Why the kernel cannot serve a group's states, None where it can: sums of small states of the device are compared with
    the host's. Raises GraphCapture, and StagingMemoryError where there is no room for this at the moment."""
    if reason := states_unserved(group):
        return reason
    try:
        here, there = _trial(torch.device("cpu")), _trial(device.device)
        found = StateSums(there.state_groups[0], device)(TRIAL)
        expected = state_path(here.state_groups[0]).checksum(TRIAL).sum(axis=1, dtype=np.uint64)
    except (GraphCapture, StagingMemoryError):
        raise
    except Exception as error:
        # Whatever keeps Triton from compiling or launching.
        return f"{type(error).__name__}: {error}"
    return None if np.array_equal(found, expected) else "the sums of states are not the host's"


def _trial(device: torch.device) -> PagedKVCache:
    """States of random bytes, the same on every device, that lie in both ways that the kernel knows."""
    random = np.random.default_rng(0)
    bits = [torch.from_numpy(random.integers(0, 2**15, (3, 40, 4), np.int16)).to(device) for _ in range(2)]
    states = [StateTensor(bits[0].view(torch.bfloat16), 1), StateTensor(bits[1].view(torch.float32).transpose(1, 2), 2)]
    return PagedKVCache.from_tensors({}, "BNC", states={"layers.1": states}, state_block_size={0: 1})
