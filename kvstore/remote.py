"""A shard that another process has open: its storage as this process asks for it."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvstore.channel import understood
from kvstore.counters import Counters, Refused
from kvstore.errors import KVStoreError
from kvstore.inline import Opening
from kvstore.lifetime import POLL_SECONDS, Lifetime
from kvstore.messages import (
    Kind,
    Late,
    Message,
    pack_strings,
)
from kvstore.remoteget import RemoteGet
from kvstore.remoteput import RemotePut
from kvstore.results import Bools
from kvstore.shape import GroupShape
from kvstore.steps import Finer, finer_blobs
from kvstore.storage import Question, Unavailable
from kvstore.storefile import claim, release
from kvstore.watching import Watch

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 60.0


class RemoteStorage(Lifetime):
    """Storage in an I/O process that is started with it, and again whenever it ends.

    Owned by one Front. Any thread may call it. One thread of its own starts, watches and reaps the process, which ends
    with this one whatever becomes of it. After close every call raises StoreClosed; in a fork's child StoreForked.
    Raises what opening a store raises.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening.folder)
        self.clock = opening.clock
        self.counters, self.refused = Counters(), Refused()
        # The engine may change its working directory before the process is started again.
        opening = replace(opening, folder=opening.folder.absolute())
        self._given_up = False
        # A reader's files are open in its own process, so that it may stand beside this process's writer.
        self._claimed = claim(opening.folder) if opening.writable else ""
        self._watch = Watch(opening, self.counters, self.refused)
        self._ended = weakref.finalize(self, _give_up, self._watch, self._claimed, self._pid)
        try:
            self.emptied = bool(self._watch.begin()["emptied"])
        except BaseException:
            self._closing = True
            self._ended()
            raise

    @property
    def process_id(self) -> int | None:
        link = self._watch.link
        return None if link is None else link.process.pid

    def enter(self, token: object) -> None:
        self.calls.add(token)
        self.check_open()

    def put(self, question: Question) -> RemotePut:
        return RemotePut(self._watch, question)

    def get(self, question: Question) -> RemoteGet:
        return RemoteGet(self._watch, question)

    def match(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> int:
        answer = self._ask(Kind.MATCH, [shape.encode(), *pack_strings(hashes), *finer_blobs(finer)])
        return min(len(hashes), max(0, understood(lambda: int(answer.fields["found"]))))

    def present(self, shape: GroupShape, hashes: list[bytes], finer: Finer | None = None) -> Bools:
        answer = self._ask(Kind.PRESENT, [shape.encode(), *pack_strings(hashes), *finer_blobs(finer)])
        found: Bools = understood(lambda: np.frombuffer(answer.blobs[0], np.uint8) != 0)
        if found.size != len(hashes):
            raise Unavailable(f"the I/O process told of {found.size} blocks and was asked for {len(hashes)}")
        return found

    def touch(self, shape: GroupShape, hashes: list[bytes]) -> None:
        self._ask(Kind.TOUCH, [shape.encode(), *pack_strings(hashes)])

    def evict(self, blocks: int) -> int:
        answer = self._insist(Kind.EVICT, {"blocks": blocks})
        return understood(lambda: int(answer.fields["gone"]))

    def clear(self) -> int:
        answer = self._insist(Kind.CLEAR, {})
        return understood(lambda: int(answer.fields["gone"]))

    def usage(self) -> dict[str, int]:
        own = {"io_crashes": 0, "io_process_up": int(self._watch.link is not None)}
        try:
            answer = self._ask(Kind.USAGE, [])
            return own | understood(lambda: {str(name): int(n) for name, n in answer.fields["usage"].items()})
        except Unavailable as error:
            self.counters.add("stats_failed")
            log.warning("%s: no figures of the shard: %s", self.folder, error)
            return own

    def _ask(self, kind: Kind, blobs: Sequence[Any]) -> Message:
        link, user = self._watch.serving(), object()
        try:
            return link.borrow(user).ask(kind, {"now": self.clock()}, blobs)
        finally:
            link.users.pop(user, None)

    def _insist(self, kind: Kind, fields: Mapping[str, Any]) -> Message:
        """Ask for what takes long, and wait as long as the process lives."""
        link, user = self._watch.serving(), object()
        try:
            channel = link.borrow(user)
            channel.send(kind, {**fields, "now": self.clock()})
            while True:
                try:
                    return channel.receive()
                except Late:
                    if not link.lives():
                        raise Unavailable("the I/O process does not answer") from None
        finally:
            link.users.pop(user, None)

    def close(self) -> None:
        if self.forked:
            return
        self._closing = True
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._wait_for_calls(deadline)
        self._check_ended(CLOSE_TIMEOUT_S)
        if self._ended.detach():
            try:
                self._watch.close()
            finally:
                release(self._claimed)
                self._given_up = True
        while not self._given_up and time.monotonic() < deadline:
            # Another call closes it.
            time.sleep(POLL_SECONDS)


def _give_up(watch: Watch, claimed: str, pid: int) -> None:
    """A store that was dropped without close gives its shard up."""
    if os.getpid() != pid:
        return
    try:
        watch.close()
    except KVStoreError:
        log.exception("%s: dropped without close", claimed)
    finally:
        release(claimed)
