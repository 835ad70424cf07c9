"""Where the GPU benchmark runs: a CUDA device and its clock, or the CPU in its place for a rehearsal."""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import torch

from kvstore.cache import PagedKVCache
from kvstore.devicepath import DeviceRoute
from kvstore.fitness import unfit
from kvstore.streams import Device, Lane, device_of
from kvstore.transfer import route_of

HOLD_CYCLES = 40_000_000
"""About 20 ms: how long the device is kept busy while the host enqueues what is timed."""

Call = Callable[[], None]


class BenchError(Exception):
    """The benchmark cannot run here; the message says what to do."""


class Mismatch(Exception):
    """The device's results are not the reference's: no figure means anything."""


class Place(Protocol):
    """A device and its clock."""

    device: torch.device
    kit: Device
    """Its lanes and memory, as the store uses them."""

    def seconds(self, calls: Sequence[Call]) -> list[float]:
        """The device's seconds for what each call enqueues on the current stream, one behind the other."""

    def synchronize(self) -> None:
        """Wait for all that was enqueued."""

    def free_bytes(self) -> int:
        """Free memory of the device."""

    def route(self, cache: PagedKVCache) -> DeviceRoute:
        """The way of the cache's group 0. Raises BenchError where no kernel serves it."""

    def describe(self) -> dict[str, Any]:
        """Name and versions, for the report."""


class Cuda:
    """A CUDA (or ROCm) device; makes it the current one. Raises BenchError where there is none."""

    def __init__(self, name: str) -> None:
        if not torch.cuda.is_available():
            raise BenchError("no CUDA device: --host-cost and --rehearse run without one")
        wanted = torch.device(name)
        self.device = torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
        torch.cuda.set_device(self.device)
        self.kit = device_of(self.device)

    def seconds(self, calls: Sequence[Call]) -> list[float]:
        """By events between the calls. The device is held first, so that the host runs ahead and its own time is seen
        only where a call takes longer to enqueue than to run."""
        marks: list[Any] = [_event() for _ in range(len(calls) + 1)]
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        marks[-1].synchronize()
        return [one.elapsed_time(two) / 1e3 for one, two in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def route(self, cache: PagedKVCache) -> DeviceRoute:
        found = route_of(cache, 0)
        if not isinstance(found, DeviceRoute):
            raise BenchError(f"no kernel serves this device: {unfit(self.device)}")
        return found

    def describe(self) -> dict[str, Any]:
        seen = torch.cuda.get_device_properties(self.device)
        return {
            "name": seen.name,
            "memory_bytes": seen.total_memory,
            "multiprocessors": seen.multi_processor_count,
            "l2_bytes": getattr(seen, "L2_cache_size", None),
            "cuda": torch.version.cuda or torch.version.hip,
        } | host_description()


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostLane(Lane):
    """Does its work at once."""

    def __init__(self) -> None:
        """No stream."""

    def run(self, work: Call, after: torch.Event | None = None, done: torch.Event | None = None) -> None:
        work()

    def wait(self) -> None:
        """Nothing is ever left to do."""


class HostEvent:
    """An event that has always passed."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostDevice(Device):
    """The CPU as a device: what is enqueued is done at once, in the same thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.puts: Lane = HostLane()
        self.gets: Lane = HostLane()

    def mark(self) -> torch.Event | None:
        return None

    def event(self) -> Any:
        return HostEvent()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.memory(nbytes)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class Rehearsal:
    """The CPU in a device's place, with the kernels in Triton's interpreter: every line runs, no figure means
    anything."""

    def __init__(self) -> None:
        self.kit: Device = HostDevice()
        self.device = self.kit.device

    def seconds(self, calls: Sequence[Call]) -> list[float]:
        found = []
        for call in calls:
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return found

    def synchronize(self) -> None:
        """Everything is done."""

    def free_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def route(self, cache: PagedKVCache) -> DeviceRoute:
        return DeviceRoute(cache.group(0), self.kit)

    def describe(self) -> dict[str, Any]:
        return {"name": "CPU, a rehearsal in Triton's interpreter"} | host_description()


def host_description() -> dict[str, Any]:
    """The host's CPUs and the versions of what the figures depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"cpus": len(os.sched_getaffinity(0)), **versions, "triton": _version("triton")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
