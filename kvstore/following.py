"""A reader follows its shard: where other files are put in the place of those that it has open, it opens those."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import lmdb

from kvstore.compaction import Compactable
from kvstore.environment import HOLD_PATIENCE_S as HOLD_PATIENCE_S
from kvstore.environment import REVIVE_PATIENCE_S
from kvstore.errors import KVStoreError, StorePathError
from kvstore.lifetime import POLL_SECONDS
from kvstore.storefile import DATA_NAME

log = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 0.05
"""How often a reader's calls look whether its files are still the ones at their paths."""
RETRY_INTERVAL_S: Final = 0.25
"""How often a reader's calls try to open a shard that could not be opened."""
TIDY_INTERVAL_S: Final = 1.0
"""How often calls clear what killed readers left in LMDB's table: it keeps freed pages from being used again."""


NO_FILES: Final[Any] = SimpleNamespace(close=lambda: None)
"""In the place of LMDB's environment and the STORE file of a shard that nobody has made yet."""


class Following(Compactable):
    """An Environment whose reader goes with the shard's files. Threads, forks and close as Environment.

    A reader whose files were removed or replaced closes them in the next call, once no other is in flight, and opens what
    lies there. Where that cannot be opened it is `gone`, and calls find nothing, until one of them can open it; a reader that
    is `patient` may begin so.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        sync: bool,
        writable: bool,
        patience_s: float = HOLD_PATIENCE_S,
        patient: bool = False,
    ) -> None:
        """patient: whether a reader may be opened before a writer has made the shard."""
        self._patient = patient
        self.gone = False
        """Whether there is nothing to read: no file is open, or only one that is not the shard's any more."""
        self._replaced = False
        """Whether the files that are open are not the shard's any more. Set and unset behind the gate, as `gone` is."""
        self._look_at = self._tidy_at = 0.0
        self._told = ""
        super().__init__(folder, capacity_bytes, sync, writable, patience_s)

    def _open_first(self, patience_s: float) -> None:
        try:
            self._open(patience_s)
        except StorePathError:
            if self.writable or not self._patient or (self.folder / DATA_NAME).exists():
                raise
            self.gone, self._env, self.store_file = True, NO_FILES, NO_FILES
            self._look_at = time.monotonic() + RETRY_INTERVAL_S

    def enter(self, token: object) -> None:
        self.check_open()
        if not self.writable:
            self._follow()
        super().enter(token)
        self._tidy()

    def _begin(self, wait: bool = True) -> Any:
        if self.gone:
            raise lmdb.Error("the shard was removed or replaced, and what lies there cannot be opened")
        return super()._begin(wait)

    def _follow(self) -> None:
        """See now and then that the files are the shard's, and that a shard that is gone stays so."""
        if not self._replaced and time.monotonic() < self._look_at:
            return
        with self._gate:
            if self._closing:
                return
            self._look_at = time.monotonic() + LOOK_INTERVAL_S
            if self.gone and not self._replaced:
                self._open_anew()
                return
            self._replaced |= self.store_file.replaced()
        if self._replaced:
            self._give_up()

    def _give_up(self) -> None:
        """Open the shard's files anew once no call is in flight. Where one does not end, nothing is read meanwhile, and no
        further call waits for it (it may be below this one, interrupted by a signal)."""
        deadline = time.monotonic() + (0 if self.gone else REVIVE_PATIENCE_S)
        while not self._given_up(last=time.monotonic() >= deadline):
            time.sleep(POLL_SECONDS)

    def _given_up(self, last: bool) -> bool:
        with self._gate:
            if self._closing or not self._replaced:
                return True
            if not self.calls:
                self._open_anew()
                return True
            self.gone |= last
            return last

    def _open_anew(self) -> None:
        """Open what lies at the paths. No call reads: none is in flight, or the shard was gone before they came."""
        self.gone = True
        self._env.close()
        self.store_file.close()
        self._replaced = False
        try:
            self._open(patience_s=0)
        except (KVStoreError, lmdb.Error, OSError) as error:
            self._look_at = time.monotonic() + RETRY_INTERVAL_S
            if str(error) != self._told:
                log.warning(
                    "%s: removed or replaced, and nothing is found in it until it opens: %s", self.folder, error
                )
            self._told = str(error)
        else:
            self.gone, self._told = False, ""
            log.warning("%s: opened anew: its files were replaced", self.folder)

    def _tidy(self) -> None:
        """Inside a call, which keeps the environment open."""
        if self.gone or time.monotonic() < self._tidy_at:
            return
        self._tidy_at = time.monotonic() + TIDY_INTERVAL_S
        try:
            self._env.reader_check()
        except lmdb.Error:
            log.exception("%s: LMDB's table of readers cannot be checked", self.folder)
