"""The I/O process: what it costs an engine when it ends, hangs or is upgraded, and what it must not know or keep."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, StoreConfig, link
from kvstore.errors import StoreAlreadyOpen, StoreLocked, StoreUnavailable
from kvstore.messages import (
    Connection,
    Kind,
    Late,
    Lost,
    Message,
    as_words,
    decode,
    encode,
    pack_strings,
    unpack_strings,
)
from kvstore.remote import RemoteStorage
from kvstore.sharedmemory import SharedMemory, mapped
from tests.support import MIB, SMALL, Raw, block_hashes, canonical, index_key, make_cache, open_store

HASHES = block_hashes(8)
PATIENCE = 30.0
QUICK = replace(SMALL, io_timeout_s=2.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """A store whose shard another process has open, with four blocks."""
    with open_store(tmp_path / "store", make_cache(), QUICK, io="process") as opened:
        assert opened.put_blocks(HASHES[:4], range(4)).stored.all()
        yield opened


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def pid_of(store: KVStore) -> int:
    until(lambda: store.io_process_id is not None)
    assert store.io_process_id is not None
    return store.io_process_id


def is_right(store: KVStore, hashes: list[bytes] = HASHES[:4]) -> bool:
    """Whether the blocks come back verified, and bit for bit."""
    ids = range(4, 4 + len(hashes))
    got = store.get_blocks(hashes, ids)
    return bool(got.verified.all()) and np.array_equal(
        canonical(store.cache, ids), canonical(store.cache, range(len(hashes)))
    )


# --- its end -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV])
def test_its_end_costs_misses_and_it_is_started_again(
    store: KVStore, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = pid_of(store)
    os.kill(first, number)
    got = store.get_blocks(HASHES[:4], range(4, 8))
    assert not got.rejected
    assert got.missing.all() or is_right(store)
    until(lambda: store.match_prefix(HASHES[:4]) == 4)
    assert is_right(store)
    assert pid_of(store) != first
    assert store.stats()["io_crashes"] == 1
    assert f"status -{int(number)}" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_all_of_a_service_are_the_engines(store: KVStore, number: int) -> None:
    os.kill(pid_of(store), number)
    time.sleep(0.05)
    assert is_right(store)
    assert store.stats()["io_crashes"] == 0


def test_a_process_that_hangs_is_not_waited_for_twice(store: KVStore) -> None:
    first = pid_of(store)
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    assert store.get_blocks(HASHES[:4], range(4, 8)).missing.all()
    assert store.put_blocks(HASHES[4:], range(4)).failed == dict.fromkeys(range(4), "io_process")
    assert store.match_prefix(HASHES[:4]) == 0
    assert time.monotonic() - began < 3 * QUICK.io_timeout_s
    with pytest.raises(StoreUnavailable, match="try again"):
        store.evict(1)
    until(lambda: store.match_prefix(HASHES[:4]) == 4)
    assert pid_of(store) != first
    assert is_right(store)


def test_memory_that_an_unanswered_call_named_is_not_used_again(store: KVStore) -> None:
    """A process that goes on late writes to the buffers that it was given: nobody else may have them."""
    assert is_right(store)
    first = pid_of(store)
    os.kill(first, signal.SIGSTOP)
    assert store.get_blocks(HASHES[:4], range(4, 8)).missing.all()
    storage = store._front.storage
    assert isinstance(storage, RemoteStorage)
    served = storage._watch.link
    if served is not None:
        served.sweep()
        pools = [pool for (purpose, *_), pool in served.buffers.pools.items() if purpose == "get"]  # type: ignore[misc]
        assert all(pool.borrowed for pool in pools)
    os.kill(first, signal.SIGCONT)
    until(lambda: store.match_prefix(HASHES[:4]) == 4)
    assert is_right(store)


def test_what_is_refused_stays_refused_when_it_is_started_again(store: KVStore) -> None:
    assert set(store.get_blocks(HASHES[:1], [4], start=1).rejected) == {0}, "at another position"
    os.kill(pid_of(store), signal.SIGKILL)
    until(
        lambda: store.match_prefix(HASHES[1:2]) == 0 and store.stats()["io_process_up"] and "records" in store.stats()
    )
    assert store.match_prefix(HASHES[:4]) == 0, "refused, until it is put again"
    assert store.put_blocks(HASHES[:1], [0]).stored.all()
    assert store.match_prefix(HASHES[:4]) == 4


def test_it_opens_the_same_shard_again_wherever_the_engine_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store(Path("store"), make_cache(), QUICK, io="process") as store:
        assert store.put_blocks(HASHES[:4], range(4)).stored.all()
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        os.kill(pid_of(store), signal.SIGKILL)
        until(lambda: store.match_prefix(HASHES[:4]) == 4)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_version_refuses_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROTOCOL", 99)
    with pytest.raises(StoreUnavailable, match="restart the engine"):
        open_store(tmp_path, make_cache(), QUICK, io="process")
    monkeypatch.undo()
    open_store(tmp_path, make_cache(), QUICK, io="process").close()


def test_a_start_that_fails_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "START", "import sys; sys.exit(3)")
    with pytest.raises(StoreUnavailable, match="ended"):
        open_store(tmp_path, make_cache(), QUICK, io="process")
    monkeypatch.undo()
    open_store(tmp_path, make_cache(), QUICK, io="process").close()


def test_errors_of_opening_are_the_engines(store: KVStore, tmp_path: Path) -> None:
    with pytest.raises(StoreAlreadyOpen):
        open_store(tmp_path / "store", make_cache(), QUICK, io="process")
    code = "from tests.support import *\nimport sys\nopen_store(Path(sys.argv[1]), make_cache(), io='process')"
    second = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, check=False
    )
    assert StoreLocked.__name__ in second.stderr


@pytest.mark.parametrize("io", ["inline", "process"])
def test_a_reader_of_its_own_process_stands_beside_this_process_writer(tmp_path: Path, io: str) -> None:
    cache = make_cache()
    with (
        open_store(tmp_path, cache, QUICK, io=io) as writer,
        open_store(tmp_path, cache, QUICK, mode="r", io="process") as reader,
        open_store(tmp_path, cache, QUICK, mode="r", io="process") as other,
    ):
        assert reader.match_prefix(HASHES) == 0
        assert writer.put_blocks(HASHES[:4], range(4)).stored.all()
        assert reader.match_prefix(HASHES) == other.match_prefix(HASHES) == 4
        with pytest.raises(StoreAlreadyOpen):
            open_store(tmp_path, cache, QUICK, io="process")


def test_its_log_is_the_engines(store: KVStore, caplog: pytest.LogCaptureFixture) -> None:
    raw, key = Raw(store), index_key(store, HASHES[0])
    raw.put_entry(key, b"\xff" + (raw.entry(key) or b"")[1:])
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert set(store.get_blocks(HASHES[:1], [4]).rejected) == {0}
    assert "kvstore.fetching" in {record.name for record in caplog.records}
    assert store.stats()["get_rejected_header"] == 1


# --- what it is ------------------------------------------------------------------------------------------------------


def test_it_imports_no_torch() -> None:
    code = "import sys, kvstore.worker; print([n for n in ('torch', 'triton', 'transformers', 'typer') if n in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_the_engine_does_not_map_the_database(store: KVStore) -> None:
    assert is_right(store)
    own, other = (Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), pid_of(store)))
    assert f"{store.folder}/data.mdb" not in own
    assert f"{store.folder}/data.mdb" in other
    assert "memfd:kvstore-staging" in own
    assert "memfd:kvstore-staging" in other


def test_closing_leaves_no_process_no_thread_and_no_memory(tmp_path: Path) -> None:
    # Exceptions of other tests hold their frames, and what these held, until they are collected.
    gc.collect()
    before = {thread.name for thread in threading.enumerate()}
    store = open_store(tmp_path, make_cache(), QUICK, io="process")
    assert store.put_blocks(HASHES[:4], range(4)).stored.all()
    process = pid_of(store)
    store.close()
    assert not Path(f"/proc/{process}").exists()
    assert {thread.name for thread in threading.enumerate()} <= before
    del store
    until(lambda: "memfd:kvstore-staging" not in Path("/proc/self/maps").read_text())


def test_shared_memory_cannot_be_made_smaller() -> None:
    shared = SharedMemory(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.descriptor, 0)
    other = mapped(shared.descriptor, 4096)
    shared.memory[7] = 9
    assert other[7] == 9
    assert fcntl.fcntl(shared.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


# --- backpressure and the breaker --------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["inline", "process"])
def test_a_full_queue_refuses_puts_at_once(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(QUICK, put_queue=2, threads=1, io_timeout_s=PATIENCE)
    with open_store(tmp_path, make_cache(), config, io=io) as store:
        free = threading.Event()
        store._front.submit(free.wait, PATIENCE)
        waiting = [store.submit_put_blocks(HASHES[i : i + 1], [i], start=i) for i in range(2)]
        refused = store.submit_put_blocks(HASHES[2:4], [2, 3], start=2)
        assert refused.done()
        assert refused.result().failed == {0: "backpressure", 1: "backpressure"}
        assert store.put_blocks(HASHES[4:5], [4], start=4).failed == {0: "backpressure"}
        free.set()
        assert all(put.result(PATIENCE).stored.all() for put in waiting)
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).stored.all()
        assert store.stats()["put_failed_backpressure"] == 3


@pytest.mark.parametrize("io", ["inline", "process"])
def test_buffers_that_do_not_come_free_end_calls_in_time(tmp_path: Path, io: str) -> None:
    with open_store(tmp_path, make_cache(), QUICK, io=io) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        assert store.get_blocks(HASHES[:2], [4, 5]).verified.all()
        buffers = store._front.storage.buffers if io == "inline" else store._front.storage._watch.link.buffers  # type: ignore[attr-defined]
        pools = list(buffers.pools.values())
        for pool in pools:
            pool.borrow("one")
            pool.borrow("another")
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).failed == {0: "backpressure", 1: "backpressure"}
        if io == "process":
            assert store.get_blocks(HASHES[:2], [4, 5]).missing.all()
            assert store.stats()["get_unavailable"] == 1
        for pool in pools:
            pool.borrowed.clear()
        assert store.put_blocks(HASHES[2:4], [2, 3], start=2).stored.all()


@pytest.mark.parametrize("io", ["inline", "process"])
def test_very_many_rejections_switch_loads_off(tmp_path: Path, io: str) -> None:
    config = StoreConfig(64 * MIB, "process", max_rejections_per_minute=3, loads_off_s=0.4)
    with open_store(tmp_path, make_cache(), config, io=io) as store:
        assert store.put_blocks(HASHES, range(8)).stored.all()
        raw = Raw(store)
        for block in HASHES[:4]:
            key = index_key(store, block)
            raw.put_entry(key, b"\xff" + (raw.entry(key) or b"")[1:])
        assert len(store.get_blocks(HASHES[:4], range(4)).rejected) == 4
        assert store.stats()["loads_off"] == store.stats()["loads_switched_off"] == 1
        assert store.get_blocks(HASHES[4:], range(4, 8), start=4).missing.all()
        assert store.put_blocks(HASHES[:4], range(4)).stored.all(), "puts go on"
        assert store.match_prefix(HASHES) == 0
        until(lambda: store.match_prefix(HASHES) == 8)
        assert store.get_blocks(HASHES[4:], range(4, 8), start=4).verified.all()
        assert store.stats()["loads_off"] == 0


# --- readers tell the writer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["inline", "process"])
def test_what_a_reader_refuses_the_writer_condemns(tmp_path: Path, io: str) -> None:
    reader = """
