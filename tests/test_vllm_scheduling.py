"""The story: a vLLM connector that forgets a block while it is copied, or asks again for what was refused, ends in wrong
answers or in none. The two halves of the connector are held here to their promises without vLLM, over a real store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvstore import CacheIdentity, KVStore, PagedKVCache, StoreConfig
from kvstore.engines.vllm.jobs import Answer, Load, Save, Span, Step
from kvstore.engines.vllm.lookup import Lookup
from kvstore.engines.vllm.refusals import MAX_REFUSED, REFUSED_S, Refusals
from kvstore.engines.vllm.scheduler import Scheduler
from kvstore.engines.vllm.worker import Worker
from kvstore.errors import StorePathError

BLOCK = 4
BLOCKS = 64


@dataclass(eq=False)
class Block:
    """vLLM's block object, as far as the connector sees it."""

    block_id: int
    is_null: bool = False
    ref_cnt: int = 1


@dataclass(eq=False)
class Pool:
    num_gpu_blocks: int = BLOCKS

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "given back twice"


@dataclass(eq=False)
class Tables:
    blocks: tuple[list[Block], ...]


@dataclass(eq=False)
class Manager:
    tables: dict[str, Tables]
    block_pool: Pool = field(default_factory=Pool)

    def get_blocks(self, request_id: str) -> Tables:
        return self.tables[request_id]


@dataclass(frozen=True)
class Adapter:
    """vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(eq=False)
class Request:
    """A request of tokens whose hashes are chained."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    lora_request: Adapter | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(BLOCK, len(self.tokens) + 1, BLOCK)
        return [hashlib.sha256(repr(self.tokens[:end]).encode()).digest() for end in ends]


@dataclass(eq=False)
class Known:
    """A lookup that finds what the test says is stored."""

    stored: set[bytes] = field(default_factory=set)
    asked: int = 0

    def match(self, hashes: Mapping[int, Sequence[bytes]]) -> int:
        self.asked += 1
        found = [next((i for i, h in enumerate(own) if h not in self.stored), len(own)) for own in hashes.values()]
        return min(found) * BLOCK

    def close(self) -> None:
        pass


