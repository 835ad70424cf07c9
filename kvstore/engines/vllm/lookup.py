"""What the scheduler asks the store: how many leading tokens of a request every rank can load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.identity import CacheIdentity
from kvstore.store import KVStore

log = logging.getLogger(__name__)
RETRY_S: Final = 2.0
"""Between two tries to open a store that cannot be read yet."""


class Lookup:
    """A reader of all ranks' shards. Belongs to the scheduler's thread; a thread of its own opens the store where that fails
    at first, since the ranks may not have made it yet, and until then nothing is found.

    open_store: opens it for reading, for an identity that a rank told, or None. block_sizes: {group: tokens}.
    """

    def __init__(self, open_store: Callable[[CacheIdentity | None], KVStore], block_sizes: Mapping[int, int]) -> None:
        self._open_store, self._block_sizes = open_store, dict(block_sizes)
        self._identity: CacheIdentity | None = None
        self._begun = self._complained = False
        self._closed = threading.Event()
        self._store: KVStore | None = None
        self._opening = threading.Thread(target=self._open, name="kvstore-lookup", daemon=True)

    def begin(self, identity: CacheIdentity | None) -> None:
        """Open the store; the first call counts. identity: the ranks', None where they did not tell."""
        if not self._begun:
            self._begun, self._identity = True, identity
            if not self._try():
                self._opening.start()

    @property
    def store(self) -> KVStore | None:
        """The reader, None while there is none."""
        return self._store

    def match(self, hashes: Mapping[int, Sequence[bytes]]) -> int:
        """How many leading tokens of a request can be loaded. hashes: {group: hashes of its blocks from position 0}."""
        self.begin(None)
        store = self._store
        if store is None or not all(hashes.values()):
            return 0
        try:
            if len(hashes) == 1:
                [(group, own)] = hashes.items()
                return store.match_prefix(own, group) * self._block_sizes[group]
            return store.match_tokens(hashes)
        except KVStoreError as error:
            self._complain(error)
            return 0

    def close(self) -> None:
        """Close the reader, or give up opening it."""
        self._closed.set()
        if self._opening.ident is not None:
            self._opening.join()
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        while not self._closed.wait(RETRY_S):
            if self._try():
                return

    def _try(self) -> bool:
        try:
            self._store = self._open_store(self._identity)
        except KVStoreError as error:
            self._complain(error)
            return False
        return True

    def _complain(self, error: KVStoreError) -> None:
        if not self._complained:
            log.warning("nothing is loaded from the store for now: %s", error)
        self._complained = True
