"""The scheduler's side of the connector: what a request can load, what it saves, and which blocks are held meanwhile."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.engines.vllm.adapters import Adapters, Look
from kvstore.engines.vllm.jobs import Answer, Load, Place, Save, Span, Step
from kvstore.engines.vllm.lookup import Lookup
from kvstore.engines.vllm.refusals import Refusals

log = logging.getLogger(__name__)
MAX_HELD_SHARE: Final = 4
"""At most this share of the cache's blocks is held for saves."""
PATIENCE_S: Final = 1.0
"""How long a request that finds no room waits for saves to end, before another one is preempted."""
MOST_PATIENCE_S: Final = 60.0
"""After so long without an answer vLLM need not go on stepping for a save; its blocks are held on."""
FRESH_S: Final = 0.05
"""How long a lookup's answer holds for a request that asks again: where there is no room for it vLLM tries in every step."""


@dataclass(eq=False)
class Tracked:
    """A request. done: per group, how many of its leading blocks are in the store, or were offered; start: the token from
    which the next load begins; hashes: the keys of its full blocks, by group; stale: whether its KV may not be stored;
    failed: whether a load of it failed; stepped_back: whether it has let others pass since; next_save: nothing is to be
    saved before so many tokens are computed; found: the last lookup's answer, with what was asked and when; look: at the
    files of its LoRA adapter, while they are not known; looked_at: its `_turn` then; salt: what the
    adapter adds to its keys; touched: whether eviction was told of it."""

    request: Any
    done: dict[int, int]
    start: int = 0
    failed: bool = False
    stepped_back: bool = False
    next_save: int = 0
    found: tuple[tuple[object, ...], float, int] | None = None
    hashes: dict[int, list[bytes]] = field(default_factory=dict)
    stale: bool = False
    look: Look | None = None
    looked_at: tuple[int, int] = (0, 0)
    salt: bytes = b""
    touched: bool = False


@dataclass(eq=False)
class Held:
    """A save whose blocks must not be given to others: vLLM's block objects, since when, how many ranks have not answered,
    and what some rank did not store."""

    save: Save
    blocks: list[Any]
    since: float
    ranks_left: int
    unsaved: set[Place] = field(default_factory=set)