class Engine:
    """A scheduler's side with one request's blocks."""

    def __init__(self, tokens: int = 10, groups: int = 1, ranks: int = 1, pool: int = BLOCKS) -> None:
        self.known = Known()
        self.scheduler = Scheduler(cast(Lookup, self.known), dict.fromkeys(range(groups), BLOCK), BLOCK, ranks)
        self.manager = Manager({}, Pool(pool))
        self.scheduler.bind(self.manager)
        self.request = self.add("a", tokens)

    def add(self, name: str, tokens: int) -> Request:
        request = Request(name, list(range(tokens)))
        groups = len(self.scheduler._sizes)
        blocks = tuple([Block(100 * g + i) for i in range(-(-tokens // BLOCK))] for g in range(groups))
        self.manager.tables[name] = Tables(blocks)
        self.scheduler.new_request(request)
        return request

    def blocks(self, group: int = 0) -> list[Block]:
        return self.manager.tables["a"].blocks[group]

    def compute(self, tokens: int) -> Step:
        step = self.scheduler.step({"a": tokens} if tokens else {})
        self.request.num_computed_tokens += tokens
        return step

    def load(self, computed: int = 0) -> Load:
        tokens = self.scheduler.matched(self.request, computed)
        assert tokens is not None
        self.scheduler.allocated(self.request, self.manager.tables["a"].blocks, tokens)
        self.request.num_computed_tokens = computed + tokens
        [load] = self.scheduler.step({}).loads
        return load


def answer_of(save: Save, unsaved: set[tuple[int, int]] | None = None) -> Answer:
    answer = Answer()
    answer.save(save.number, unsaved or set())
    return answer


def test_full_blocks_alone_are_saved_and_each_once() -> None:
    engine = Engine(10)
    assert not engine.compute(3).saves
    [save] = engine.compute(4).saves
    [span] = save.spans
    assert (span.start, span.block_ids, span.block_hashes) == (0, [0], engine.request.block_hashes[:1])
    assert span.parent is None
    [later] = engine.compute(3).saves
    assert (later.spans[0].start, later.spans[0].parent) == (1, engine.request.block_hashes[0])
    assert not engine.compute(0).saves


def test_blocks_are_held_until_every_rank_answered_whatever_becomes_of_the_request() -> None:
    engine = Engine(8, ranks=2)
    [save] = engine.compute(8).saves
    engine.scheduler.finished("a")
    assert [block.ref_cnt for block in engine.blocks()] == [2, 2]
    engine.scheduler.answered(answer_of(save))
    assert engine.scheduler.pending
    assert [block.ref_cnt for block in engine.blocks()] == [2, 2]
    engine.scheduler.answered(answer_of(save))
    assert not engine.scheduler.pending
    assert [block.ref_cnt for block in engine.blocks()] == [1, 1]
    engine.scheduler.answered(answer_of(save))
    assert [block.ref_cnt for block in engine.blocks()] == [1, 1]


def test_saves_hold_a_share_of_the_cache_and_go_on_later() -> None:
    engine = Engine(80, pool=32)
    [first] = engine.compute(80).saves
    assert len(first.spans[0].block_ids) == 8
    assert not engine.compute(0).saves
    engine.scheduler.answered(answer_of(first))
    [second] = engine.scheduler.step({"a": 1}).saves
    assert (second.spans[0].start, len(second.spans[0].block_ids)) == (8, 8)


def test_what_was_found_is_loaded_and_not_saved_again() -> None:
    engine = Engine(10)
    engine.known.stored = set(engine.request.block_hashes)
    load = engine.load()
    [span] = load.spans
    assert (load.request_id, span.start, span.block_ids) == ("a", 0, [0, 1])
    assert not engine.compute(2).saves


def test_one_token_is_left_to_compute() -> None:
    engine = Engine(8)
    engine.known.stored = set(engine.request.block_hashes)
    assert engine.scheduler.matched(engine.request, 0) == 4
    assert engine.scheduler.matched(engine.request, 4) == 0


def test_a_load_begins_behind_what_is_computed() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    [span] = engine.load(computed=8).spans
    assert (span.start, span.block_ids, span.parent) == (2, [2, 3], engine.request.block_hashes[1])


def test_a_refused_block_is_a_miss_at_once_and_is_saved_again() -> None:
    engine = Engine(18)
    hashes = engine.request.block_hashes
    engine.known.stored = set(hashes)
    engine.load()
    refusal = Answer()
    refusal.refuse("a", {(0, 2): hashes[2]})
    engine.scheduler.answered(refusal)
    other = Request("b", list(range(18)))
    engine.scheduler.new_request(other)
    assert engine.scheduler.matched(other, 0) == 2 * BLOCK

    engine.request.num_computed_tokens = 8
    [save] = engine.compute(10).saves
    assert (save.spans[0].start, save.spans[0].block_hashes) == (2, hashes[2:4])
    engine.scheduler.answered(answer_of(save, {(0, 3)}))
    assert engine.scheduler.matched(other, 0) == 4 * BLOCK


def test_a_block_that_was_not_saved_stays_a_miss() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    engine.load()
    refusal = Answer()
    refusal.refuse("a", dict(zip([(0, 0), (0, 1)], engine.request.block_hashes, strict=False)))
    engine.scheduler.answered(refusal)
    engine.request.num_computed_tokens = 0
    [save] = engine.compute(18).saves
    engine.scheduler.answered(answer_of(save, {(0, 1)}))
    assert engine.scheduler.matched(Request("b", list(range(18))), 0) == BLOCK


def test_a_request_whose_load_failed_lets_others_pass_once_and_computes() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    engine.load()
    refusal = Answer()
    refusal.refuse("a", {(0, 0): engine.request.block_hashes[0]})
    engine.scheduler.answered(refusal)
    engine.scheduler._refused = Refusals()
    asked = engine.known.asked
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(3)] == [None, 0, 0]
    assert engine.known.asked == asked
    other = engine.add("b", 18)
    assert engine.scheduler.matched(other, 0) == 16


def test_blocks_that_slid_out_of_a_window_are_neither_loaded_nor_saved() -> None:
    engine = Engine(18, groups=2)
    for block in engine.blocks(1)[:2]:
        block.is_null = True
    [save] = engine.compute(18).saves
    assert [(span.group, span.start, span.block_ids) for span in save.spans] == [
        (0, 0, [0, 1, 2, 3]),
        (1, 2, [102, 103]),
    ]
    again = Engine(18, groups=2)
    for block in again.blocks(1)[:3]:
        block.is_null = True
    again.known.stored = set(again.request.block_hashes)
    assert [(span.group, span.start) for span in again.load().spans] == [(0, 0), (1, 3)]


def test_changed_weights_change_every_key() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    engine.scheduler.forget()
    assert engine.scheduler.matched(engine.request, 0) == 0
    assert not engine.compute(18).saves
    fresh = engine.add("a", 18)
    engine.scheduler.finished("a")
    engine.scheduler.new_request(fresh)
    assert engine.scheduler.matched(fresh, 0) == 0
    [save] = engine.scheduler.step({"a": 18}).saves
    assert not set(save.spans[0].block_hashes) & engine.known.stored
    assert len(set(save.spans[0].block_hashes)) == 4


def test_a_session_whose_tokens_change_has_other_keys() -> None:
    engine = Engine(18)
    [save] = engine.compute(12).saves
    engine.request.tokens[6:] = range(100, 112)
    engine.request.num_computed_tokens = 4
    [later] = engine.compute(14).saves
    assert later.spans[0].block_hashes == engine.request.block_hashes
    assert later.spans[0].block_hashes[0] == save.spans[0].block_hashes[0]
    assert not set(later.spans[0].block_hashes[1:]) & set(save.spans[0].block_hashes)
    del engine.request.tokens[8:]
    engine.request.num_computed_tokens = 0
    [shorter] = engine.compute(8).saves
    assert shorter.spans[0].block_hashes == engine.request.block_hashes


def test_a_refusal_counts_for_all_whatever_became_of_the_request() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    engine.load()
    engine.scheduler.finished("a")
    refusal = Answer()
    refusal.refuse("a", {(0, 1): engine.request.block_hashes[1]})
    engine.scheduler.answered(refusal)
    assert engine.scheduler.matched(Request("b", list(range(18))), 0) == BLOCK


def test_a_load_that_several_ranks_refuse_failed_once() -> None:
    engine = Engine(18, ranks=4)
    engine.known.stored = set(engine.request.block_hashes)
    engine.load()
    for position in range(4):
        refusal = Answer()
        refusal.refuse("a", {(0, position): engine.request.block_hashes[position]})
        engine.scheduler.answered(refusal)
    assert engine.scheduler.counts["loads_failed"] == 1


def test_refusals_are_bounded_in_time_and_number() -> None:
    now = [0.0]
    refusals = Refusals(lambda: now[0])
    refusals.add(0, b"first")
    now[0] = REFUSED_S
    refusals.add(0, b"second")
    assert refusals.before_first(0, [b"x", b"first"]) == 1
    assert refusals.before_first(1, [b"x", b"first"]) == 2
    now[0] += 1
    changes = refusals.changes
    assert refusals.before_first(0, [b"first", b"second"]) == 1
    assert refusals.changes > changes
    for number in range(MAX_REFUSED):
        refusals.add(0, b"%d" % number)
    assert len(refusals) == MAX_REFUSED
    assert refusals.before_first(0, [b"second"]) == 1


def test_a_request_that_finds_no_room_is_not_looked_up_in_every_step() -> None:
    engine = Engine(18)
    engine.known.stored = set(engine.request.block_hashes)
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(9)] == [16] * 9
    assert engine.known.asked == 1
    engine.scheduler._refused.add(0, engine.request.block_hashes[1])
    assert engine.scheduler.matched(engine.request, 0) == BLOCK
    assert engine.known.asked == 2


def test_what_another_connector_loads_in_a_step_is_not_stored() -> None:
    engine = Engine(18)
    engine.scheduler.leave_out(["a", "unknown"])
    assert not engine.compute(18).saves


def test_vllm_waits_for_blocks_that_nobody_else_has() -> None:
    engine = Engine(8)
    engine.compute(8)
    assert not engine.scheduler.frees_soon
    engine.manager.block_pool.free_blocks(engine.blocks())
    assert engine.scheduler.frees_soon


def test_vllm_does_not_step_for_ever_for_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(8)
    engine.compute(8)
    assert engine.scheduler.pending
    monkeypatch.setattr("kvstore.engines.vllm.scheduler.MOST_PATIENCE_S", -1.0)
    assert not engine.scheduler.pending
    assert [block.ref_cnt for block in engine.blocks()] == [2, 2]


def test_requests_are_noted_in_the_order_in_which_they_came() -> None:
    engine = Engine(8)
    engine.add("b", 4)
    engine.add("c", 3)
    touches = engine.scheduler.step({}).touches
    assert [(group, len(hashes)) for group, hashes in touches] == [(0, 2), (0, 1)]
    assert not engine.scheduler.step({}).touches


def test_a_producer_does_not_load_and_a_consumer_does_not_save() -> None:
    producer, consumer = Engine(8), Engine(8)
    producer.scheduler._loads, consumer.scheduler._saves = False, False
    producer.known.stored = set(producer.request.block_hashes)
    assert producer.scheduler.matched(producer.request, 0) == 0
    assert producer.compute(8).saves
    assert not consumer.compute(8).saves


def test_answers_of_ranks_add_up() -> None:
    first, second = Answer(), Answer()
    first.refuse("a", {(0, 1): b"1"})
    first.save(1, {(0, 2)})
    second.refuse("a", {(0, 3): b"3"})
    second.save(1, set())
    second.save(2, set())
    first.add(second)
    assert first.refused == {"a": {(0, 1): b"1", (0, 3): b"3"}}
    assert (first.saved, first.unsaved) == ({1: 2, 2: 1}, {1: {(0, 2)}, 2: set()})
    assert not Answer()


# A rank's half, over a real store.


def cache_of(seed: int) -> tuple[torch.Tensor, PagedKVCache]:
    chance = torch.Generator().manual_seed(seed)
    tensor = torch.randn((BLOCKS, 2, BLOCK, 16), generator=chance).to(torch.bfloat16)
    return tensor, PagedKVCache.from_tensors({"model.layers.0.self_attn.attn": tensor}, "BHNC")


def worker_over(folder: Path, seed: int = 1, io: str = "inline", groups: int = 1) -> tuple[torch.Tensor, Worker]:
    tensor, cache = cache_of(seed)
    config = StoreConfig(capacity_bytes=16 * 2**20, durability="process")
    return tensor, Worker(KVStore(folder, cache, CacheIdentity(model="m"), config, io=io), groups)


def ended(worker: Worker) -> tuple[set[str], set[str], Answer]:
    """Wait for all that runs."""
    requests, failed, answer = set[str](), set[str](), Answer()
    worker._idle = True
    while worker._loads or worker._saves or worker._queued:
        new, bad = worker.finished()
        requests, failed = requests | new, failed | bad
    if (told := worker.take_answer()) is not None:
        answer = told
    return requests, failed, answer


HASHES = Request("a", list(range(12))).block_hashes


@pytest.mark.parametrize("io", ["inline", "process"])
def test_a_rank_saves_and_loads_what_it_saved(tmp_path: Path, io: str) -> None:
    tensor, worker = worker_over(tmp_path, io=io)
    worker.save(Step(saves=(Save(7, (Span(0, HASHES, [1, 2, 3], 0),)),)))
    assert ended(worker)[2].saved == {7: 1}
    before = tensor[1:4].clone()
    worker.begin(Step(loads=(Load("a", (Span(0, HASHES, [11, 12, 13], 0),)),), touches=((0, HASHES),)))
    requests, failed, answer = ended(worker)
    assert (requests, failed, answer.refused, worker.take_bad_ids()) == ({"a"}, set(), {}, set())
    assert torch.equal(tensor[11:14].view(torch.int16), before.view(torch.int16))
    worker.shutdown()


def test_what_is_not_verified_is_told_by_block_or_by_request(tmp_path: Path) -> None:
    _, worker = worker_over(tmp_path)
    worker.save(Step(saves=(Save(1, (Span(0, HASHES[:1], [1], 0),)),)))
    ended(worker)
    load = Load("a", (Span(0, HASHES, [11, 12, 13], 0),))
    worker.begin(Step(loads=(load,)))
    requests, failed, answer = ended(worker)
    assert (requests, failed) == ({"a"}, set())
    assert worker.take_bad_ids() == {12, 13}
    assert worker.take_bad_ids() == set()
    assert answer.refused == {"a": {(0, 1): HASHES[1], (0, 2): HASHES[2]}}
    worker._groups = 2
    worker.begin(Step(loads=(load,)))
    assert ended(worker)[:2] == ({"a"}, {"a"})
    assert worker.take_bad_ids() == set()
    assert worker.take_counts()["blocks_missing"] == 4
    worker.shutdown()


def test_what_cannot_begin_is_a_load_that_failed_and_a_save_that_ended(tmp_path: Path) -> None:
    _, worker = worker_over(tmp_path)
    span = Span(0, HASHES, [1, 2, BLOCKS + 5], 0)
    worker.begin(Step(loads=(Load("a", (span,)),)))
    worker.save(Step(saves=(Save(1, (span,)),)))
    requests, _, answer = ended(worker)
    assert requests == {"a"}
    assert answer.refused == {"a": {(0, i): HASHES[i] for i in range(3)}}
    assert answer.unsaved == {1: {(0, 0), (0, 1), (0, 2)}}
    worker.shutdown()


def test_saves_leave_a_thread_to_loads_and_all_end_at_shutdown(tmp_path: Path) -> None:
    _, worker = worker_over(tmp_path)
    saves = tuple(Save(n, (Span(0, HASHES[n : n + 1], [n + 1], n),)) for n in range(3))
    worker.save(Step(saves=saves))
    assert (len(worker._saves), len(worker._queued)) == (1, 2)
    worker.begin(Step(loads=(Load("a", (Span(0, HASHES[:1], [9], 0),)),)))
    assert worker._loads["a"].futures[0] is not None
    worker.shutdown()
    _, again = worker_over(tmp_path)
    assert again.store.match_prefix(HASHES) == 3
    again.shutdown()


def test_a_rank_that_hears_of_no_step_end_saves_with_the_next_step(tmp_path: Path) -> None:
    _, worker = worker_over(tmp_path)
    worker.begin(Step(saves=(Save(1, (Span(0, HASHES[:1], [1], 0),)),)))
    assert not worker._saves
    worker.begin(Step())
    assert ended(worker)[2].saved == {1: 1}
    worker.save(Step(saves=(Save(2, (Span(0, HASHES[1:2], [2], 1),)),)))
    worker.begin(Step())
    assert ended(worker)[2].saved == {2: 1}
    worker.shutdown()


def test_a_closed_store_is_a_miss(tmp_path: Path) -> None:
    _, worker = worker_over(tmp_path)
    worker.store.close()
    worker.begin(Step(loads=(Load("a", (Span(0, HASHES, [1, 2, 3], 0),)),)))
    assert ended(worker)[2].refused == {"a": {(0, i): HASHES[i] for i in range(3)}}
    worker.shutdown()


def test_a_lookup_begins_once_the_store_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engines.vllm.lookup.RETRY_S", 0.01)
    tries: list[Any] = []
    _, cache = cache_of(2)
    store = KVStore(tmp_path, cache, CacheIdentity(model="m"), StoreConfig(capacity_bytes=16 * 2**20))
    store.put_blocks(HASHES, [1, 2, 3])

    def opened(identity: CacheIdentity | None) -> KVStore:
        tries.append(identity)
        if len(tries) < 3:
            raise StorePathError("not yet")
        return store

    lookup = Lookup(opened, {0: BLOCK})
    lookup.begin(store.identity)
    assert lookup.match({0: HASHES}) == 0
    lookup._opening.join(10)
    assert lookup.match({0: HASHES}) == 12
    assert lookup.match({0: []}) == 0
    assert tries == [store.identity] * 3
    other = Lookup(opened, {0: BLOCK})
    assert other.match({0: HASHES}) == 12
    assert tries[3:] == [None]
    store.close()
    assert lookup.match({0: HASHES}) == 0
    lookup.close()
