"""Whether a device can be served by the kernels: found out by running them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.cache import PagedKVCache
from kvstore.devicepath import DeviceRoute
from kvstore.errors import GraphCapture, StagingMemoryError
from kvstore.hostpath import host_path
from kvstore.route import HostRoute, Route
from kvstore.span import check_span
from kvstore.staging import StagingPool
from kvstore.streams import device_of

SHAPE = (3, 2, 5, 64)
"""Blocks, heads, tokens and bytes of a cell of the caches that are used."""
BLOCK_IDS = (2, 0)
TOKENS = 23
START = 3


_found: dict[torch.device, str | None] = {}


def unfit(device: torch.device) -> str | None:
    """Why the kernels cannot serve a device, None where they do: blocks are gathered, scattered and summed there, and
    everything is compared with the host's results. Once a process; takes the time to compile four kernels.

    Raises GraphCapture, and StagingMemoryError where there is no room for this at the moment.
    """
    if device not in _found:
        _found[device] = _try(device)
    return _found[device]


def _try(device: torch.device) -> str | None:
    try:
        found, expected = (_moved(*_caches(place)) for place in (device, torch.device("cpu")))
    except (GraphCapture, StagingMemoryError):
        raise
    except torch.OutOfMemoryError as error:
        raise StagingMemoryError(f"no room on {device} to try its kernels: {error}") from error
    except Exception as error:
        # Whatever keeps Triton from compiling or launching: an old device, no driver, no C compiler, too little memory.
        return f"{type(error).__name__}: {error}"
    same = [np.array_equal(a, b) for a, b in zip(found, expected, strict=True)]
    names = ("the gathered blocks", "their slices' sums", "the scattered blocks", "the blocks' sums")
    wrong = [name for name, equal in zip(names, same, strict=True) if not equal]
    return f"{', '.join(wrong)} are not the host's" if wrong else None


def _caches(device: torch.device) -> list[PagedKVCache]:
    """Two caches of random bytes, the same on every device."""
    random = np.random.default_rng(0)
    bits = [torch.from_numpy(random.integers(0, 256, SHAPE, np.uint8)).to(device) for _ in range(2)]
    return [PagedKVCache.from_tensors({"layers.0": tensor}, "BHNC") for tensor in bits]


def _moved(source: PagedKVCache, target: PagedKVCache) -> tuple[npt.NDArray[Any], ...]:
    """What comes of moving blocks from one cache to another."""
    members = source.group(0)
    span = check_span(members, BLOCK_IDS, START, TOKENS)
    put, get = _route(source), _route(target)
    buffer = put.new_buffer(len(span) * members.block_bytes)
    staged = put.stage(buffer, len(span))
    sums = put.begin_put().gather(span, staged).take(0, len(span))
    transfer = get.begin_get()
    transfer.scatter(span, staged)
    totals = transfer.block_checksums(span, StagingPool(members.block_bytes, get.new_buffer))
    landed = target.tensors["layers.0"]
    assert isinstance(landed, torch.Tensor)
    return staged.bytes, sums, landed.cpu().numpy(), totals


def _route(cache: PagedKVCache) -> Route:
    members = cache.group(0)
    if members.device.type == "cpu":
        return HostRoute(host_path(members), members)
    return DeviceRoute(members, device_of(members.device))