class Scheduler:
    """Plans loads and saves of one engine. All calls come from vLLM's scheduler thread; none waits for a disk.

    block_sizes: {group: tokens}; hash_block_size: tokens a hash of the request; ranks: workers that answer each save.
    loads, saves: whether it does either. adapters: what tells LoRA adapters' weights apart.

    What is loaded is loaded before the request runs, so that nothing is ever computed from a block that was refused; and a
    block is held by a reference of its own until every rank has copied it, whatever becomes of its request.
    """

    def __init__(
        self,
        lookup: Lookup | None,
        block_sizes: Mapping[int, int],
        hash_block_size: int,
        ranks: int,
        loads: bool = True,
        saves: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        self.lookup = lookup
        self.adapters = Adapters(None) if adapters is None else adapters
        self._sizes, self._hash_size, self._ranks = dict(block_sizes), hash_block_size, ranks
        self._loads, self._saves = loads, saves
        self._tracked: dict[str, Tracked] = {}
        self._held: dict[int, Held] = {}
        self._refused = Refusals()
        self._touches: list[tuple[int, list[bytes]]] = []
        self._begun: list[Load] = []
        self._number = 0
        self._salt = b""
        self._manager: Any = None
        self.counts: Counter[str] = Counter()

    def bind(self, manager: Any) -> None:
        """Take vLLM's KVCacheManager, which has the requests' blocks."""
        self._manager = manager

    def new_request(self, request: Any) -> None:
        """A request came: its blocks are asked for, here or not."""
        self._named(self._track(request))

    def matched(self, request: Any, computed: int) -> int | None:
        """How many tokens past the computed ones can be loaded; at least one is left to compute. None: ask again.

        A request whose load failed computes all that is left. vLLM has it at the head of the queue of those that hold blocks,
        and reserves room for it: another load would wait for its own reservation, and all others behind it, for ever. None,
        once, takes it out of that queue.
        """
        tracked = self._track(request)
        tracked.start = computed
        if (tracked.failed and not tracked.stepped_back) or not self._named(tracked):
            tracked.stepped_back = tracked.failed
            return None
        if not self._loads or self.lookup is None or tracked.failed or self._left_out(tracked):
            return 0
        found = self._found(tracked)
        for group, size in self._sizes.items():
            tracked.done[group] = max(tracked.done[group], found // size)
        return max(0, found - computed)

    def _found(self, tracked: Tracked) -> int:
        """How many leading tokens of a request the store has, by a lookup that is not older than FRESH_S."""
        assert self.lookup is not None
        request, now = tracked.request, time.monotonic()
        asked = (request.num_tokens, len(request.block_hashes), self._refused.changes, self._salt)
        if tracked.found is None or tracked.found[0] != asked or now - tracked.found[1] > FRESH_S:
            self.counts["lookups"] += 1
            tracked.found = (asked, now, self.lookup.match(self._usable(tracked, request.num_tokens - 1)))
            self.counts["tokens_found"] += tracked.found[2]
        return tracked.found[2]

    def allocated(self, request: Any, blocks: Sequence[Sequence[Any]], tokens: int) -> None:
        """The request has blocks now; load so many tokens into those past the computed ones. blocks: by group."""
        if not tokens:
            return
        tracked = self._track(request)
        end = tracked.start + tokens
        spans = [self._load_span(tracked, group, blocks[group], end) for group in self._sizes]
        load = Load(request.request_id, tuple(span for span in spans if span is not None))
        tracked.found = None
        self._begun.append(load)
        self.counts["loads"] += 1

    def step(self, scheduled: Mapping[str, int]) -> Step:
        """What the ranks shall do beside the step that was planned. scheduled: {request: tokens that it computes}."""
        saves = self._plan_saves(scheduled) if self._saves else ()
        made = Step(tuple(self._begun), tuple(saves), tuple(self._touches), idle=not any(scheduled.values()))
        self._begun, self._touches = [], []
        return made

    def answered(self, answer: Answer) -> None:
        """Take what the ranks did."""
        for request_id, blocks in answer.refused.items():
            self._load_failed(request_id, blocks)
        for number, ranks in answer.saved.items():
            held = self._held.get(number)
            if held is not None:
                self._save_ended(number, held, ranks, answer.unsaved.get(number, set()))

    def finished(self, request_id: str) -> None:
        """A request ended, or was aborted. What it saves goes on."""
        self._tracked.pop(request_id, None)

    @property
    def pending(self) -> bool:
        """Whether saves are in flight that end soon."""
        newest = next(reversed(self._held.values()), None)
        return newest is not None and time.monotonic() - newest.since < MOST_PATIENCE_S

    @property
    def frees_soon(self) -> bool:
        """Whether blocks are about to come free that nobody but the oldest save has."""
        oldest = next(iter(self._held.values()), None)
        if oldest is None or time.monotonic() - oldest.since > PATIENCE_S:
            return False
        return any(block.ref_cnt == 1 for block in oldest.blocks)

    def leave_out(self, request_ids: Iterable[str]) -> None:
        """Store nothing of these requests: another connector loads into their blocks while they run, and may fail."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.stale = True

    def forget(self) -> None:
        """Nothing that was stored so far is to be used any more, here or later: weights were changed in place. All keys are
        others from now on, which no other engine knows."""
        self._salt = os.urandom(16)
        for tracked in self._tracked.values():
            tracked.stale = True

    def close(self) -> None:
        """Close the reader."""
        self.adapters.close()
        if self.lookup is not None:
            self.lookup.close()

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = Tracked(request, dict.fromkeys(self._sizes, 0))
            self._look(tracked)
        return tracked

    def _look(self, tracked: Tracked) -> None:
        tracked.looked_at = _turn(tracked.request)
        tracked.look = self.adapters.look(tracked.request.lora_request)

    def _named(self, tracked: Tracked) -> bool:
        """Whether the request's keys are known; from then on eviction knows that it came. Where it was preempted, or its
        session went on, vLLM may read its adapter again."""
        if tracked.request.lora_request is not None and tracked.looked_at != _turn(tracked.request):
            self._look(tracked)
        if tracked.look is not None and not self._settle(tracked, tracked.look):
            return False
        if self._loads and not tracked.touched and not self._left_out(tracked):
            self._touches += [(group, list(hashes)) for group, hashes in self._hashes(tracked).items() if hashes]
            tracked.touched = True
        return True

    def _settle(self, tracked: Tracked, look: Look) -> bool:
        """Take what was seen of the request's adapter; false while nothing was."""
        if self.adapters.waits(look):
            return False
        salt, tracked.look = self.adapters.salt(look), None
        tracked.stale = tracked.stale or salt is None
        if salt is not None and salt != tracked.salt:
            tracked.salt, tracked.hashes, tracked.next_save = salt, {}, 0
            tracked.done = dict.fromkeys(self._sizes, 0)
        return True

    def _left_out(self, tracked: Tracked) -> bool:
        """Whether nothing of the request may be loaded or stored."""
        return tracked.stale or self.adapters.doubts(tracked.request.lora_request)

    def _hashes(self, tracked: Tracked) -> dict[int, list[bytes]]:
        """The keys of the request's full blocks so far, by group: vLLM's hash at each block's end. Hashes are chained, so
        that the last one says whether all are still the request's, whose tokens change where a session goes on."""
        every = tracked.request.block_hashes
        for group, size in self._sizes.items():
            known, times = tracked.hashes.setdefault(group, []), size // self._hash_size
            last = every[len(known) * times - 1 : len(known) * times]
            if known and (not last or self._key(tracked, last[0]) != known[-1]):
                known.clear()
                tracked.done[group] = tracked.next_save = 0
            new = every[(len(known) + 1) * times - 1 :: times]
            known += [self._key(tracked, each) for each in new] if self._salt or tracked.salt else new
        return tracked.hashes

    def _key(self, tracked: Tracked, block_hash: bytes) -> bytes:
        salt = self._salt + tracked.salt
        return hashlib.blake2b(block_hash, digest_size=32, key=salt).digest() if salt else block_hash

    def _usable(self, tracked: Tracked, tokens: int) -> dict[int, Sequence[bytes]]:
        """The keys up to a token, and to the first that is known to be of no use."""
        usable = dict[int, Sequence[bytes]]()
        for group, hashes in self._hashes(tracked).items():
            leading = hashes[: tokens // self._sizes[group]]
            usable[group] = leading[: self._refused.before_first(group, leading)]
        return usable

    def _load_span(self, tracked: Tracked, group: int, blocks: Sequence[Any], end: int) -> Span | None:
        """A group's blocks to load; None where vLLM needs none of it. Leading null blocks are those that slid out."""
        size = self._sizes[group]
        last = end // size
        first = _past_nulls(blocks, tracked.start // size, last)
        return self._span(tracked, group, blocks, first, last) if first < last else None

    def _span(self, tracked: Tracked, group: int, blocks: Sequence[Any], first: int, last: int) -> Span:
        hashes = self._hashes(tracked)[group]
        parent = hashes[first - 1] if first else None
        return Span(group, hashes[first:last], [block.block_id for block in blocks[first:last]], first, parent)

    def _plan_saves(self, scheduled: Mapping[str, int]) -> Iterator[Save]:
        room = self._manager.block_pool.num_gpu_blocks // MAX_HELD_SHARE - sum(
            len(held.blocks) for held in self._held.values()
        )
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            computed = 0 if tracked is None else tracked.request.num_computed_tokens + tokens
            if tracked is None or computed < tracked.next_save or not self._named(tracked) or self._left_out(tracked):
                continue
            spans, blocks = self._unsaved(tracked, computed, room)
            if blocks:
                room -= len(blocks)
                yield self._hold(tracked, spans, blocks)

    def _unsaved(self, tracked: Tracked, computed: int, room: int) -> tuple[list[Span], list[Any]]:
        """What a request has computed once this step ran, and was not offered yet, at most so many blocks; and vLLM's objects
        for them."""
        ends = {group: min(computed // size, len(self._hashes(tracked)[group])) for group, size in self._sizes.items()}
        if all(tracked.done[group] >= end for group, end in ends.items()):
            tracked.next_save = min((tracked.done[group] + 1) * size for group, size in self._sizes.items())
            return [], []
        tables = self._manager.get_blocks(tracked.request.request_id).blocks
        spans, held = list[Span](), list[Any]()
        for group, end in ends.items():
            first = _past_nulls(tables[group], tracked.done[group], end)
            tracked.done[group] = max(first, tracked.done[group])
            end = min(end, first + room - len(held))
            last = next((i for i in range(first, end) if tables[group][i].is_null), end)
            if first < last:
                spans.append(self._span(tracked, group, tables[group], first, last))
                held += tables[group][first:last]
        return spans, held

    def _hold(self, tracked: Tracked, spans: Sequence[Span], blocks: list[Any]) -> Save:
        for span in spans:
            tracked.done[span.group] = span.start + len(span.block_ids)
        self._number += 1
        save = Save(self._number, tuple(spans))
        self._manager.block_pool.touch(blocks)
        self._held[save.number] = Held(save, blocks, time.monotonic(), self._ranks)
        self.counts["saves"] += 1
        return save

    def _load_failed(self, request_id: str, blocks: Mapping[Place, bytes]) -> None:
        """Blocks of a load must not be used: they are misses from here on, whether or not the request lives, and are saved
        again once they were computed."""
        for (group, _), key in blocks.items():
            self._refused.add(group, key)
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self.counts["loads_failed"] += not tracked.failed
        tracked.failed, tracked.next_save = True, 0
        for group, position in blocks:
            tracked.done[group] = min(tracked.done[group], position)

    def _save_ended(self, number: int, held: Held, ranks: int, unsaved: set[Place]) -> None:
        held.unsaved.update(unsaved)
        held.ranks_left -= ranks
        if held.ranks_left > 0:
            return
        del self._held[number]
        self._manager.block_pool.free_blocks(reversed(held.blocks))
        for span in held.save.spans:
            for i, key in enumerate(span.block_hashes):
                if (span.group, span.start + i) not in held.unsaved:
                    self._refused.discard(span.group, key)


def _turn(request: Any) -> tuple[int, int]:
    """What changes where a request leaves the batch and comes again."""
    return request.num_preemptions, request.num_prompt_tokens


def _past_nulls(blocks: Sequence[Any], first: int, end: int) -> int:
    """The first place from `first` on with a block, `end` where there is none before it."""
    return next((i for i in range(first, end) if not blocks[i].is_null), max(first, end))
