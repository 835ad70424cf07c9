"""What the calls of one open shard share on the engine's side: storage, staging memory, threads, limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from kvstore.breaker import Breaker
from kvstore.config import StoreConfig
from kvstore.counters import Counters
from kvstore.errors import StoreClosed
from kvstore.identity import CacheIdentity
from kvstore.staging import Buffers, StagingPool
from kvstore.storage import Storage
from kvstore.views import GroupPart

log = logging.getLogger(__name__)
T = TypeVar("T")
COMPLAIN_S: Final = 10.0
COUNTED: Final = ("put_stored", "put_present", "put_bytes", "get_verified", "get_missing", "get_bytes")
"""Counters that are there from the beginning."""


@dataclass(eq=False)
class Front:
    """Owned by the KVStore that opened the shard, shared by all that are attached to it. Any thread may use it."""

    storage: Storage
    folder: Path
    identity: CacheIdentity
    config: StoreConfig
    breaker: Breaker
    puts: set[object] = field(default_factory=set)
    """Puts that were called or submitted and have not ended; each takes itself out, in one step."""
    _told_at: float = -COMPLAIN_S
    _executor: ThreadPoolExecutor | None = None
    _workers: set[threading.Thread] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def complain(self, text: str) -> None:
        """Say what storage could not do: once in a while, since every call of an engine may meet it."""
        now = time.monotonic()
        again = now < self._told_at + COMPLAIN_S
        log.log(logging.DEBUG if again else logging.WARNING, "%s: %s", self.folder, text)
        self._told_at = self._told_at if again else now

    @property
    def counters(self) -> Counters:
        """What this store object counts."""
        return self.storage.counters

    def figures(self, usage: Mapping[str, int]) -> dict[str, int]:
        """Counters, and figures of the shard. usage: what storage says of it."""
        own = {"refused_keys": len(self.storage.refused), "emptied_at_open": int(self.storage.emptied)}
        own |= {"loads_off": int(self.breaker.off()), "loads_switched_off": self.breaker.trips}
        return dict.fromkeys(COUNTED, 0) | own | dict(usage) | self.counters.figures()

    def staging(self, view: GroupPart, purpose: str, buffers: Buffers) -> StagingPool:
        """The pool for puts ("put"), whose buffers hold one transaction's blocks, or for gets ("get"); at least a block."""
        wanted = view.route.get_bytes if purpose == "get" and self.config.batch_bytes is None else 0
        nbytes = max(self.config.write_batch_bytes, view.block_bytes, wanted)
        return buffers.pool((purpose, view.route.buffer_key, nbytes), nbytes, view.route.new_buffer)

    def submit(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Run a call in one of the shard's threads. Raises StoreClosed or StoreForked."""
        self.storage.check_open()
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    self.config.threads, "kvstore", lambda: self._workers.add(threading.current_thread())
                )
            try:
                return self._executor.submit(call, *arguments)
            except RuntimeError:
                raise StoreClosed(f"{self.folder} is being closed: open the store again") from None

    def close(self) -> None:
        """Finish submitted calls, then close the storage.

        In a callback of a future, which runs in one of the shard's own threads, it does not wait for that thread: calls
        that were submitted and not begun raise StoreClosed then.
        """
        if self.storage.forked:
            return
        if self._executor is not None:
            self._executor.shutdown(wait=threading.current_thread() not in self._workers)
        self.storage.close()
