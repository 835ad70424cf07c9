"""KVStoreTier: rows of vLLM's host memory in a store, alone and below vLLM's own OffloadingConnector."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.engines.vllm import KVStoreTier
from kvstore.engines.vllm.tier_lookup import PATIENCE_S as LOOKUP_PATIENCE_S
from kvstore.engines.vllm.tier_rows import cut, store_hash
from kvstore.errors import ConfigError
from kvstore.geometry import CHUNK_BYTES
from kvstore.record import chunk_key, parse_header
from tests.support import Raw, flip, index_key

ROWS, ROW = 16, 4096
TOKENS = 32
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
SOON_S = 30.0


def keys_of(count: int, name: str = "r", group: int = 0) -> list[bytes]:
    """vLLM's keys of the first chunks of a request."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() + group.to_bytes(4, "big") for i in range(count)]


def offloading_config(**parallel: int) -> OffloadingConfig:
    """vLLM's configuration of two groups, the second of which has half as many tokens a block."""
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    placed = {"rank": 0, "data_parallel_index": 0, "data_parallel_rank_local": None, "is_parallelism_agnostic": False}
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layers.0",), 0), OffloadingGroupConfig(TOKENS // 2, ("layers.1",), 1)),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig("some/model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS // 2, 1),
        parallel=OffloadingParallelConfig(**{**sizes, **placed, **parallel}),
    )


