"""The GPU benchmark's kernel phase: seconds of each operation on as many bytes, in one run.

Of a call of n bytes of blocks, what passes the device's memory is n for what only reads and 2*n for what reads and writes.
A share of a copy's bandwidth compares these bytes a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch

from kvstore.launches import Launches
from kvstore.tools.gpu_cases import same
from kvstore.tools.gpu_device import Mismatch, Place
from kvstore.tools.gpu_memory import Geometry, Memory, rows_of, spans, window
from kvstore.tools.gpu_torch import TorchSums

READ_AND_WRITTEN: Final = ("copy", "gather", "scatter")
BUS: Final = ("host_to_device", "device_to_host", "load")
"""These move n bytes over the bus; `load` writes and reads staging besides."""
TORCH: Final = "torch"
TORCH_CALLS = 3

Numbered = Callable[[int], Any]
"""Enqueues the call of that number."""


class Operations:
    """Everything that is measured of one geometry at one size. Call i takes other blocks than call i - 1."""

    def __init__(self, memory: Memory, geometry: Geometry, blocks: int, calls: int) -> None:
        self.memory, self.nbytes, self._blocks = memory, blocks * geometry.block_bytes, blocks
        place, cache = memory.place, memory.paged(geometry)
        self._cache, self._launches = cache, Launches(cache.group(0), place.device)
        self._spans = spans(cache.group(0), blocks, calls)
        self._rows_here, self._rows = rows_of(self._spans, place)
        self._rows_sent = torch.empty_like(self._rows[0])
        self._sums = torch.zeros(blocks, dtype=torch.int64, device=place.device)
        self._sums_here = place.kit.pinned(8 * blocks).view(torch.int64)
        shape = blocks, self._launches.num_slices
        self._slices = torch.zeros(shape, dtype=torch.int64, device=place.device)
        self._torch = TorchSums(cache, place.device)
        self._weights = self._torch.weights(self._spans[0])
        self._ids = [self._torch.ids(span) for span in self._spans]

    def all(self) -> dict[str, Numbered]:
        """The operations by name, the limits first."""
        limits = {"copy": self.copy, "reduce": self.reduce, BUS[0]: self.host_to_device, BUS[1]: self.device_to_host}
        kernels = {"checksum": self.checksum, "slices": self.slices, "gather": self.gather, "scatter": self.scatter}
        return {**limits, **kernels, "verify": self.verify, "load": self.load, TORCH: self.torch}

    def _staged(self, call: int) -> torch.Tensor:
        return window(self.memory.staging, self.nbytes, call)

    def _staged_blocks(self, call: int) -> torch.Tensor:
        return self._staged(call).view(self._blocks, -1)

    def copy(self, call: int) -> None:
        """Device to device, one run of bytes."""
        self._staged(call).copy_(window(self.memory.cache, self.nbytes, call))

    def reduce(self, call: int) -> torch.Tensor:
        """torch's sum of one run of int64 words."""
        return window(self.memory.cache, self.nbytes, call).view(torch.int64).sum()

    def host_to_device(self, call: int) -> None:
        """One run of pinned bytes."""
        self._staged(call).copy_(window(self.memory.host, self.nbytes, call), non_blocking=True)

    def device_to_host(self, call: int) -> None:
        """To one run of pinned bytes."""
        window(self.memory.host, self.nbytes, call).copy_(self._staged(call), non_blocking=True)

    def checksum(self, call: int) -> torch.Tensor:
        """c of each block, with the clearing of the sums."""
        self._launches.checksum_blocks(self._rows[call], self._sums.zero_())
        return self._sums

    def slices(self, call: int) -> None:
        """s of each slice, as a put takes them, with the clearing of the sums."""
        self._launches.checksum_slices(self._rows[call], self._slices.zero_())

    def gather(self, call: int) -> None:
        """Blocks to staging on the device."""
        self._launches.gather(self._rows[call], self._staged_blocks(call))

    def scatter(self, call: int) -> None:
        """Staging on the device to blocks."""
        self._launches.scatter(self._rows[call], self._staged_blocks(call))

    def verify(self, call: int) -> None:
        """What a get adds: rows to the device, c of each block, sums to the host."""
        self._rows_sent.copy_(self._rows_here[call], non_blocking=True)
        self._launches.checksum_blocks(self._rows_sent, self._sums.zero_())
        self._sums_here.copy_(self._sums, non_blocking=True)

    def load(self, call: int) -> None:
        """A get without verification and disk: pinned bytes to the device, and to blocks."""
        self.host_to_device(call)
        self.scatter(call)

    def torch(self, call: int) -> torch.Tensor:
        """The torch formulation of `checksum`."""
        return self._torch.sums(self._ids[call], self._weights)

    def check(self) -> None:
        """Raise Mismatch unless `torch`, `checksum` and `verify` agree, so that they do the same work."""
        expected = self.torch(0).cpu().numpy().view("u8")
        good = same(self.checksum(0), expected)
        self.verify(0)
        self.memory.place.synchronize()
        if not (good and same(self._sums_here, expected)):
            raise Mismatch("the kernels' sums are not those of the torch formulation")


def measure(memory: Memory, geometry: Geometry, call_bytes: int, calls: int) -> dict[str, Any]:
    """Seconds and rates of all operations on as many blocks as call_bytes hold, of `calls` calls each after one more."""
    blocks = max(1, call_bytes // geometry.block_bytes)
    operations = Operations(memory, geometry, blocks, calls + 1)
    operations.check()
    seconds = {
        name: timed(memory.place, call, min(calls, TORCH_CALLS) if name == TORCH else calls)
        for name, call in operations.all().items()
    }
    return figures(seconds, operations.nbytes) | {"blocks": blocks}


def timed(place: Place, call: Numbered, calls: int) -> list[float]:
    """The device's seconds of each call, after a first one that is not counted."""
    call(calls)
    place.synchronize()
    return place.seconds([lambda i=i: call(i) for i in range(calls)])  # type: ignore[misc]


def figures(seconds: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """Medians and what follows from them. nbytes: of the blocks of a call.

    gb_per_s: nbytes a second; memory_gb_per_s: bytes that pass the device's memory; of_copy, of_reduction: that rate over
    the copy's and the reduction's; times_torch: the torch formulation's seconds over the checksum's;
    verify_of_load: the verification's seconds over the load's.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    moved = {name: nbytes * (2 if name in READ_AND_WRITTEN else 1) / s / 1e9 for name, s in medians.items()}
    found: dict[str, Any] = {}
    for name, values in seconds.items():
        found[name] = {
            "seconds": {"min": min(values), "median": medians[name], "max": max(values)},
            "gb_per_s": nbytes / medians[name] / 1e9,
        }
        if name not in BUS:
            found[name]["memory_gb_per_s"] = moved[name]
            found[name]["of_copy"] = moved[name] / moved["copy"]
            found[name]["of_reduction"] = moved[name] / moved["reduce"]
    return {
        "bytes": nbytes,
        "operations": found,
        "times_torch": medians[TORCH] / medians["checksum"],
        "verify_of_load": medians["verify"] / medians["load"],
    }
