"""The device path in Triton's interpreter, on a device whose streams do nothing until somebody waits for them.

Copies read and write host memory at the last moment that is allowed, so a missing wait, or a buffer that is used again
too early, gives wrong bytes here every time. Triton reads TRITON_INTERPRET when a kernel is defined, so this file runs
itself in a process of its own (as test_kernels.py does).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVStore, PagedKVCache, StoreConfig, block_checksums, fetching, slice_checksums, transfer
from kvstore.blockdb import BlockDB
from kvstore.errors import GraphCapture, StagingMemoryError
from kvstore.results import GetResult, PutResult, Rejection
from tests.kernel_cases import CPU, FORMS
from tests.support import (
    MIB,
    block_hashes,
    buffers_are_lost,
    buffers_of,
    canonical,
    io_mode,
    open_store,
    report_campaign,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parent.parent
TINY = StoreConfig(capacity_bytes=16 * MIB, durability="process", batch_bytes=1)
"""One block in a buffer, so that a call of several blocks needs each buffer more than once."""
BLOCKS = 6
FEW = 3
"""Blocks of a call that a fault strikes."""
HASHES = block_hashes(BLOCKS)
IDS = [4, 0, 5, 2, 1, 3]
STORE_FORMS = ("8-byte K and V", "MLA 584 bytes")

if INTERPRETED:
    from kvstore import fitness
    from kvstore.devicepath import DeviceBuffer, DeviceRoute, DeviceTransfer, Table
    from kvstore.hostpath import host_path
    from kvstore.launches import Launches
    from kvstore.route import HostRoute


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that the interpreter's process collects, and this one does not."""
    return test if INTERPRETED else None


if not INTERPRETED:

    def test_all_of_this_file_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
        assert " passed" in run.stdout
        assert "skipped" not in run.stdout
        campaigns = [line for line in run.stdout.splitlines() if line.startswith("campaign=")]
        for line in campaigns:
            figures = dict(part.split("=", 1) for part in line.split())
            report_campaign(
                figures["campaign"], int(figures["faults"]), int(figures["detected"]), int(figures["wrong_served"])
            )
        assert len(campaigns) == 4


# --- a device that does everything as late as it may ---------------------------------------------------------------


class LateLane:
    """A stream whose work is done when somebody waits for an event behind it, and not before. Triton's interpreter runs
    one kernel at a time, so all streams share a lock."""

    lock = threading.RLock()

    def __init__(self) -> None:
        self._queue: deque[tuple[LateEvent | None, Callable[[], None]]] = deque()
        self._enqueued = self._done = 0
        self.waits = 0

    def run(self, work: Callable[[], None], after: LateEvent | None = None, done: LateEvent | None = None) -> None:
        with self.lock:
            self._queue.append((after, work))
            self._enqueued += 1
            if done is not None:
                done.record(self)

    def record(self) -> int:
        return self._enqueued

    def wait(self) -> None:
        self.drain(self._enqueued)

    def drain(self, until: int) -> None:
        with self.lock:
            self.waits += self._done < until
            while self._done < until:
                after, work = self._queue.popleft()
                self._done += 1
                if after is not None:
                    after.synchronize()
                work()

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        return not self._queue


class LateEvent:
    """A place in a LateLane."""

    def __init__(self) -> None:
        self._lane: LateLane | None = None
        self._place = 0

    def record(self, lane: LateLane) -> None:
        self._lane, self._place = lane, lane.record()

    def synchronize(self) -> None:
        if self._lane is not None:
            self._lane.drain(self._place)


@dataclass
class LateDevice:
    """A device of CPU memory that is full of other things when it is handed out; `engine` is the caller's stream."""

    device: torch.device = CPU
    puts: LateLane = field(default_factory=LateLane)
    gets: LateLane = field(default_factory=LateLane)
    engine: LateLane = field(default_factory=LateLane)
    allocations: list[int] = field(default_factory=list)

    def mark(self) -> LateEvent:
        event = LateEvent()
        event.record(self.engine)
        return event

    def event(self) -> LateEvent:
        return LateEvent()

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self.memory(nbytes)

    def pin(self, memory: Any) -> torch.Tensor:
        return torch.from_numpy(memory)

    def memory(self, nbytes: int) -> torch.Tensor:
        self.allocations.append(nbytes)
        return torch.full((nbytes + 16,), 0xA5, dtype=torch.uint8)[:nbytes]

    @property
    def waits(self) -> int:
        return self.puts.waits + self.gets.waits


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """A device; caches made from now on lie on it."""
    late = LateDevice()
    monkeypatch.setattr(transfer, "_make_route", lambda cache, group: DeviceRoute(group, late))
    return late


