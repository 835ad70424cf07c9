"""The worker's part of the checksum protocol: which blocks a step sums, and the record that comes of it.

The sums are passes over the engine's cache by the caller's block ids, apart from every copy (docs/checksum.md, section 10).
docs/protocol.md has the flow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from kvstore.cache import AnyGroup, PagedKVCache, StateGroup
from kvstore.checksum import (
    KVChecksumBlocks,
    KVChecksumRecord,
    KVChecksumScheduled,
    ReplicaKey,
    UInt64Array,
    block_checksum_tags,
)
from kvstore.checksumming_plan import GroupPlan, HostSums, Part, Purpose, Sums, Way
from kvstore.errors import ConfigError, InvalidBlockId, InvalidShape, ProtocolError, UnsupportedCache
from kvstore.identity import Rank, layers_fingerprint
from kvstore.replicas import replica_keys
from kvstore.route import HostRoute
from kvstore.span import Span, check_hashes, check_span
from kvstore.transfer import route_of

log = logging.getLogger(__name__)
ONE_COPY: Final = ReplicaKey(1, 0)


@dataclass(frozen=True)
class KVChecksumOffload:
    """What a step needs for KV that is offloaded and loaded again.

    block_checksums: group -> int64 (blocks,), from `KVChecksumWorker.init_block_checksums`, which travels with the KV: entry
    i belongs to block i. One tensor may serve several groups whose blocks never have the same id at one time.
    block_hashes: request -> group -> the hash of each scheduled block. Blocks of reqs_to_load need them; of reqs_to_send,
    those that have some get their checksums written into block_checksums.
    """

    block_checksums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    block_hashes: Mapping[str, Mapping[int, Sequence[bytes]]] = field(default_factory=dict)


class KVChecksumPending:
    """The record of a step, whose sums may still be on their way. Any thread may ask it, any number of times."""

    def __init__(self, record: KVChecksumRecord, sums: Sequence[tuple[_Group, GroupPlan, Sums]]) -> None:
        self._record, self._sums, self._lock = record, list(sums), threading.Lock()
        self._checksums = {request: dict(groups) for request, groups in record.checksums.items()}

    def result(self) -> KVChecksumRecord:
        """The record; waits for the sums. From then on the step's blocks may be overwritten."""
        with self._lock:
            while self._sums:
                group, plan, sums = self._sums[0]
                for request, part in plan.groups([key for key, _ in group.ways], sums.take()):
                    self._checksums[request][group.number] = part
                del self._sums[0]
            return replace(self._record, checksums=self._checksums)

    def wait_on(self, stream: torch.Stream) -> None:
        """Let what `stream` is given from now on begin behind the step's sums, without waiting here: the copy of offloaded
        KV and its checksums, or work that overwrites the step's blocks. On a CPU the sums are there already."""
        with self._lock:
            for _, _, sums in self._sums:
                sums.wait_on(stream)


