"""What the host spends on a batch of a device's blocks, in microseconds.

Stubbed: the CPU takes the device's place, kernels are not launched and nothing is copied, so that what remains is kvstore's
own work: rows, tables, checks, sums. On a device: everything, launches, copies and the wait included. Blocks have as
many slices as a real model's and 16 bytes in each, so that bytes do not count.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvstore.cache import PagedKVCache
from kvstore.devicepath import DeviceRoute
from kvstore.span import check_span
from kvstore.staging import StagingPool
from kvstore.tools.gpu_device import HostDevice, Place

LAYERS, HEADS = 32, 8
CHANNELS: Final = 4
"""Of bf16: K and V of one piece each, the fewest there can be."""
BATCHES: Final = (1, 8, 64, 512, 4096)
BATCH_MICROSECONDS, BLOCK_MICROSECONDS = 200, 1
"""The target: at most so much a batch, and for each of its blocks."""
KERNELS: Final = {
    "kvstore.kernels.checksum": ("checksum_kernel",),
    "kvstore.kernels.copy": ("gather_kernel", "scatter_kernel"),
}
"""Modules that kvstore.launches has loaded, and what is launched there."""
MIN_CALLS, MAX_CALLS, MIN_SECONDS = 5, 200, 0.2


def cache(blocks: int, device: torch.device, layers: int = LAYERS) -> PagedKVCache:
    """A cache of one token a block: layers * HEADS slices, 16 bytes each."""
    shape = (blocks, HEADS, 1, 2 * CHANNELS)
    tensors = {f"layers.{i}": torch.zeros(shape, dtype=torch.bfloat16, device=device) for i in range(layers)}
    return PagedKVCache.from_tensors(tensors, "BHNC")


class Batches:
    """One batch of a put, of a get and of a get's verification, over a route's blocks."""

    def __init__(self, cache: PagedKVCache, route: DeviceRoute) -> None:
        self._group, self._route = cache.group(0), route
        self._pool = StagingPool(self._group.num_blocks * self._group.block_bytes, route.new_buffer)
        self._put, self._get = route.begin_put(), route.begin_get()

    def steps(self, blocks: int) -> dict[str, Callable[[], Any]]:
        """By name: `gather` starts a put's batch, `put` waits for it too, `get` starts a get's, `verify` sums the blocks
        and waits."""
        ids = np.random.default_rng(0).permutation(self._group.num_blocks)[:blocks].tolist()
        span, staged = check_span(self._group, ids), self._route.stage(self._pool.borrow(self), blocks)
        self._pool.borrowed.pop(self)
        return {
            "gather": lambda: self._put.gather(span, staged),
            "put": lambda: self._put.gather(span, staged).take(0, blocks),
            "get": lambda: self._get.scatter(span, staged),
            "verify": lambda: self._get.block_checksums(span, self._pool),
        }

    def settle(self) -> None:
        """Wait for what was started."""
        self._put.finish()
        self._get.finish()


def measure(batches: Batches, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """{step: {blocks: microseconds}}, medians."""
    found: dict[str, dict[str, float]] = {}
    for blocks in sizes:
        for name, step in batches.steps(blocks).items():
            found.setdefault(name, {})[str(blocks)] = 1e6 * median_seconds(step, batches.settle)
    return found


def median_seconds(step: Callable[[], Any], settle: Callable[[], None] = lambda: None) -> float:
    """Of repeated calls, after a first one; settle is called after each and not counted."""
    seconds: list[float] = []
    while len(seconds) <= MIN_CALLS or (len(seconds) < MAX_CALLS and sum(seconds) < MIN_SECONDS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
        settle()
    return statistics.median(seconds[1:])


def stubbed_cost(sizes: Sequence[int] = BATCHES) -> dict[str, Any]:
    """The target's figures: microseconds a batch with launches and copies stubbed out, and the worst of found over
    allowed."""
    device = HostDevice()
    made = cache(max(sizes), device.device)
    with stubbed():
        return describe(measure(Batches(made, DeviceRoute(made.group(0), device)), sizes))


def device_cost(place: Place, sizes: Sequence[int] = BATCHES, layers: int = LAYERS) -> dict[str, Any]:
    """The same on a device, with everything."""
    made = cache(max(sizes), place.device, layers)
    return describe(measure(Batches(made, place.route(made)), sizes))


def describe(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Microseconds by step and blocks, a line through each step's, and the worst of found over allowed."""
    lines = {name: fit([int(n) for n in by], list(by.values())) for name, by in found.items()}
    worst = max(us / allowed(int(n)) for by in found.values() for n, us in by.items())
    return {"microseconds": found, "fit": lines, "of_allowed": worst}


def allowed(blocks: int) -> float:
    """The target for a batch, in microseconds."""
    return BATCH_MICROSECONDS + BLOCK_MICROSECONDS * blocks


def fit(blocks: Sequence[int], microseconds: Sequence[float]) -> dict[str, float]:
    """Microseconds a batch and a block, by least squares of the relative error."""
    us = np.array(microseconds)
    terms = np.stack([1 / us, np.array(blocks) / us], 1)
    (batch, block), *_ = np.linalg.lstsq(terms, np.ones(len(us)), rcond=None)
    return {"batch": float(batch), "block": float(block)}


class NoLaunch:
    """In a kernel's place: launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """While it lasts no kernel is launched and no tensor is copied or cleared, in this whole process."""

    def nothing(tensor: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        return tensor

    with contextlib.ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                stack.enter_context(_replaced(sys.modules[module], name, NoLaunch()))
        for name in ("copy_", "zero_"):
            stack.enter_context(_replaced(torch.Tensor, name, nothing))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """An attribute's value, for a while; one that was inherited is so again."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
