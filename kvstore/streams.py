"""What the store uses of a device: streams of its own, events, pinned and device memory.

Nothing here runs on an engine's stream; of that, an event is recorded and waited for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import GraphCapture, StagingMemoryError


class Lane:
    """One stream of a device, on which work is enqueued in order. Any thread may enqueue; the lock keeps one
    thread's work together, and a torch.Stream is entered by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None], after: torch.Event | None = None, done: torch.Event | None = None) -> None:
        """Enqueue what `work` launches, behind the event `after`, and record `done` behind it. Does not wait."""
        if stream_is_capturing(self._stream):
            raise GraphCapture(
                f"a stream of {self._stream.device} that the store uses is capturing a graph, since torch hands out its "
                "streams in turn: capture on a stream that was made before the store opened"
            )
        # Both context managers are written in C: no signal can come between entering and leaving, which would leave the
        # caller's thread on this stream.
        with self._lock, self._stream:
            if after is not None:
                self._stream.wait_event(after)
            work()
            if done is not None:
                done.record(self._stream)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the device that torch's allocator keeps for this stream, so that no engine's work can still be
        using it: (nbytes,) uint8."""
        with self._lock, self._stream:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)

    def wait(self) -> None:
        """Wait for everything that was enqueued."""
        self._stream.synchronize()


class Device:
    """A device's lanes, one for puts and one for gets, so that both directions of the bus are in use at one time.

    One object for each device of the process (`device_of`). Any thread may use it; not the child of a fork.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.puts = Lane(device)
        self.gets = Lane(device)

    def mark(self) -> torch.Event | None:
        """An event behind all work that the calling thread's current stream has so far; None where there is no stream.

        Raises GraphCapture while that stream is capturing: the event would become a part of the graph.
        """
        stream = torch.accelerator.current_stream(self.device)
        if stream_is_capturing(stream):
            raise GraphCapture(
                f"the current stream of {self.device} is capturing a graph: call the store outside of the capture"
            )
        event = torch.Event(self.device)
        event.record(stream)
        return event

    def event(self) -> torch.Event:
        """An event for `Lane.run`, to be recorded again and again."""
        return torch.Event(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device's copy engines read and write by themselves: (nbytes,) uint8."""
        return self._allocate("pinned host", lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), nbytes)

    def pin(self, memory: npt.NDArray[np.uint8]) -> torch.Tensor:
        """Host memory that something else allocated, so that the device's copy engines read and write it by themselves for as
        long as the tensor is referred to: (nbytes,) uint8. Where a device cannot do that, copies are slower, and wait."""
        tensor = torch.from_numpy(memory)
        if self.device.type == "cuda":
            address, runtime = tensor.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.device):
                status = runtime.cudaHostRegister(address, tensor.nbytes, 0)
            if int(status):
                raise StagingMemoryError(
                    f"{tensor.nbytes} bytes of shared host memory cannot be pinned for {self.device}: CUDA error "
                    f"{int(status)}: allow the process to lock more memory, or lower StoreConfig(batch_bytes=...)"
                )
            weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
        return tensor

    def memory(self, nbytes: int) -> torch.Tensor:
        """Memory of the device: (nbytes,) uint8. Who frees it has waited for all that uses it."""
        return self._allocate("device", lambda: self.gets.allocate(nbytes), nbytes)

    def _allocate(self, kind: str, make: Callable[[], torch.Tensor], nbytes: int) -> torch.Tensor:
        try:
            return make()
        except RuntimeError as error:
            raise StagingMemoryError(
                f"{nbytes} bytes of {kind} memory for staging blocks of {self.device}: {error}: leave the engine a "
                "smaller share of it, or lower StoreConfig(batch_bytes=...)"
            ) from error


def stream_is_capturing(stream: torch.Stream) -> bool:
    """Whether a stream's work goes into a graph; False where torch cannot tell."""
    capturing = getattr(stream, "is_capturing", None)
    if capturing is None and stream.device.type == "cuda":
        with torch.cuda.device(stream.device):
            return torch.cuda.is_current_stream_capturing()
    return bool(capturing and capturing())


def wait_for_caller(device: torch.device) -> None:
    """Wait for what the calling thread's current stream has been given, or for the device where it has no streams."""
    try:
        torch.accelerator.current_stream(device).synchronize()
    except (RuntimeError, NotImplementedError, ValueError):
        torch.accelerator.synchronize(device)


@cache
def device_of(device: torch.device) -> Device:
    """The process's Device object for a device."""
    return Device(device)