class KVChecksumWorker:
    """Sums the blocks of one worker's cache, as the scheduler says.

    cache: the worker's; rank: which worker it is. kv_heads: {layer name: KV heads in the unsharded model}, where the cache
    was not told and heads may be replicated. fingerprints: {group: its whole fingerprint} for the tags of offloaded blocks
    (kvstore.identity.group_fingerprint), by default the sum over this worker's layers.

    Groups that cannot be checksummed are left out: `skipped` says why, the log says it once, and each record repeats it.

    Threads and lifetime: immutable after construction, so any thread may call it. On a CPU, and on a device that no kernel
    serves, `execute` sums before it returns. On a device it enqueues on a stream of kvstore's, behind what the calling
    thread's current stream has been given so far, and returns: the step's blocks, the cache and the block_checksums must stay
    as they are until `result()` has returned, or until streams that change them were told to `wait_on` it. The cache's
    memory must stay where it is for as long as the worker is used. Not for the child of a fork on a device.

    Raises StagingMemoryError. On a device it compiles kernels, for each replica key of a group.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        rank: Rank,
        *,
        kv_heads: Mapping[str, int] | None = None,
        fingerprints: Mapping[int, int] | None = None,
    ) -> None:
        self._cache, self._rank, self._tags = cache, rank, dict(fingerprints or {})
        self._skipped = dict(cache.skipped)
        self._groups: dict[int, _Group] = {}
        for number, group in sorted(cache.all_groups.items()):
            try:
                self._groups[number] = _Group(cache, number, group, rank, kv_heads or {})
            except UnsupportedCache as error:
                self._skipped[number] = str(error)
                log.warning("group %d is not checksummed: %s", number, error)
        self._fingerprints = {number: group.fingerprint for number, group in self._groups.items()}

    @property
    def skipped(self) -> Mapping[int, str]:
        """Groups that are not checksummed, and why."""
        return dict(self._skipped)

    def init_block_checksums(self, num_blocks: int) -> torch.Tensor:
        """int64 (num_blocks,) zeros on the cache's device: BLOCK_CHECKSUM_BYTES a block, to travel with offloaded KV.

        Raises ConfigError.
        """
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks!r}: expected the number of the cache's blocks")
        device = next(iter(self._cache.all_groups.values())).device if self._cache.all_groups else None
        return torch.zeros(num_blocks, dtype=torch.int64, device=device)

    def execute(
        self,
        scheduled: KVChecksumScheduled,
        offload: KVChecksumOffload | None = None,
        received: Mapping[str, bytes] | None = None,
    ) -> KVChecksumPending:
        """Sum the scheduled blocks as they are now, and as the current stream will have left them.

        Call it with reqs_to_send after the forward, with reqs_to_recv and reqs_to_load when the KV has arrived. Groups of
        other stages are ignored. received: what came in a connector's messages; the first worker alone reports it.

        Raises, before anything is summed or written, InvalidBlockId, DuplicateBlockId, InvalidPosition, NoValidTokens,
        InvalidBlockHash or LengthMismatch for blocks that do not fit; ProtocolError where a request has a group twice in one
        step, or a load has no hashes or block_checksums; InvalidShape for a tensor that init_block_checksums did not make.
        Raises StagingMemoryError, and GraphCapture while a graph is captured.
        """
        given = offload or KVChecksumOffload()
        parts, requests = self._parts(scheduled, given)
        plans = [(self._groups[n], GroupPlan(found, given.block_checksums.get(n))) for n, found in parts.items()]
        first = (self._rank.pp_rank, self._rank.tp_rank) == (0, 0)
        record = KVChecksumRecord(
            *(self._rank.pp_rank, self._rank.tp_rank, {request: {} for request in requests}),
            skipped_groups=frozenset(self._skipped),
            fingerprints=dict(self._fingerprints),
            received=dict(received or {}) if first else {},
            skip_reasons=dict(self._skipped),
        )
        return KVChecksumPending(record, [(group, plan, group.start(plan)) for group, plan in plans])

    def _parts(
        self, scheduled: KVChecksumScheduled, offload: KVChecksumOffload
    ) -> tuple[dict[int, list[Part]], list[str]]:
        parts: dict[int, list[Part]] = {}
        seen = set[tuple[str, int]]()
        for request, purpose, blocks in _requests(scheduled):
            for number, (start, block_ids) in blocks.groups.items():
                if (request, number) in seen:
                    raise ProtocolError(
                        f"request {request!r} has group {number} twice in one step: execute what was loaded, received and "
                        "computed one after the other"
                    )
                seen.add((request, number))
                if number in self._groups:
                    span = check_span(self._groups[number].group, block_ids, start, blocks.num_tokens)
                    hashes = offload.block_hashes.get(request, {}).get(number)
                    parts.setdefault(number, []).append(self._part(request, purpose, number, span, hashes, offload))
        requests = list(dict.fromkeys(request for request, _, _ in _requests(scheduled)))
        if unknown := sorted(set(offload.block_hashes) - set(requests)):
            raise ProtocolError(f"block_hashes names the request {unknown[0]!r}, which is not scheduled in this step")
        return parts, requests

    def _part(
        self,
        request: str,
        purpose: Purpose,
        number: int,
        span: Span,
        hashes: Sequence[bytes] | None,
        offload: KVChecksumOffload,
    ) -> Part:
        if purpose == Purpose.RECEIVE or (purpose == Purpose.SEND and hashes is None):
            return Part(request, purpose, span)
        kept = offload.block_checksums.get(number)
        if kept is None or hashes is None:
            missing = "block_checksums" if kept is None else "block_hashes"
            raise ProtocolError(
                f"request {request!r}, group {number}: the offload has no {missing} of it: pass the tensor of the group and "
                "the hash of each of its blocks"
            )
        self._groups[number].check_block_checksums(kept, span)
        tags = self._tags_of(number, check_hashes(hashes, len(span)))
        return Part(request, Purpose.OFFLOAD if purpose == Purpose.SEND else purpose, span, tags)

    def _tags_of(self, number: int, hashes: Sequence[bytes]) -> UInt64Array:
        return block_checksum_tags(hashes, self._tags.get(number, self._fingerprints[number]))


def _requests(scheduled: KVChecksumScheduled) -> Iterator[tuple[str, Purpose, KVChecksumBlocks]]:
    for purpose, requests in (
        (Purpose.SEND, scheduled.reqs_to_send),
        (Purpose.RECEIVE, scheduled.reqs_to_recv),
        (Purpose.LOAD, scheduled.reqs_to_load),
    ):
        yield from ((request, purpose, blocks) for request, blocks in requests.items())


class _Group:
    """A group that is summed. ways: for each replica key, in ascending order, the way of the layers that have it. Keeps the
    cache alive, whose addresses the ways hold. Raises UnsupportedCache."""

    def __init__(
        self, cache: PagedKVCache, number: int, group: AnyGroup, rank: Rank, kv_heads: Mapping[str, int]
    ) -> None:
        self.number, self.group, self._cache = number, group, cache
        self.fingerprint = layers_fingerprint(layer.spec(number) for layer in group.layers)
        if isinstance(group, StateGroup):
            _check_single(group, rank)
            self.ways: list[Way] = [(ONE_COPY, route_of(cache, number))]
            self.start: Callable[[GroupPlan], Sums] = partial(HostSums, ways=self.ways)
            return
        keys = dict(zip(group.layers, replica_keys(group, rank, kv_heads), strict=True))
        self.ways = []
        for key in sorted(set(keys.values())):
            members = group.restricted([layer for layer in group.layers if keys[layer] == key])
            self.ways.append((key, route_of(replace(cache, groups={number: members}), number)))
        self.start = _starter(self.ways)

    def check_block_checksums(self, tensor: torch.Tensor, span: Span) -> None:
        """Raises InvalidShape or InvalidBlockId where a tensor has no entries for these blocks."""
        fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int64 and tensor.ndim == 1
        if not fits or tensor.device != self.group.device:
            given = (
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                if hasattr(tensor, "device")
                else repr(tensor)
            )
            raise InvalidShape(
                f"block_checksums[{self.number}] is {given}: expected int64 (blocks,) on {self.group.device}, as "
                "init_block_checksums makes it"
            )
        if len(span) and (last := int(span.block_ids.max())) >= tensor.numel():
            raise InvalidBlockId(
                f"block {last} has no entry in block_checksums[{self.number}] of {tensor.numel()} blocks: make it with the "
                "number of the cache's blocks"
            )


def _check_single(group: StateGroup, rank: Rank) -> None:
    """Raise UnsupportedCache where several ranks have the same rows: each copy would be added to the sum."""
    for layer in group.layers:
        for state in layer.states:
            rows = sum(count for _, count in state.merged_rows)
            if state.model_rows and rows * rank.tp_size > state.model_rows:
                raise UnsupportedCache(
                    f"layer {layer.name}: {rows} rows of {state.model_rows} on each of {rank.tp_size} ranks: some have the "
                    "same ones, and sums of states are kept for one copy alone"
                )


def _starter(ways: Sequence[Way]) -> Callable[[GroupPlan], Sums]:
    """What sums a step's blocks: on the device where kernels serve all of a group, else in the calling thread."""
    if any(isinstance(route, HostRoute) for _, route in ways):
        return partial(HostSums, ways=ways)
    from kvstore.checksumming_device import DeviceSums, HeaderPool, device_of_ways

    return partial(DeviceSums, ways=ways, pool=HeaderPool(device_of_ways(ways)))
