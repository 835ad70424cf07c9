"""States of a device, copied to the host, where they are moved and summed, and copied back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cache import PagedKVCache, StateGroup, StateTensor
from kvstore.checksum import UInt64Array
from kvstore.copyback import MIRROR_BYTES, Mirrored
from kvstore.span import Span
from kvstore.statepath import StatePath, state_path

AXES: Final = "BN"
"""Blocks come first; what follows is copied whole."""
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class StateCopyPath(StatePath):
    """HostPath for a group of states of a device, by torch's own copies. Keeps the group's tensors alive, not the group.

    Any thread may call it; one at a time uses the mirror. A checksum is taken from what it copies back from the device.
    """

    def __init__(self, cache: PagedKVCache, group: StateGroup) -> None:
        self._step = min(group.num_blocks, max(1, MIRROR_BYTES // group.block_bytes))
        self._lock = threading.Lock()
        self._tensors: list[Mirrored] = []
        names = [layer.name for layer in group.layers]
        self._mirror = PagedKVCache.from_tensors(
            {},
            cache.layout,
            states={name: [self._mirrored(state) for state in cache.states[name]] for name in names},
            state_block_size={0: group.block_size},
            tp_rank=max(layer.rank or 0 for layer in group.layers),
        )
        self._group = self._mirror.state_groups[0]
        self._path = state_path(self._group)

    def _mirrored(self, state: StateTensor) -> StateTensor:
        self._tensors.append(Mirrored(state.tensor, AXES, self._step))
        return replace(state, tensor=self._tensors[-1].mirror)

    def checksum(self, span: Span) -> UInt64Array:
        sums = [np.empty((0, len(self._group.slice_bytes)), np.uint64)]
        for _, part, here in self._parts(span):
            with self._lock:
                self._fetch(part)
                sums.append(self._path.checksum(here))
        return np.concatenate(sums)

    def staging_checksum(self, span: Span, staging: Bytes) -> UInt64Array:
        return self._path.staging_checksum(span, staging)

    def gather(self, span: Span, staging: Bytes) -> None:
        for first, part, here in self._parts(span):
            with self._lock:
                self._fetch(part)
                self._path.gather(here, staging[first : first + len(part)])

    def scatter(self, span: Span, staging: Bytes) -> None:
        for first, part, here in self._parts(span):
            with self._lock:
                self._path.scatter(here, staging[first : first + len(part)])
                for tensor in self._tensors:
                    tensor.push(part.block_ids, np.ones(len(part), np.int64), 1)

    def _fetch(self, part: Span) -> None:
        for tensor in self._tensors:
            tensor.fetch(part.block_ids)

    def _parts(self, span: Span) -> Iterator[tuple[int, Span, Span]]:
        """(first index, slots in the cache, the same slots in the mirror), as many as the mirror holds."""
        for first in range(0, len(span), self._step):
            part = span.take(np.arange(first, min(first + self._step, len(span))))
            yield first, part, Span(part.start, np.arange(len(part), dtype=np.int64), part.first_tokens, part.valid)