@pytest.fixture
def host_path_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts caches on the CPU again."""
    made = transfer._make_route
    return lambda: monkeypatch.setattr(transfer, "_make_route", made)


def caches(form: str, count: int = 2) -> list[PagedKVCache]:
    """Caches of one form, each of other random bytes: 6 blocks of 3 tokens."""
    return [FORMS[form].cache(seed, layers=2, blocks=BLOCKS, tokens=3) for seed in range(count)]


def put_and_get(store: KVStore, target: KVStore, tokens: int | None = None) -> tuple[PutResult, GetResult]:
    put = store.put_blocks(HASHES, IDS, num_tokens=tokens)
    return put, target.get_blocks(HASHES, IDS[::-1], num_tokens=tokens)


def flat(cache: PagedKVCache) -> list[torch.Tensor]:
    return [t for tensors in cache.tensors.values() for t in (tensors if isinstance(tensors, tuple) else (tensors,))]


def snapshot(cache: PagedKVCache) -> list[torch.Tensor]:
    return [tensor.clone().view(torch.uint8) for tensor in flat(cache)]


# --- what a device stores and loads ----------------------------------------------------------------------------------


@interpreted
@pytest.mark.both
@pytest.mark.parametrize("form", FORMS)
def test_blocks_go_to_disk_and_back(form: str, device: LateDevice, tmp_path: Path) -> None:
    source, target = caches(form)
    with open_store(tmp_path, source, TINY) as store:
        put = store.put_blocks(HASHES[:FEW], IDS[:FEW])
        got = store.attach(target).get_blocks(HASHES[:FEW], IDS[-FEW:])
        assert put.stored.all()
        assert got.verified.all()
        assert np.array_equal(canonical(target, IDS[-FEW:]), canonical(source, IDS[:FEW]))
    assert device.puts.idle
    assert device.gets.idle


@interpreted
@pytest.mark.both
def test_a_partial_block_leaves_the_slots_past_its_tokens_alone(device: LateDevice, tmp_path: Path) -> None:
    source, target = caches("split NHD")
    before = canonical(target, IDS[::-1])
    with open_store(tmp_path, source, TINY) as store:
        put, got = put_and_get(store, store.attach(target), BLOCKS * 3 - 2)
        assert put.stored.all()
        assert got.verified.all()
    stored, after = canonical(source, IDS), canonical(target, IDS[::-1])
    assert np.array_equal(after[:-1], stored[:-1])
    cells, was, now = (rows[-1].reshape(-1, 3, rows.shape[1] // 3 // 6) for rows in (stored, before, after))
    assert np.array_equal(now[:, :1], cells[:, :1])
    assert np.array_equal(now[:, 1:], was[:, 1:])


@interpreted
@pytest.mark.both
@pytest.mark.parametrize("device_first", [True, False])
def test_a_device_loads_what_a_host_stored_and_the_other_way_round(
    device_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = caches("packed HND", 1)[0], FORMS["split HND"].cache(9, layers=2, blocks=BLOCKS, tokens=3)
    source = PagedKVCache.from_tensors(
        {name: torch.cat(list(tensor), -1) for name, tensor in caches_of("2BHND", 96).tensors.items()}, "BHNC"
    )
    made, late = transfer._make_route, LateDevice()

    def route(cache: PagedKVCache, group: Any) -> Any:
        on_device = (cache is source) == device_first
        return DeviceRoute(group, late) if on_device else made(cache, group)

    monkeypatch.setattr(transfer, "_make_route", route)
    with open_store(tmp_path, source, TINY) as store:
        put, got = put_and_get(store, store.attach(target))
    assert put.stored.all()
    assert got.verified.all()
    assert np.array_equal(canonical(target, IDS[::-1]), canonical(source, IDS))


def caches_of(layout: str, head_size: int) -> PagedKVCache:
    form = replace(FORMS["split HND"], layout=layout, head_size=head_size)
    return form.cache(3, layers=2, blocks=BLOCKS, tokens=3)


@interpreted
def test_sums_are_those_of_the_host(device: LateDevice, host_path_again: Callable[[], None]) -> None:
    one, two = (FORMS["split NHD"].cache(1, layers=2, blocks=BLOCKS, tokens=3) for _ in range(2))
    found = slice_checksums(one, IDS, 7, 38), block_checksums(one, IDS, 7, 38)
    host_path_again()
    expected = slice_checksums(two, IDS, 7, 38), block_checksums(two, IDS, 7, 38)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])


@interpreted
@pytest.mark.both
def test_a_verification_of_many_blocks_takes_several_tables(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.devicepath.MIN_HEADER_BYTES", 8)
    source, target = caches("MLA 584 bytes")
    with open_store(tmp_path, source, TINY) as store:
        put, got = put_and_get(store, store.attach(target))
        pool = store._front.staging(store._views[0], "get", buffers_of(store))
        buffer = pool._buffers[0]
        assert isinstance(buffer, DeviceBuffer)
        assert buffer.host_words.numel() // 6 < BLOCKS, "one table would do"
    assert put.stored.all()
    assert got.verified.all()


@interpreted
def test_records_of_both_codecs_and_unreadable_ones_go_together(device: LateDevice, tmp_path: Path) -> None:
    """A block that cannot be decoded takes no row of the batch that is scattered."""
    source, target = caches("packed HND")
    config = replace(TINY, batch_bytes=MIB)
    with open_store(tmp_path, source, config) as store:
        store.put_blocks(HASHES, IDS)
        loader = store.attach(target)
        decode = [False, True, False, False, True, False]
        fail_decoding(loader, decode)
        got = loader.get_blocks(HASHES, IDS[::-1])
    good = [i for i in range(BLOCKS) if not decode[i]]
    assert np.flatnonzero(got.verified).tolist() == good
    assert sorted(got.rejected) == [1, 4]
    assert np.array_equal(canonical(target, [IDS[::-1][i] for i in good]), canonical(source, [IDS[i] for i in good]))


def fail_decoding(store: KVStore, fails: list[bool]) -> None:
    """Make the decoding of some blocks fail for good."""
    made, keys = fetching.Fetching._decode, store._views[0].shape.keys(HASHES)

    def decode(self: Any, found: Any, block: Any) -> Any:
        block[...] = 0x5A
        failed = fails[keys.index(self.question.keys[found.index])]
        return Rejection("decode", "a test's") if failed else made(self, found, block)

    patch = pytest.MonkeyPatch()
    patch.setattr(fetching.Fetching, "_decode", decode)
    PATCHES.append(patch)


PATCHES: list[pytest.MonkeyPatch] = []


@pytest.fixture(autouse=True)
def _undo_patches() -> Iterator[None]:
    yield
    while PATCHES:
        PATCHES.pop().undo()


# --- order, waiting, memory --------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.both
@pytest.mark.parametrize("submit", [False, True])
def test_a_put_stores_what_the_callers_stream_had_still_to_write(
    submit: bool, device: LateDevice, tmp_path: Path
) -> None:
    source, target = caches("packed HND")
    written, later = caches("packed HND", 4)[2:]

    def write(new: PagedKVCache) -> Callable[[], None]:
        return lambda: [tensor.copy_(new.tensors[name]) for name, tensor in source.tensors.items()] and None

    with open_store(tmp_path, source, TINY) as store:
        device.engine.run(write(written))
        put = store.submit_put_blocks(HASHES, IDS).result() if submit else store.put_blocks(HASHES, IDS)
        device.engine.run(write(later))
        assert put.stored.all()
        assert store.attach(target).get_blocks(HASHES, IDS).verified.all()
    assert np.array_equal(canonical(target, IDS), canonical(written, IDS))


@interpreted
@pytest.mark.both
def test_a_get_lands_behind_what_the_callers_stream_still_reads(device: LateDevice, tmp_path: Path) -> None:
    source, target = caches("packed HND")
    before, seen = canonical(target, IDS), list[Any]()
    with open_store(tmp_path, source, TINY) as store:
        store.put_blocks(HASHES, IDS)
        loader = store.attach(target)
        device.engine.run(lambda: seen.append(canonical(target, IDS)))
        assert loader.get_blocks(HASHES, IDS).verified.all()
    assert np.array_equal(seen[0], before)


@interpreted
@pytest.mark.both
@pytest.mark.parametrize("blocks", [1, 3, BLOCKS])
def test_the_host_waits_once_a_batch_and_once_to_verify(device: LateDevice, tmp_path: Path, blocks: int) -> None:
    source, target = caches("packed HND")
    with open_store(tmp_path, source, TINY) as store:
        loader = store.attach(target)
        waits = device.waits
        store.put_blocks(HASHES[:blocks], IDS[:blocks])
        assert device.waits - waits <= blocks
        waits = device.waits
        loader.get_blocks(HASHES[:blocks], IDS[:blocks])
        assert device.waits - waits <= blocks + 1


@interpreted
def test_nothing_is_allocated_in_steady_state(device: LateDevice, tmp_path: Path) -> None:
    source, target = caches("packed HND")
    with open_store(tmp_path, source, TINY) as store:
        loader = store.attach(target)
        put_and_get(store, loader)
        before = len(device.allocations)
        other = block_hashes(BLOCKS, "other")
        store.put_blocks(other, IDS)
        assert loader.get_blocks(other, IDS).verified.all()
        assert len(device.allocations) == before
        block = source.group(0).block_bytes
        buffers, trials = 2 * (2 + 2), 2 * 2
        assert device.allocations.count(block) == buffers + trials, "two for puts and two for gets, on both sides"


@interpreted
def test_the_next_blocks_are_on_their_way_while_the_last_are_written(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, order = 0, list[str]()
    gather, write = DeviceTransfer.gather, BlockDB.write
    monkeypatch.setattr(DeviceTransfer, "gather", lambda self, *rest: (order.append("gather"), gather(self, *rest))[1])
    monkeypatch.setattr(
        "kvstore.blockdb.BlockDB.write", lambda self, *rest: (order.append("write"), write(self, *rest))[1]
    )
    with open_store(tmp_path, caches("packed HND")[0], TINY) as store:
        assert store.put_blocks(HASHES, IDS).stored.all()
    for event in order:
        started += 1 if event == "gather" else -1
        assert 0 <= started <= 2
    assert order[:3] == ["gather", "gather", "write"]


@interpreted
@pytest.mark.both
def test_calls_of_many_threads_share_the_buffers(device: LateDevice, tmp_path: Path) -> None:
    source, target = caches("MLA 584 bytes")
    expected, wrong = canonical(source, IDS), list[str]()
    with open_store(tmp_path, source, TINY) as store:
        loader = store.attach(target)

        def work(number: int) -> None:
            index = [number]
            for _ in range(4):
                store.put_blocks([HASHES[number]], [IDS[number]], start=number)
                got = loader.get_blocks([HASHES[number]], [IDS[number]], start=number)
                if not got.verified.all() or not np.array_equal(canonical(target, [IDS[number]]), expected[index]):
                    wrong.append(f"block {number}: {got}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(BLOCKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert wrong == []


@interpreted
@pytest.mark.both
@pytest.mark.parametrize("where", ["kvstore.storing.Storing._commit", "kvstore.loading.Load._verify"])
def test_a_call_that_is_cut_off_ends_behind_the_device(
    where: str, device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt the caller may free the blocks: nothing may still be on its way to them."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if io_mode() == "process" and "Storing" in where:
        where = "kvstore.remoteput.RemoteBatch.write"
    source, target = caches("packed HND")
    with open_store(tmp_path, source, TINY) as store:
        loader = store.attach(target)
        store.put_blocks(HASHES[:2], IDS[:2])
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                put_and_get(store, loader)
        assert device.puts.idle
        assert device.gets.idle
        assert not buffers_are_lost(store)
        assert put_and_get(store, loader)[1].verified.all()


@interpreted
@pytest.mark.both
def test_memory_that_is_not_there_is_said_and_not_lost(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> torch.Tensor:
        raise StagingMemoryError(f"{nbytes} bytes")

    source, target = caches("packed HND")
    with open_store(tmp_path, source, TINY) as store:
        with monkeypatch.context() as patch:
            patch.setattr(device, "memory", full)
            with pytest.raises(StagingMemoryError):
                store.put_blocks(HASHES, IDS)
        put, got = put_and_get(store, store.attach(target))
    assert put.stored.all()
    assert got.verified.all()


@interpreted
@pytest.mark.both
def test_a_capture_is_refused_before_anything_is_done(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capturing() -> None:
        raise GraphCapture("capturing")

    with open_store(tmp_path, caches("packed HND")[0], TINY) as store:
        monkeypatch.setattr(device, "mark", capturing)
        for call in (store.put_blocks, store.get_blocks, store.submit_put_blocks, store.submit_get_blocks):
            with pytest.raises(GraphCapture):
                call(HASHES, IDS)
        assert store.stats()["put_stored"] == 0


# --- whether a device is served ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("broken", ["", "gather", "scatter", "checksum_blocks", "checksum_slices"])
def test_a_device_is_served_only_where_its_results_are_the_hosts(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late, on_device, made = LateDevice(), list[PagedKVCache](), fitness._caches

    def make(device: torch.device) -> list[PagedKVCache]:
        found = made(torch.device("cpu"))
        if device.type == "xpu":
            on_device.extend(found)
        return found

    def route(cache: PagedKVCache) -> Any:
        group = cache.group(0)
        return DeviceRoute(group, late) if cache in on_device else HostRoute(host_path(group), group)

    monkeypatch.setattr(fitness, "_caches", make)
    monkeypatch.setattr(fitness, "_route", route)
    if broken:
        monkeypatch.setattr(Launches, broken, lambda self, *rest: None)
    reason = fitness._try(torch.device("xpu"))
    assert (reason is None) == (not broken), reason


# --- faults ------------------------------------------------------------------------------------------------------------

Rows = Any
Fault = Callable[["Harness"], None]


@dataclass
class Harness:
    """A store on the device and what a fault needs to know."""

    store: KVStore
    loader: KVStore
    source: PagedKVCache
    target: PagedKVCache
    form: str
    patch: pytest.MonkeyPatch = field(init=False)
    hashes: list[bytes] = field(init=False)
    served_wrong: int = 0
    """Blocks that the last fault's get verified, and that are not those of the source before it."""

    def begin(self, request: str, seed: int) -> None:
        """Other bytes in both caches, so that what an earlier fault left in buffers is never right; blocks that nobody
        stored."""
        for number, cache in enumerate((self.source, self.target)):
            fresh = FORMS[self.form].cache(2 * seed + number, layers=2, blocks=BLOCKS, tokens=3)
            for tensor, other in zip(flat(cache), flat(fresh), strict=True):
                tensor.copy_(other)
        self.hashes, self.served_wrong = block_hashes(FEW, request), 0
        self.expected = canonical(self.source, IDS[:FEW])

    def put(self) -> PutResult:
        return self.store.put_blocks(self.hashes, IDS[:FEW])

    def get(self) -> GetResult:
        got = self.loader.get_blocks(self.hashes, IDS[::-1][:FEW])
        landed = canonical(self.target, IDS[::-1][:FEW])
        self.served_wrong = sum(
            bool(got.verified[i]) and not np.array_equal(landed[i], self.expected[i]) for i in range(FEW)
        )
        return got

    def alter(self, name: str, change: Callable[[Rows, torch.Tensor], None]) -> None:
        """Change rows and staging before a launch of the kernels."""
        launch = getattr(Launches, name)

        def altered(launches: Any, rows: Rows, staging: torch.Tensor) -> None:
            rows = rows.clone()
            change(rows, staging)
            launch(launches, rows, staging)

        self.patch.setattr(Launches, name, altered)

    def after(self, name: str, change: Callable[[Rows, torch.Tensor], None]) -> None:
        """Change memory after a launch of the kernels."""
        launch = getattr(Launches, name)

        def altered(launches: Any, rows: Rows, staging: torch.Tensor) -> None:
            launch(launches, rows, staging)
            change(rows, staging)

        self.patch.setattr(Launches, name, altered)


