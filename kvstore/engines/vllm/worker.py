"""A rank's side of the connector: loads into and saves from the paged cache, in threads of the store."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvstore.engines.vllm.jobs import Answer, Load, Place, Save, Span, Step
from kvstore.errors import KVStoreError
from kvstore.results import GetResult, PutResult
from kvstore.store import KVStore

log = logging.getLogger(__name__)
IDLE_WAIT_S: Final = 0.002
"""How long a step without a forward waits for a load or save to end: vLLM would spin."""
MAX_TOUCHES: Final = 256
"""Requests' touches that wait for an I/O process; those that come after are left out."""
R = TypeVar("R", GetResult, PutResult)


@dataclass(frozen=True, eq=False)
class Running:
    """A load or save in the store's threads: a future for each span, None where it could not begin."""

    spans: tuple[Span, ...]
    futures: tuple[Future[Any] | None, ...]

    @property
    def done(self) -> bool:
        return all(future is None or future.done() for future in self.futures)


class Worker:
    """One rank's loads and saves over its open store. All calls come from vLLM's thread of the rank; none waits for a disk.

    Owns the store: `shutdown` waits for what runs and closes it. Whatever fails comes to blocks that were not loaded, or not
    saved.
    """

    def __init__(self, store: KVStore, groups: int, threads: int = 2) -> None:
        """groups: KV cache groups; threads: the store's, one of which saves leave to loads."""
        self.store = store
        self._most_saves = max(1, threads - 1)
        self.counts: Counter[str] = Counter()
        """Since the last report."""
        self.totals: Counter[str] = Counter()
        self._groups = groups
        self._loads: dict[str, Running] = {}
        self._saves: dict[int, Running] = {}
        self._queued: deque[Save] = deque()
        self._touching = ThreadPoolExecutor(1, "kvstore-touch")
        self._touches: list[Future[None]] = []
        self._idle = False
        self._due = Step()
        self._answer = Answer()
        self._bad_ids: set[int] = set()

    def begin(self, step: Step) -> None:
        """Begin a step's touches and loads. The blocks' former owners must have done with them on the current stream."""
        self._begin_due()
        self._due, self._idle = step, step.idle
        for group, hashes in step.touches:
            self._touch(group, hashes)
        for load in step.loads:
            self._loads[load.request_id] = Running(load.spans, self._futures(load, self._get))
            self.counts["loads"] += 1

    def save(self, step: Step) -> None:
        """Begin a step's saves, of what the current stream has been given to compute, or queue them."""
        self._due = step
        self._begin_due()

    def _begin_due(self) -> None:
        """The saves of the last step that began, unless they were begun: there are ranks that vLLM does not tell of a step's
        end. The blocks are held, so that they are as they were."""
        step, self._due = self._due, Step()
        self._queued += step.saves
        self.counts["saves"] += len(step.saves)
        self._begin_saves()

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those of them that must not use all of what they asked for,
        where that is said by request: with several groups block ids do not tell blocks apart."""
        if self._idle:
            self._wait()
        ended = {request_id for request_id, running in self._loads.items() if running.done}
        failed = {request_id for request_id in ended if self._end_load(request_id, self._loads.pop(request_id))}
        for number in [number for number, running in self._saves.items() if running.done]:
            self._end_save(number, self._saves.pop(number))
        self._begin_saves()
        return ended, failed if self._groups > 1 else set()

    def take_bad_ids(self) -> set[int]:
        """Ids of blocks that must not be used, of a cache with one group; each once."""
        bad, self._bad_ids = self._bad_ids, set()
        return bad

    def take_answer(self) -> Answer | None:
        """What became of loads and saves since the last call, None for nothing."""
        answer, self._answer = self._answer, Answer()
        return answer or None

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        self.totals += counts
        return dict(counts)

    def shutdown(self) -> None:
        """Finish what runs and close the store; queued saves too, since their blocks still are as they were."""
        self._begin_due()
        while self._queued:
            self._idle = True
            self.finished()
        self._touching.shutdown(wait=False, cancel_futures=True)
        try:
            self.store.close()
        except KVStoreError as error:
            log.error("the store was not closed in order: %s", error)

    def _begin_saves(self) -> None:
        """As many as leave a thread to loads, which requests wait for. Blocks of queued saves are held, too."""
        while self._queued and len(self._saves) < self._most_saves:
            save = self._queued.popleft()
            self._saves[save.number] = Running(save.spans, self._futures(save, self._put))

    def _touch(self, group: int, hashes: list[bytes]) -> None:
        self._touches = [touch for touch in self._touches if not touch.done()]
        if len(self._touches) >= MAX_TOUCHES:
            self.counts["touches_left_out"] += 1
            return
        self._touches.append(self._touching.submit(self._touch_now, group, hashes))

    def _touch_now(self, group: int, hashes: list[bytes]) -> None:
        try:
            self.store.touch(hashes, group)
        except KVStoreError as error:
            log.error("a request was not noted for eviction: %s", error)

    def _futures(self, job: Load | Save, submit: Callable[[Span], Future[Any]]) -> tuple[Future[Any] | None, ...]:
        return tuple(self._submitted(span, submit) for span in job.spans)

    def _submitted(self, span: Span, submit: Callable[[Span], Future[R]]) -> Future[R] | None:
        try:
            return submit(span)
        except KVStoreError as error:
            log.error("blocks %s of group %d: %s", span.block_ids, span.group, error)
            return None

    def _get(self, span: Span) -> Future[GetResult]:
        return self.store.submit_get_blocks(span.block_hashes, span.block_ids, span.start, group=span.group)

    def _put(self, span: Span) -> Future[PutResult]:
        return self.store.submit_put_blocks(
            span.block_hashes, span.block_ids, span.start, group=span.group, parent=span.parent
        )

    def _wait(self) -> None:
        running = [*self._loads.values(), *self._saves.values()]
        waiting = [future for each in running for future in each.futures if future is not None and not future.done()]
        if waiting and not any(each.done for each in running):
            wait(waiting, IDLE_WAIT_S, FIRST_COMPLETED)

    def _end_load(self, request_id: str, running: Running) -> bool:
        """Note what a load came to. Whether some of its blocks must not be used."""
        bad: dict[Place, bytes] = {}
        for span, result in _results(running):
            usable = [] if result is None else result.verified.tolist()
            lost = _left_out(usable, len(span.block_ids))
            bad.update({(span.group, span.start + i): span.block_hashes[i] for i in lost})
            self._bad_ids.update(span.block_ids[i] for i in lost if self._groups == 1)
            self._count_load(span, result, len(lost))
        if bad:
            self._answer.refuse(request_id, bad)
        return bool(bad)

    def _count_load(self, span: Span, result: GetResult | None, lost: int) -> None:
        self.counts["blocks_loaded"] += len(span.block_ids) - lost
        if result is None:
            self.counts["blocks_load_failed"] += lost
            return
        self.counts["blocks_missing"] += int(result.missing.sum())
        for index, rejection in result.rejected.items():
            self.counts[f"blocks_rejected_{rejection.kind}"] += 1
            log.warning("block %d of a request was refused (%s)", span.start + index, rejection.kind)

    def _end_save(self, number: int, running: Running) -> None:
        unsaved: set[Place] = set()
        for span, result in _results(running):
            kept = [] if result is None else (result.stored | result.present).tolist()
            replica = set() if result is None else {i for i, reason in result.failed.items() if reason == "replica"}
            lost = [i for i in _left_out(kept, len(span.block_ids)) if i not in replica]
            unsaved.update((span.group, span.start + i) for i in lost)
            for i in lost:
                self.counts[f"blocks_save_failed_{'error' if result is None else result.failed.get(i, 'error')}"] += 1
            self.counts["blocks_saved"] += 0 if result is None else int(result.stored.sum())
            self.counts["blocks_save_failed"] += len(lost)
        self._answer.save(number, unsaved)


def _results(running: Running) -> Iterable[tuple[Span, Any]]:
    """Each span with its result, None where it has none."""
    for span, future in zip(running.spans, running.futures, strict=True):
        error = None if future is None else future.exception()
        if error is not None:
            log.error("blocks %s of group %d: %s: %s", span.block_ids, span.group, type(error).__name__, error)
        yield span, None if future is None or error is not None else future.result()


def _left_out(usable: Sequence[bool], blocks: int) -> list[int]:
    """Indices of the blocks that are not usable; none is where nothing is known."""
    return [i for i in range(blocks) if not (usable and usable[i])]
