"""The blocks of one group that a step sums, in the order in which they are summed, and the sums on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvstore.checksum import KVChecksumGroup, ReplicaKey, UInt64Array
from kvstore.route import Route
from kvstore.span import Span

Way = tuple[ReplicaKey, Route]
"""A replica key of a group, and the way of the layers that have it."""


class Purpose(IntEnum):
    """What blocks are summed for, in the order in which they lie among the rows of a step."""

    LOAD = 0
    """Against their stored checksums; all copies."""
    OFFLOAD = 1
    """For a producer's record, and all copies to be stored with the KV."""
    RECEIVE = 2
    """For a consumer's record: all copies."""
    SEND = 3
    """For a producer's record: copies 0 alone."""

    @property
    def reports_every_copy(self) -> bool:
        """Whether the record has a column for each copy."""
        return self in (Purpose.LOAD, Purpose.RECEIVE)


@dataclass(frozen=True, eq=False)
class Part:
    """Blocks of one request. tags: (blocks,) uint64, of what is loaded or offloaded."""

    request: str
    purpose: Purpose
    span: Span
    tags: UInt64Array | None = None


class SumsTaken(NamedTuple):
    """What a step found of a group. values: (rows, keys) uint64; stored: (loads,) uint64, with the tags still in them."""

    values: UInt64Array
    stored: UInt64Array


class Sums(Protocol):
    """Sums that may still be on their way."""

    def take(self) -> SumsTaken:
        """Wait for them; called once."""

    def wait_on(self, stream: torch.Stream) -> None:
        """Let what a stream is given from now on wait for them, and the host not."""


class GroupPlan:
    """One group's blocks of a step. block_checksums: int64 (blocks,), the tensor that travels with offloaded KV; None where
    nothing is loaded or offloaded."""

    def __init__(self, parts: Sequence[Part], block_checksums: torch.Tensor | None) -> None:
        self.parts = sorted(parts, key=lambda part: part.purpose)
        self.block_checksums = block_checksums

    def rows(self, purpose: Purpose) -> slice:
        """The rows of a purpose."""
        before = sum(len(part.span) for part in self.parts if part.purpose < purpose)
        return slice(before, before + sum(len(part.span) for part in self.parts if part.purpose == purpose))

    @cached_property
    def loads(self) -> int:
        """How many rows are loaded; they are the first."""
        return int(self.rows(Purpose.LOAD).stop)

    @cached_property
    def offloaded(self) -> slice:
        """The rows whose checksums are stored."""
        return self.rows(Purpose.OFFLOAD)

    def wanted(self, key: ReplicaKey) -> int:
        """How many rows, from the first, need the sums of a copy."""
        return len(self.span) if key.replica_index == 0 else int(self.rows(Purpose.RECEIVE).stop)

    @cached_property
    def span(self) -> Span:
        """All rows; first_tokens numbers them."""
        spans = [part.span for part in self.parts]
        ids, firsts, valid = (
            [getattr(span, name) for span in spans] for name in ("block_ids", "first_tokens", "valid")
        )
        return Span(0, np.concatenate(ids), np.concatenate(firsts), np.concatenate(valid))

    @cached_property
    def tags(self) -> UInt64Array:
        """The tags of the loaded and offloaded rows, which come first: (loads + offloaded,) uint64."""
        return np.concatenate([np.empty(0, np.uint64), *(part.tags for part in self.parts if part.tags is not None)])

    def groups(self, keys: Sequence[ReplicaKey], taken: SumsTaken) -> Iterator[tuple[str, KVChecksumGroup]]:
        """What a record has of each request."""
        first, untagged = 0, taken.stored ^ self.tags[: self.loads]
        for part in self.parts:
            end = first + len(part.span)
            columns = [n for n, key in enumerate(keys) if part.purpose.reports_every_copy or key.replica_index == 0]
            values = np.ascontiguousarray(taken.values[first:end, columns])
            stored = untagged[first:end].copy() if part.purpose == Purpose.LOAD else None
            yield part.request, KVChecksumGroup(part.span.start, [keys[n] for n in columns], values, stored)
            first = end


class HostSums:
    """Sums that are taken in the calling thread, at once; on a device, behind what its current stream was given."""

    def __init__(self, plan: GroupPlan, ways: Sequence[Way]) -> None:
        rows = len(plan.span)
        values = np.zeros((rows, len(ways)), np.uint64)
        for column, (key, route) in enumerate(ways):
            wanted = plan.wanted(key)
            values[:wanted, column] = _block_checksums(route, plan.span.take(np.arange(wanted)))
        self._taken = SumsTaken(values, _stored(plan))
        if plan.offloaded.start < plan.offloaded.stop:
            _offload(plan, values)

    def take(self) -> SumsTaken:
        return self._taken

    def wait_on(self, stream: torch.Stream) -> None:
        """Nothing is on its way."""


def _block_checksums(route: Route, span: Span) -> UInt64Array:
    transfer = route.begin_get()
    try:
        return transfer.block_checksums(span)
    finally:
        if transfer.pending:
            transfer.finish()


def _stored(plan: GroupPlan) -> UInt64Array:
    if plan.block_checksums is None or not plan.loads:
        return np.zeros(0, np.uint64)
    ids = torch.from_numpy(plan.span.block_ids[: plan.loads]).to(plan.block_checksums.device)
    return plan.block_checksums[ids].cpu().numpy().view(np.uint64)


def _offload(plan: GroupPlan, values: UInt64Array) -> None:
    assert plan.block_checksums is not None
    place, rows = plan.block_checksums.device, plan.offloaded
    tagged = values[rows].sum(axis=1, dtype=np.uint64) ^ plan.tags[rows]
    ids = torch.from_numpy(plan.span.block_ids[rows])
    plan.block_checksums.index_copy_(0, ids.to(place), torch.from_numpy(tagged.view(np.int64)).to(place))
