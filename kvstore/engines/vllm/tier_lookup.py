"""What requests are told of keys, asked of the store in a thread, so that vLLM's scheduler never waits."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstore.engines.vllm.tier_rows import GROUP, HASH_BYTES, Place, store_hash
from kvstore.errors import KVStoreError
from kvstore.store import KVStore

log = logging.getLogger(__name__)
PATIENCE_S: Final = 1.0
"""How long a request waits for an answer: a key that has none by then is a miss."""
MAX_REFUSED: Final = 2**16
"""Keys that could not be loaded and were not stored since; older ones are asked for again."""
NO_HASH: Final = bytes(HASH_BYTES)
"""In the place of a key that is not asked for; no key has it."""
CLOSE_S: Final = 60.0


@dataclass(eq=False, slots=True)
class Answer:
    """A key that requests asked for. found: None until the store has said."""

    since: float
    found: bool | None = None
    requests: set[str] = field(default_factory=set)


Waiting = tuple[str, Place, bytes, Answer]
"""Request, place, key, and where the answer goes."""
Work = queue.SimpleQueue[Callable[[KVStore], None] | None]
"""Calls in their order, None for the end."""


class Lookups:
    """Answers of one store. One thread at a time may call it, not always the same one; no call waits.

    An answer holds as long as a request that asked is there, so that a request that is asked for in several steps, key by
    key, is told the same in each. What could not be loaded is a miss until it is stored again: told otherwise, vLLM
    would try to load it for ever.

    store: owned by the caller, who closes it after this. clock: seconds, for patience alone.
    """

    def __init__(self, store: KVStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: dict[bytes, Answer] = {}
        self._asked: dict[str, set[bytes]] = {}
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: list[Waiting] = []
        self._work: Work = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(store, self._work), name="kvstore-tier", daemon=True)
        self._thread.start()

    def lookup(self, key: bytes, place: Place, request: str) -> bool | None:
        """Whether the store has a key; None while that is being found out."""
        if key in self._refused:
            return False
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = Answer(self._clock())
            self._waiting.append((request, place, key, answer))
        answer.requests.add(request)
        self._asked.setdefault(request, set()).add(key)
        if answer.found is None and self._clock() - answer.since > PATIENCE_S:
            answer.found = False
        return answer.found

    def flush(self) -> None:
        """Ask for what came since the last time, all keys of a request at once."""
        if self._waiting:
            self._work.put(partial(_answer, waiting=self._waiting, clock=self._clock))
            self._waiting = []

    def touch(self, keys: Iterable[bytes]) -> None:
        """Tell eviction, in its turn, that a request wants these keys of one group, in their order."""
        if hashes := [store_hash(key) for key in keys]:
            self._work.put(lambda store: store.touch(hashes, GROUP))

    def refuse(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded."""
        for key in keys:
            self._refused[key] = None
            self._refused.move_to_end(key)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These are in the store."""
        for key in keys:
            self._refused.pop(key, None)
            if (answer := self._answers.get(key)) is not None:
                answer.found = True

    def forget(self, request: str) -> None:
        """The request is over."""
        for key in self._asked.pop(request, ()):
            answer = self._answers[key]
            answer.requests.discard(request)
            if not answer.requests:
                del self._answers[key]

    def close(self) -> None:
        """End the thread, which may wait for the store once more; closing the store waits for that as well."""
        self._work.put(None)
        self._thread.join(CLOSE_S)


def _serve(store: KVStore, work: Work) -> None:
    while (call := work.get()) is not None:
        try:
            call(store)
        except KVStoreError as error:
            log.warning("the store could not be asked: %s", error)
        except Exception:
            log.exception("the store could not be asked")


def _answer(store: KVStore, waiting: Collection[Waiting], clock: Callable[[], float]) -> None:
    """Ask for each request's keys, and tell eviction of the requests. Whatever has no answer then is a miss."""
    requests: dict[tuple[str, int, int], dict[int, tuple[bytes, Answer]]] = {}
    try:
        for request, place, key, answer in waiting:
            # Several keys of one position end inside its row, each after more of the tokens.
            turn = 0
            while place.position in requests.setdefault((request, place.group, turn), {}):
                turn += 1
            requests[request, place.group, turn][place.position] = (store_hash(key), answer)
        for asked in requests.values():
            # Where the store hangs, what waited behind is not worth another wait.
            if any(clock() - answer.since <= PATIENCE_S for _, answer in asked.values()):
                _ask(store, asked)
    finally:
        for *_, answer in waiting:
            if answer.found is None:
                answer.found = False
    for asked in requests.values():
        store.touch([asked[position][0] for position in sorted(asked)], GROUP)


def _ask(store: KVStore, asked: Mapping[int, tuple[bytes, Answer]]) -> None:
    """Ask for keys of one request and group, by position; the store tells of blocks from position 0 on."""
    names = [asked[position][0] if position in asked else NO_HASH for position in range(max(asked) + 1)]
    there = store._present(GROUP, names, None).there
    for position, (_, answer) in asked.items():
        if answer.found is None:
            answer.found = bool(position < there.size and there[position])
