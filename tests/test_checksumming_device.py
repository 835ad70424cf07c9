"""The worker on a device whose streams do nothing until somebody waits (tests/test_devicepath.py), in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so this file runs itself in a process of its own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import (
    KVChecksumBlocks,
    KVChecksumOffload,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumSide,
    KVChecksumWorker,
    PagedKVCache,
    Rank,
    compare,
    transfer,
)
from tests.support import block_hashes, random_tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parent.parent
HASHES = block_hashes(3)
BLOCKS = KVChecksumBlocks(10, {0: (0, [5, 1, 3]), 1: (0, [4, 2, 0])})
OTHERS = KVChecksumBlocks(13, {0: (2, [7, 3])})
if INTERPRETED:
    from kvstore.checksumming_device import HeaderPool
    from kvstore.devicepath import DeviceRoute
    from tests.test_devicepath import LateDevice

if not INTERPRETED:

    def test_all_of_this_file_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
        assert " passed" in run.stdout
        assert "skipped" not in run.stdout


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that the interpreter's process collects, and this one does not."""
    return test if INTERPRETED else None


def cache_of() -> PagedKVCache:
    """Two groups; group 0 has layers of three replica counts on rank 1 of 4."""
    tensors = {f"layers.{n}": random_tensor((8, 1, 4, 16), torch.bfloat16, n) for n in range(4)}
    heads = {"layers.0": 4, "layers.1": 2, "layers.2": 1, "layers.3": 4}
    groups = {0: ["layers.0", "layers.1", "layers.2"], 1: ["layers.3"]}
    first = {"layers.0": 1, "layers.3": 1}
    return PagedKVCache.from_tensors(tensors, "BHNC", groups, first, kv_heads=heads)


RANK = Rank(1, 4)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device, on which workers that are made from now on find their caches."""
    device = LateDevice()
    monkeypatch.setattr(transfer, "_make_route", lambda cache, group: DeviceRoute(group, device))
    return device


def on_host(
    cache: PagedKVCache, *steps: tuple[KVChecksumScheduled, KVChecksumOffload | None]
) -> list[KVChecksumRecord]:
    """The records that the CPU's loops make."""
    worker = KVChecksumWorker(cache, RANK)
    return [worker.execute(*step).result() for step in steps]


