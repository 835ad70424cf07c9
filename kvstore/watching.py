"""The thread that starts an I/O process, watches it, and starts it again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from kvstore.channel import failure
from kvstore.counters import Counters, Refused
from kvstore.errors import KVStoreError
from kvstore.inline import Opening
from kvstore.link import Link
from kvstore.messages import (
    Message,
)
from kvstore.storage import Unavailable

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 30.0
STEADY_S: Final = 60.0
"""A process that lived so long is started again at once."""
JOIN_S: Final = 0.05


class Watch:
    """The thread that starts the I/O process, watches it, and starts it again. Does not keep its storage alive."""

    def __init__(self, opening: Opening, counters: Counters, refused: Refused) -> None:
        self.link: Link | None = None
        self.opening, self.counters, self.refused = opening, counters, refused
        self._closing = threading.Event()
        self._begun = threading.Event()
        self._error: BaseException | None = None
        self._ready: Mapping[str, Any] = {}
        self._closed: Message | None = None
        # The kernel ends the process with the thread that started it: this one.
        self._thread = threading.Thread(target=self._run, name="kvstore-io", daemon=True)

    def begin(self) -> Mapping[str, Any]:
        """Start the process, and wait until the shard is open: what it says of that. Raises what opening a store raises."""
        self._thread.start()
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return self._ready

    def serving(self) -> Link:
        """The link to the process that lives. Raises Unavailable."""
        link = self.link
        if link is None:
            raise Unavailable("the I/O process is being started again")
        if not link.responsive:
            raise Unavailable("the I/O process does not answer")
        return link

    def _start(self) -> Link:
        return Link(self.opening, self.refused.entries(), self._note)

    def _note(self, fields: Mapping[str, Any]) -> None:
        """What came beside an answer."""
        for name, level, text in fields.get("log", ()):
            logging.getLogger(name).log(level, "%s", text)
        self.counters.add_all(fields.get("counts", {}))
        for key, sequence in fields.get("refused", ()):
            self.refused.add_sequence(bytes.fromhex(key), bytes.fromhex(sequence))

    def _run(self) -> None:
        try:
            self.link = self._start()
            self._ready = self.link.ready
        except BaseException as error:
            self._error = error
            return
        finally:
            self._begun.set()
        delay = FIRST_DELAY_S
        while self.link is not None:
            link, started = self.link, time.monotonic()
            how = link.watch()
            self._closed, self.link = link.closed, None
            if self._closing.is_set() or link.closed is not None:
                return
            self.counters.add("io_crashes")
            log.error("%s: the I/O process %d ended: %s", self.opening.folder, link.process.pid, how)
            delay = FIRST_DELAY_S if time.monotonic() - started > STEADY_S else delay
            while self.link is None and not self._closing.wait(delay):
                delay = min(2 * delay, LONGEST_DELAY_S)
                self.link = self._start_again()

    def _start_again(self) -> Link | None:
        try:
            link = self._start()
        except (KVStoreError, OSError) as error:
            log.error("%s: the I/O process cannot open the shard: %s", self.opening.folder, error)
            return None
        log.warning("%s: the I/O process %d serves the shard again", self.opening.folder, link.process.pid)
        return link

    def close(self) -> None:
        """Have the process close the shard, and wait for its end. Raises what that raises."""
        self._closing.set()
        told: Link | None = None
        look_at = time.monotonic() + self.opening.config.io_timeout_s
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            link = self.link
            if link is not None and link is not told:
                link.close()
                told = link
            self._thread.join(JOIN_S)
            if time.monotonic() > look_at and link is not None:
                look_at = time.monotonic() + self.opening.config.io_timeout_s
                if not link.lives():
                    link.process.kill()
        if self._closed is not None and self._closed.fields.get("error"):
            raise failure(self._closed.fields)