class Bench:
    """A tier over host memory of random bytes, and what vLLM's manager does with it."""

    def __init__(self, path: Path, seed: int = 0, row: int = ROW, config: Any = None, **options: Any) -> None:
        self.region = mmap.mmap(-1, ROWS * row)
        self.memory = np.frombuffer(self.region, np.uint8).reshape(ROWS, row)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, (ROWS, row), np.uint8)
        self.view = memoryview(self.memory)
        chosen = {"path": str(path), "capacity": "64M", "weights": "w", "max_rejections_per_minute": None, **options}
        spec = SimpleNamespace(config=config or offloading_config(), blocks_per_chunk=1, replicated_layout=False)
        named = {"type": "KVStoreTier", "module_path": "kvstore.engines.vllm", **chosen}
        self.tier: Any = SecondaryTierFactory.create_secondary_tier(named, self.view, spec)
        self.jobs = 0

    def context(self, keys: Sequence[bytes], request: str = "r", first: int = 0) -> ReqContext:
        """A request that has these keys, the first at a position."""
        context = ReqContext(req_id=request)
        for position, key in enumerate(keys, first):
            tokens = TOKENS // 2 if key[-1] else TOKENS
            context.set_offload_key_position(key, (position + 1) * tokens)
        return context

    def submit(self, keys: Sequence[bytes], rows: Sequence[int], load: bool, context: ReqContext) -> None:
        """Submit a job."""
        self.jobs += 1
        job = TransferJob(self.jobs, list(keys), np.array(rows, np.int32), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def finished(self) -> Any:
        """The result of the one job in flight."""
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def store(self, keys: Sequence[bytes], rows: Sequence[int], first: int = 0) -> Any:
        """Store rows under keys."""
        self.submit(keys, rows, False, self.context(keys, first=first))
        return self.finished()

    def load(self, keys: Sequence[bytes], rows: Sequence[int], first: int = 0) -> Any:
        """Load keys into rows."""
        self.submit(keys, rows, True, self.context(keys, first=first))
        return self.finished()

    def look(self, keys: Sequence[bytes], request: str = "r", first: int = 0) -> list[Any]:
        """What a request is told of keys once no answer is RETRY, step by step as vLLM's scheduler asks."""
        context, deadline = self.context(keys, request, first), time.monotonic() + SOON_S
        while RETRY in (told := [self.tier.lookup(key, context) for key in keys]):
            self.tier.on_schedule_end(None)
            assert time.monotonic() < deadline, "lookups are not answered"
            time.sleep(0.001)
        self.tier.on_request_finished(context)
        return told

    def damage(self, key: bytes, bit: int = 12345, chunk: int = 1) -> None:
        """Flip a bit of a key's record."""
        raw, store = Raw(self.tier._store), self.tier._store
        name = index_key(store, store_hash(key))
        header = parse_header(raw.entry(name) or b"", name)
        place = chunk_key(header.sequence, chunk)  # type: ignore[union-attr]
        raw.put_chunk(place, flip(raw.chunk(place), bit))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store")
    yield made
    made.tier.shutdown()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("row", [ROW, 3 * CHUNK_BYTES + 4096 * 7])
def test_rows_come_back_as_they_were_and_no_others_change(tmp_path: Path, row: int) -> None:
    bench, keys = Bench(tmp_path, row=row), keys_of(4)
    assert bench.look(keys) == [MISS] * 4
    assert bench.store(keys, [3, 1, 4, 15]).success
    assert bench.look(keys) == [HIT] * 4
    expected = bench.memory.copy()
    bench.memory[[9, 2, 6, 5]] = 0
    result = bench.load(keys, [9, 2, 6, 5])
    expected[[9, 2, 6, 5]] = expected[[3, 1, 4, 15]]
    assert result.success
    assert result.successful_keys is None
    assert result.transfer_bytes == 4 * row
    assert np.array_equal(bench.memory, expected)
    assert bench.tier.counts() == {"promoted": 4, "not_promoted": 0, "rejected": 0, "stored": 4, "not_stored": 0}
    bench.tier.shutdown()


def test_a_request_may_take_any_part_of_what_another_stored(bench: Bench) -> None:
    keys = keys_of(8)
    bench.store(keys[:5], [0, 1, 2, 3, 4])
    bench.store(keys[5:], [5, 6, 7], first=5)
    assert bench.look(keys[2:7], "other", first=2) == [HIT] * 5
    assert bench.load(keys[4:7], [10, 11, 12], first=4).success
    assert np.array_equal(bench.memory[10:13], bench.memory[4:7])
    assert bench.load([keys[7], keys[0]], [13, 14], first=7).successful_keys == [keys[7]], (
        "keys[0] is not at position 8"
    )


def test_groups_have_rows_of_their_own_under_one_hash(bench: Bench) -> None:
    keys = keys_of(2) + keys_of(2, group=1)
    context = bench.context(keys[:2])
    context._offload_key_positions |= bench.context(keys[2:])._offload_key_positions
    bench.submit(keys, [0, 1, 2, 3], False, context)
    assert bench.finished().success
    bench.submit(keys, [8, 9, 10, 11], True, context)
    assert bench.finished().success
    assert np.array_equal(bench.memory[8:12], bench.memory[:4])
    assert bench.tier.counts()["stored"] == 4


@pytest.mark.parametrize("io", ["process", "inline"])
def test_a_damaged_row_alone_fails_and_is_a_miss_until_it_is_stored_again(tmp_path: Path, io: str) -> None:
    bench, keys = Bench(tmp_path, io=io), keys_of(4)
    bench.store(keys, range(4))
    bench.damage(keys[2])
    expected = bench.memory.copy()
    result = bench.load(keys, [8, 9, 10, 11])
    assert not result.success
    assert result.successful_keys == [keys[0], keys[1], keys[3]]
    for row, source in ((8, 0), (9, 1), (11, 3)):
        expected[row] = expected[source]
    expected[10] = bench.memory[10]  # undefined
    assert np.array_equal(bench.memory, expected)
    assert bench.look(keys) == [HIT, HIT, MISS, HIT]
    assert bench.tier.counts()["rejected"] == 1
    assert bench.store([keys[2]], [2], first=2).success
    assert bench.look(keys) == [HIT] * 4
    assert bench.load(keys, [12, 13, 14, 15]).success
    assert np.array_equal(bench.memory[12:], bench.memory[:4])
    bench.tier.shutdown()


def test_a_key_that_vanished_is_a_miss_at_once(bench: Bench) -> None:
    """What was evicted between lookup and load: a request that still has its answer must not be told HIT for ever."""
    keys = keys_of(2)
    bench.store(keys, [0, 1])
    context = bench.context(keys)
    wait_for(lambda: ([bench.tier.lookup(k, context) for k in keys], bench.tier.on_schedule_end(None))[0] == [HIT] * 2)
    bench.tier._store.clear()
    result = bench.load(keys, [2, 3])
    assert not result.success
    assert not result.successful_keys
    assert [bench.tier.lookup(key, context) for key in keys] == [MISS] * 2
    bench.store(keys, [0, 1])
    assert [bench.tier.lookup(key, context) for key in keys] == [HIT] * 2


def test_what_a_request_stores_is_found_by_one_that_asked_before(bench: Bench) -> None:
    keys = keys_of(2)
    context = bench.context(keys, "early")
    wait_for(lambda: (bench.tier.lookup(keys[0], context), bench.tier.on_schedule_end(None))[0] is MISS)
    bench.store(keys, [0, 1])
    assert bench.tier.lookup(keys[0], context) is HIT
    bench.tier.on_request_finished(context)
    assert not bench.tier._lookups._answers


def test_a_store_that_was_closed_is_found_by_the_next_engine(tmp_path: Path) -> None:
    first, keys = Bench(tmp_path), keys_of(3)
    first.store(keys, [0, 1, 2])
    first.tier.shutdown()
    second = Bench(tmp_path, seed=1)
    assert second.look(keys) == [HIT] * 3
    assert second.load(keys, [5, 6, 7]).success
    assert np.array_equal(second.memory[5:8], first.memory[:3])
    second.tier.shutdown()


@pytest.mark.parametrize("change", ["weights", "tp_size", "row"])
def test_rows_of_another_model_or_split_are_not_found(tmp_path: Path, change: str) -> None:
    first, keys = Bench(tmp_path), keys_of(2)
    first.store(keys, [0, 1])
    first.tier.shutdown()
    others: dict[str, dict[str, Any]] = {
        "weights": {"weights": "other"},
        "tp_size": {"config": offloading_config(tp_size=2, world_size=2)},
        "row": {"row": 2 * ROW},
    }
    second = Bench(tmp_path, **others[change])
    assert second.look(keys) == [MISS] * 2
    assert not second.load(keys, [0, 1]).success
    second.tier.shutdown()


def stop(process: int) -> None:
    """Stop a process, and wait until none of its threads runs."""
    os.kill(process, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{process}/task").iterdir())
    wait_for(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks))


def test_a_killed_io_process_costs_misses(bench: Bench) -> None:
    keys = keys_of(4)
    bench.store(keys[:2], [0, 1])
    process = bench.tier._store.io_process_id
    stop(process)
    bench.submit(keys[2:], [2, 3], False, bench.context(keys[2:], first=2))
    bench.submit(keys[:2], [8, 9], True, bench.context(keys[:2]))
    assert list(bench.tier.get_finished_jobs()) == [], "submitting does not wait"
    os.kill(process, signal.SIGKILL)
    bench.tier.drain_jobs()
    assert [result.success for result in bench.tier.get_finished_jobs()] == [False, False]
    assert bench.look(keys) == [MISS] * 4
    wait_for(lambda: bench.tier._store.io_process_id not in (None, process))
    assert bench.store(keys, [0, 1, 2, 3]).success
    assert bench.look(keys) == [HIT] * 4
    assert bench.load(keys, [4, 5, 6, 7]).success
    assert np.array_equal(bench.memory[4:8], bench.memory[:4])


def test_a_hung_io_process_is_waited_for_by_no_lookup(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path, io_timeout_s=LOOKUP_PATIENCE_S + 2), keys_of(2)
    bench.store(keys, [0, 1])
    process = bench.tier._store.io_process_id
    stop(process)
    try:
        context = bench.context(keys)
        assert [bench.tier.lookup(key, context) for key in keys] == [RETRY] * 2
        bench.tier.on_schedule_end(None)
        wait_for(lambda: [bench.tier.lookup(key, context) for key in keys] == [MISS] * 2)
        assert bench.tier._lookups._thread.is_alive()
    finally:
        os.kill(process, signal.SIGCONT)
    bench.tier.shutdown()


def test_keys_that_end_inside_one_row_are_found_apart(bench: Bench) -> None:
    """Where vLLM keeps the tokens after the last whole chunk: several keys have one position then."""
    keys = keys_of(3)
    context = ReqContext(req_id="r")
    for key, end in zip(keys, (TOKENS, TOKENS + 8, TOKENS + 16), strict=True):
        context.set_offload_key_position(key, end)
    bench.submit(keys, [0, 1, 2], False, context)
    assert bench.finished().success
    other = ReqContext(req_id="other")
    other._offload_key_positions |= context._offload_key_positions
    told: list[Any] = []
    wait_for(
        lambda: (told.append([bench.tier.lookup(k, other) for k in keys]), RETRY not in told[-1])[1] or flush(bench)
    )
    assert told[-1] == [HIT] * 3
    bench.submit(keys, [8, 9, 10], True, other)
    assert bench.finished().success
    assert np.array_equal(bench.memory[8:11], bench.memory[:3])


def flush(bench: Bench) -> None:
    bench.tier.on_schedule_end(None)


def test_lookups_feed_eviction(bench: Bench) -> None:
    keys = keys_of(3)
    bench.look(keys)
    bench.tier.touch(keys[:2], bench.context(keys))
    wait_for(lambda: bench.tier._store.stats().get("touched") == 5)


def test_the_memory_is_given_back_at_shutdown(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path), keys_of(2)
    bench.submit(keys, [0, 1], False, bench.context(keys))
    bench.tier.shutdown()
    [result] = bench.tier.get_finished_jobs()
    assert result.success
    bench.view.release()
    del bench.memory
    bench.region.close()  # raises where anything still views it
    bench.tier.shutdown()
    assert bench.look(keys) == [MISS] * 2
    assert not bench.load(keys, [0, 1]).success


def test_figures_are_reported_once(bench: Bench) -> None:
    keys = keys_of(2)
    assert bench.tier.get_stats() is None
    bench.store(keys, [0, 1])
    definitions = KVStoreTier.build_metric_definitions({})
    [(name, values)] = bench.tier.get_stats()._values.items()
    assert list(definitions) == [name]
    assert values == {("stored",): 2}
    assert bench.tier.get_stats() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capcity": "1G"}, "capcity"),
        ({"capacity": "much"}, "capacity"),
        ({"weights": ""}, "weights"),
        ({"row": 4097}, "4097"),
        ({"codec": "zip"}, "zip"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bench(tmp_path, **options)


def test_engines_that_run_data_parallel_have_stores_of_their_own(tmp_path: Path) -> None:
    configs = [offloading_config(data_parallel_size=2, data_parallel_index=i) for i in range(2)]
    benches = [Bench(tmp_path, config=config) for config in configs]
    assert len({bench.tier._store.folder for bench in benches}) == 2
    for bench in benches:
        bench.tier.shutdown()


def test_its_medium_is_storage() -> None:
    assert KVStoreTier.medium is Medium.STORAGE


@pytest.mark.parametrize("row", [8, 4096, CHUNK_BYTES, CHUNK_BYTES + 4096, 4096 * 101, 5 * 2**20 + 4096])
def test_rows_are_cut_into_equal_parts_that_chunks_hold(row: int) -> None:
    heads, nbytes = cut(row)
    assert heads * nbytes == row
    assert nbytes <= CHUNK_BYTES
    assert not nbytes % 8
