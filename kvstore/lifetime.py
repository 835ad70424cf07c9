"""What a fork, close and calls in flight mean to a shard that one process opened, itself or through another process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from kvstore.errors import StoreBusy, StoreClosed, StoreForked

POLL_SECONDS: Final = 0.002
"""How often a call that waits for others looks again. No condition variable: a signal may raise inside its Python code
and leave its lock held."""


class Lifetime:
    """The calls of one open shard. Any thread may use it. After a fork the child gets StoreForked; after close, everyone
    gets StoreClosed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: set[object] = set()
        """Tokens of the calls in flight: each leaves by discarding its own, in one step."""
        self._pid, self._closing = os.getpid(), False

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the shard."""
        return os.getpid() != self._pid

    @property
    def closing(self) -> bool:
        """Whether close was called."""
        return self._closing

    def check_open(self) -> None:
        """Raise StoreForked in the child of a fork, StoreClosed after close. Takes no lock, which a fork may hold."""
        if self.forked:
            raise StoreForked(
                f"{self.folder} was opened by process {self._pid}, this is its fork {os.getpid()}: let the child open a "
                "shard of its own, or spawn it instead of forking"
            )
        if self._closing:
            raise StoreClosed(f"{self.folder} was closed: open the store again")

    def _wait_for_calls(self, deadline: float) -> None:
        while self.calls and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _check_ended(self, waited_s: float) -> None:
        """Raise StoreBusy where calls are in flight that close has waited for."""
        if self.calls:
            raise StoreBusy(
                f"{self.folder}: {len(self.calls)} calls are still in flight after {waited_s:.0f} seconds: the "
                "shard is left open; close it again when they have ended"
            )