class Stream:
    """An engine's stream, on which one event is waited for after the other."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.events.append(event)


@interpreted
def test_records_are_those_of_the_host_and_nothing_waits_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, scheduled = cache_of(), KVChecksumScheduled({"a": BLOCKS}, {"b": OTHERS})
    (expected,) = on_host(cache_of(), (scheduled, None))
    device = LateDevice()
    monkeypatch.setattr(transfer, "_make_route", lambda cache, group: DeviceRoute(group, device))
    worker = KVChecksumWorker(cache, RANK)
    waits = device.waits
    pending = worker.execute(scheduled)
    assert device.waits == waits
    assert not device.gets.idle
    assert device.puts.idle
    found = pending.result()
    assert found == expected
    assert device.gets.idle
    assert found.checksums["b"][0].replica_keys == [(1, 0), (2, 1), (4, 1)]
    assert pending.result() == found


@interpreted
def test_sums_are_taken_behind_what_the_callers_stream_was_given(late: Any) -> None:
    cache = cache_of()
    worker, scheduled = KVChecksumWorker(cache, RANK), KVChecksumScheduled(reqs_to_recv={"a": BLOCKS})
    tensor = cache.tensors["layers.0"]
    assert isinstance(tensor, torch.Tensor)
    before = worker.execute(scheduled).result()
    late.engine.run(lambda: tensor[5].zero_())
    after = worker.execute(scheduled).result()
    assert after != before
    assert not tensor[5].any()


@interpreted
def test_offloaded_checksums_are_written_and_read_on_the_device(late: Any) -> None:
    cache = cache_of()
    worker = KVChecksumWorker(cache, RANK)
    kept = {number: worker.init_block_checksums(8) for number in (0, 1)}
    offload = KVChecksumOffload(kept, {"a": {0: HASHES, 1: HASHES}})
    stream = Stream()
    pending = worker.execute(KVChecksumScheduled({"a": BLOCKS, "c": OTHERS}), offload)
    pending.wait_on(stream)  # type: ignore[arg-type]
    assert not kept[0].any(), "the device has not begun"
    for event in stream.events:
        event.synchronize()
    assert [int(kept[number].count_nonzero()) for number in (0, 1)] == [3, 3]
    loaded = worker.execute(
        KVChecksumScheduled(reqs_to_load={"a": BLOCKS}, reqs_to_recv={"b": OTHERS}), offload
    ).result()
    assert all(pending.result().checksums["a"][n].stored is None for n in (0, 1))
    assert loaded.checksums["b"][0].stored is None
    side = KVChecksumSide(1, 1, {0: 4, 1: 4})
    alone = KVChecksumRecord(0, 0, loaded.checksums, fingerprints=loaded.fingerprints)
    assert compare([alone], None, "a", num_tokens=10, reported_side=side).ok()
    kept[1][2] ^= 1
    again = worker.execute(KVChecksumScheduled(reqs_to_load={"a": BLOCKS}), offload).result()
    alone = KVChecksumRecord(0, 0, again.checksums, fingerprints=again.fingerprints)
    found = compare([alone], None, "a", num_tokens=10, reported_side=side)
    assert [(part.group, part.first_token) for part in found.mismatching] == [(1, 4)]


@interpreted
def test_the_host_writes_the_same_checksums_and_what_is_pending_keeps_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offloads = [KVChecksumOffload({0: torch.zeros(8, dtype=torch.int64)}, {"a": {0: HASHES}}) for _ in range(2)]
    step = KVChecksumScheduled({"a": KVChecksumBlocks(10, {0: (0, [5, 1, 3])})})
    on_host(cache_of(), (step, offloads[0]))
    device = LateDevice()
    monkeypatch.setattr(transfer, "_make_route", lambda cache, group: DeviceRoute(group, device))
    pending = KVChecksumWorker(cache_of(), RANK).execute(step, offloads[1])
    gc.collect()
    pending.result()
    assert offloads[0].block_checksums[0].tolist() == offloads[1].block_checksums[0].tolist()


@interpreted
def test_several_steps_in_flight_have_memory_of_their_own_which_is_used_again(late: Any) -> None:
    cache = cache_of()
    worker = KVChecksumWorker(cache, RANK)
    steps = [
        KVChecksumScheduled(reqs_to_recv={"a": KVChecksumBlocks(4 * n, {0: (0, list(range(n)))})}) for n in (3, 1, 2)
    ]
    pending = [worker.execute(step) for step in steps]
    together = [one.result() for one in reversed(pending)][::-1]
    before = len(late.allocations)
    assert [worker.execute(step).result() for step in steps] == together
    assert len(late.allocations) == before, "in steady state nothing is allocated"


@interpreted
def test_memory_whose_sums_nobody_took_is_used_again(late: Any) -> None:
    worker = KVChecksumWorker(cache_of(), RANK)
    step = KVChecksumScheduled(reqs_to_recv={"a": BLOCKS})
    expected = worker.execute(step).result()
    worker.execute(step)
    late.gets.wait()
    gc.collect()
    before = len(late.allocations)
    assert worker.execute(step).result() == expected
    assert len(late.allocations) == before


@interpreted
def test_a_step_without_blocks_has_empty_groups(late: Any) -> None:
    worker = KVChecksumWorker(cache_of(), RANK)
    found = worker.execute(KVChecksumScheduled(reqs_to_recv={"a": KVChecksumBlocks(0, {0: (0, [])})})).result()
    assert found.checksums["a"][0].values.shape == (0, 3)


@interpreted
def test_a_header_that_may_be_in_use_is_waited_for(late: Any) -> None:
    pool = HeaderPool(late)
    header = pool.borrow(10)
    late.gets.run(lambda: None, done=header.done)
    pool.give(header)
    assert not late.gets.idle
    assert pool.borrow(10) is header
    assert late.gets.idle
    assert pool.borrow(10) is not header