def another_block(rows: Rows, staging: torch.Tensor) -> None:
    rows[0, 0] = (rows[0, 0] + 1) % BLOCKS


def rows_exchanged(rows: Rows, staging: torch.Tensor) -> None:
    rows[[0, 1], 0] = rows[[1, 0], 0]


def two_into_one(rows: Rows, staging: torch.Tensor) -> None:
    rows[1, 0] = rows[0, 0]


def staged_exchanged(rows: Rows, staging: torch.Tensor) -> None:
    rows[[0, 1], 4] = rows[[1, 0], 4]


def nothing(rows: Rows, staging: torch.Tensor) -> None:
    rows[:, 2] = 0


def a_token_short(rows: Rows, staging: torch.Tensor) -> None:
    rows[0, 2] -= 1


def a_token_late(rows: Rows, staging: torch.Tensor) -> None:
    rows[0, 1], rows[0, 2] = 1, rows[0, 2] - 1


def bit_in_staging(rows: Rows, staging: torch.Tensor) -> None:
    staging[0, staging.shape[1] // 3] ^= 4


COPY_FAULTS = {
    f.__name__: f
    for f in (
        *(another_block, rows_exchanged, two_into_one, staged_exchanged, nothing, a_token_short, a_token_late),
        bit_in_staging,
    )
}


def overwritten(cache: PagedKVCache) -> Callable[[Rows, torch.Tensor], None]:
    """Another write to a block of the cache that was just copied."""

    def change(rows: Rows, staging: torch.Tensor) -> None:
        name = next(iter(cache.tensors))
        tensors = cache.tensors[name]
        tensor = tensors[0] if isinstance(tensors, tuple) else tensors
        tensor.view(torch.uint8).flatten()[: tensor.nbytes // 2] ^= 1

    return change


def garbage(staging: torch.Tensor) -> None:
    staging[...] = 0x5A


def get_faults() -> dict[str, Fault]:
    faults: dict[str, Fault] = {n: lambda h, f=f: h.alter("scatter", f) for n, f in COPY_FAULTS.items()}
    faults["bit in host staging"] = lambda h: flip_decoded(h)
    faults["overwritten after the copy"] = lambda h: h.after("scatter", overwritten(h.target))
    faults["bytes not sent"] = lambda h: h.alter("scatter", lambda rows, staging: garbage(staging))
    faults["rows not sent"] = lambda h: h.patch.setattr(Table, "send", lambda self: self._rows.zero_())
    faults["sums not fetched"] = lambda h: h.patch.setattr(Table, "fetch", lambda self: None)
    faults["sums not made"] = lambda h: h.patch.setattr(Launches, "checksum_blocks", lambda self, *rest: None)
    return faults


def flip_decoded(harness: Harness) -> None:
    scatter = DeviceTransfer.scatter

    def flipped(self: DeviceTransfer, span: Any, staged: Any) -> None:
        staged.bytes[0, 5] ^= 64
        scatter(self, span, staged)

    harness.patch.setattr(DeviceTransfer, "scatter", flipped)


def put_faults() -> dict[str, Fault]:
    faults: dict[str, Fault] = {n: lambda h, f=f: h.alter("gather", f) for n, f in COPY_FAULTS.items()}
    faults["bit in staging"] = lambda h: h.after("gather", bit_in_staging)
    faults["the source changed meanwhile"] = lambda h: h.after("checksum_slices", overwritten(h.source))
    faults["sums not fetched"] = lambda h: h.patch.setattr(Table, "fetch", lambda self: None)
    faults["bytes not fetched"] = lambda h: h.after("gather", lambda rows, staging: garbage(staging))
    faults["sums not made"] = lambda h: h.patch.setattr(Launches, "checksum_slices", lambda self, *rest: None)
    del faults["bit_in_staging"]
    return faults


Act = Callable[[Harness, Fault], bool]
"""Calls that a fault strikes; whether it was noticed."""


def strike(name: str, faults: Callable[[], dict[str, Fault]], act: Act, tmp_path: Path) -> None:
    """Make every fault in each form of store, in one store a form: each strikes blocks of its own. With io="process",
    which copies nothing, a part of them."""
    step = 1 if io_mode() == "inline" else 2
    made, missed, wrong = 0, list[str](), 0
    for form in STORE_FORMS[::step]:
        with harness_of(form, tmp_path / form) as harness:
            for fault, change in list(faults().items())[::step]:
                harness.begin(fault, made)
                noticed = act(harness, change)
                made, wrong = made + 1, wrong + harness.served_wrong
                missed += [] if noticed else [f"{form}: {fault}"]
    report_campaign(f"device_{name}/{io_mode()}", made, made - len(missed), wrong)
    assert (missed, wrong) == ([], 0)


@contextmanager
def harness_of(form: str, path: Path) -> Iterator[Harness]:
    source, target = caches(form)
    with open_store(path, source, replace(TINY, batch_bytes=MIB, max_rejections_per_minute=None)) as store:
        yield Harness(store, store.attach(target), source, target, form)


def get_struck(harness: Harness, fault: Fault) -> bool:
    assert harness.put().stored.all()
    with pytest.MonkeyPatch.context() as harness.patch:
        fault(harness)
        got = harness.get()
    return any(r.kind == "content" and not r.condemned for r in got.rejected.values())


def put_struck(harness: Harness, fault: Fault) -> bool:
    with pytest.MonkeyPatch.context() as harness.patch:
        fault(harness)
        put = harness.put()
    assert not (harness.get().verified & ~put.stored).any()
    return "source_changed" in put.failed.values()


if INTERPRETED:

    @pytest.mark.both
    def test_a_get_whose_bytes_went_astray_is_refused(device: LateDevice, tmp_path: Path) -> None:
        strike("get", get_faults, get_struck, tmp_path)

    @pytest.mark.both
    def test_a_put_whose_bytes_went_astray_is_not_stored(device: LateDevice, tmp_path: Path) -> None:
        strike("put", put_faults, put_struck, tmp_path)