import sys
from tests.support import *
with open_store(Path(sys.argv[1]), make_cache(seed=1), SMALL, mode="r", io=sys.argv[2]) as store:
    got = store.get_blocks(block_hashes(4), range(4))
    again = store.get_blocks(block_hashes(4), range(4))
    print(sorted(got.rejected), again.missing.tolist())
"""
    with open_store(tmp_path, make_cache(), SMALL, io=io) as store:
        assert store.put_blocks(HASHES[:4], range(4)).stored.all()
        raw = Raw(store)
        keys = sorted(raw.payload())
        chunk = raw.chunk(keys[1])
        raw.put_chunk(keys[1], bytes([chunk[0] ^ 1]) + chunk[1:])
        done = subprocess.run(
            [sys.executable, "-c", reader, str(tmp_path), io], capture_output=True, text=True, check=False
        )
        assert done.stdout == "[0] [True, False, False, False]\n", done.stderr
        assert store.stats()["quarantine_records"] == 0
        put = store.put_blocks(HASHES[4:6], [4, 5], start=4)
        assert put.stored.all()
        figures = store.stats()
        assert (figures["quarantine_records"], figures["reports_condemned"]) == (1, 1)
        assert store.match_prefix(HASHES[:4]) == 0
        assert store.put_blocks(HASHES[:1], [0]).stored.all(), "a rewrite hits again"
        assert store.match_prefix(HASHES[:4]) == 4


# --- messages ----------------------------------------------------------------------------------------------------------


def pair() -> tuple[Connection, Connection]:
    import socket

    one, other = socket.socketpair()
    return Connection(one, 1.0), Connection(other, 1.0)


def test_messages_arrive_as_they_were_sent() -> None:
    one, other = pair()
    blobs = [b"", b"a" * 100_000, np.arange(5, dtype=np.int64)]
    thread = threading.Thread(target=lambda: one.send(Message(Kind.GET, 7, {"a": [1, None, "x"]}, blobs)))
    thread.start()
    got = other.receive(5)
    thread.join()
    assert (got.kind, got.request, got.fields) == (Kind.GET, 7, {"a": [1, None, "x"]})
    assert [bytes(blob) for blob in got.blobs] == [b"", b"a" * 100_000, np.arange(5, dtype=np.int64).tobytes()]


def test_descriptors_go_with_their_message() -> None:
    one, other = pair()
    shared = SharedMemory(4096)
    for number in range(3):
        one.send(Message(Kind.GET, number, {}, (), [shared.descriptor] * number))
    for number in range(3):
        got = other.receive(5)
        assert len(got.descriptors) == number
        for descriptor in got.descriptors:
            assert os.fstat(descriptor).st_ino == os.fstat(shared.descriptor).st_ino
            os.close(descriptor)


def test_no_flipped_bit_and_no_cut_makes_a_message() -> None:
    data = encode(Message(Kind.DONE, 3, {"found": 4}, [b"12345678"]))
    for bit in range(8 * len(data)):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Lost):
            decode(bytes(wrong[:32]), memoryview(bytes(wrong))[32:])
    for end in range(32, len(data)):
        with pytest.raises(Lost):
            decode(data[:32], memoryview(data[:end])[32:])


def test_silence_is_late_and_the_end_is_lost() -> None:
    one, other = pair()
    with pytest.raises(Late):
        other.receive(0.05)
    one.send(Message(Kind.PING, 1))
    assert other.receive(1).kind == Kind.PING
    one.socket.sendall(encode(Message(Kind.PING, 2))[:20])
    with pytest.raises(Late):
        other.receive(0.05)
    one.close()
    with pytest.raises(Lost):
        other.receive(1)


def test_strings_and_words() -> None:
    strings = [b"", b"12345678", b"x" * 64]
    lengths, data = pack_strings(strings)
    assert unpack_strings(lengths, data) == strings
    assert unpack_strings(*pack_strings([])) == []
    with pytest.raises(ValueError, match="do not fill"):
        unpack_strings(lengths, data + b"1")
    assert np.frombuffer(as_words([2**62, -1]), "<i8").tolist() == [2**62, -1]
    assert np.frombuffer(as_words(np.array([2**64 - 1], np.uint64)), "<u8").tolist() == [2**64 - 1]


def test_a_cache_that_numpy_serves_needs_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.hostpath import NumpyPath

    monkeypatch.setattr("kvstore.transfer.host_path", NumpyPath)
    cache: PagedKVCache = make_cache()
    with open_store(tmp_path, cache, QUICK, io="process") as store:
        assert store.put_blocks(HASHES[:4], range(4), num_tokens=15).stored.all()
        got = store.get_blocks(HASHES[:4], range(4, 8), num_tokens=15)
        assert got.verified.all()
