"""Blocks between a paged cache and staging memory, and their checksums: which way, by where the cache lies.

A cache on the CPU is walked by the host's loops. On a device that Triton serves, kernels gather, scatter and sum over
all layers of a group, and copy engines move staged blocks; elsewhere blocks are copied to the host and back.
Checksums are passes of their own: they take their block ids from the caller, never from a copy's descriptor.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import torch

from kvstore.cache import AnyGroup, PagedKVCache, StateGroup
from kvstore.checksum import UInt64Array
from kvstore.copyback import CopyBackPath
from kvstore.hostpath import host_path
from kvstore.route import HostRoute, Route, Transfer
from kvstore.span import Span, check_span
from kvstore.statecopy import StateCopyPath
from kvstore.statepath import state_path
from kvstore.streams import wait_for_caller

log = logging.getLogger(__name__)

TRITON_DEVICES: Final = ("cuda", "xpu")
"""torch's names of the devices that Triton compiles for; ROCm calls itself cuda."""

# No route refers to its group: an entry goes with its key.
_routes: WeakKeyDictionary[AnyGroup, Route] = WeakKeyDictionary()


def kv_checksum_platform_supported(device: torch.device | str | None = None) -> bool:
    """Whether the kernels serve caches on a device: Triton is installed, the device is CUDA, ROCm or XPU, and its blocks
    and sums come out as the host's. device: by default torch's current accelerator.

    Where they do not, the store copies blocks to the host and back, and verifies them all the same.
    """
    place = torch.accelerator.current_accelerator() if device is None else torch.device(device)
    return place is not None and _unserved(_indexed(place)) is None


def _indexed(device: torch.device) -> torch.device:
    """The device with its number, as a tensor on it says."""
    if device.index is None and device.type in TRITON_DEVICES and torch.accelerator.is_available():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _unserved(device: torch.device) -> str | None:
    """Why no kernel serves a device, None where they do."""
    if device.type not in TRITON_DEVICES:
        return f"Triton does not compile for {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: `pip install triton`"
    from kvstore.fitness import unfit

    reason: str | None = unfit(device)
    return reason


def route_of(cache: PagedKVCache, number: int) -> Route:
    """The way of a group of the cache, made once a group. Raises UnknownGroup, StagingMemoryError."""
    return group_route(cache, cache.any_group(number))


def group_route(cache: PagedKVCache, group: AnyGroup) -> Route:
    """The way of a group, or of some layers of one, of the cache, made once. Raises StagingMemoryError."""
    route = _routes.get(group)
    if route is None:
        route = _routes[group] = _make_route(cache, group)
    return route


def _make_route(cache: PagedKVCache, group: AnyGroup) -> Route:
    if isinstance(group, StateGroup):
        return _make_state_route(cache, group)
    if group.device.type == "cpu":
        return HostRoute(host_path(group), group)
    reason = _unserved(group.device)
    if reason is None and not group.regular:
        reason = (
            "its cells are no runs of aligned 8-byte words: keep the channels last, and strides in multiples of 8 bytes"
        )
    if reason is None:
        from kvstore.devicepath import DeviceRoute
        from kvstore.streams import device_of

        return DeviceRoute(group, device_of(group.device))
    log.warning(
        "group %d on %s: no kernel serves it (%s): blocks are copied to the host and back, and verified there, many times "
        "slower",
        group.number,
        group.device,
        reason,
    )
    return HostRoute(CopyBackPath(cache, group), group, partial(wait_for_caller, group.device))


def _make_state_route(cache: PagedKVCache, group: StateGroup) -> Route:
    if group.device.type == "cpu":
        return HostRoute(state_path(group), group)
    path, ready = StateCopyPath(cache, group), partial(wait_for_caller, group.device)
    reason = _unserved(group.device)
    if reason is None:
        from kvstore.stateroute import StateRoute, unfit_states
        from kvstore.streams import device_of

        device = device_of(group.device)
        reason = unfit_states(group, device)
        if reason is None:
            return StateRoute(path, group, ready, device)
    log.warning(
        "group %d on %s: no kernel sums its states (%s): they are copied to the host to be verified, many times slower",
        *(group.number, group.device, reason),
    )
    return HostRoute(path, group, ready)


def slice_checksums(
    cache: PagedKVCache, block_ids: Sequence[int], start: int = 0, num_tokens: int | None = None, group: int = 0
) -> UInt64Array:
    """s of each slice of blocks at consecutive positions: (blocks, slices) uint64, slices in canonical order; of a group of
    states the sum of m*s over each range of rows.

    start: the first block's position; num_tokens: the request's token count, by default all blocks are full. On a device
    it waits for what the current stream has been given so far.
    Raises UnknownGroup, InvalidBlockId, DuplicateBlockId, InvalidPosition or NoValidTokens.
    """
    return _summed(cache, group, block_ids, start, num_tokens, lambda transfer, span: transfer.checksum(span))


def block_checksums(
    cache: PagedKVCache, block_ids: Sequence[int], start: int = 0, num_tokens: int | None = None, group: int = 0
) -> UInt64Array:
    """c of each block over this cache's layers and heads: (blocks,) uint64; arguments as `slice_checksums`.

    The parts of all ranks and stages add up, mod 2**64, to the unsharded model's (docs/checksum.md).
    """
    return _summed(cache, group, block_ids, start, num_tokens, lambda transfer, span: transfer.block_checksums(span))


def _summed(
    cache: PagedKVCache,
    group: int,
    block_ids: Sequence[int],
    start: int,
    num_tokens: int | None,
    sums: Callable[[Transfer, Span], UInt64Array],
) -> UInt64Array:
    span = check_span(cache.any_group(group), block_ids, start, num_tokens)
    transfer = route_of(cache, group).begin_get()
    try:
        return sums(transfer, span)
    finally:
        if transfer.pending:
            transfer.finish()
