"""The story: several processes meet at one shard. One writes, others read; processes fork, are killed, or close while
their threads are still at work. A reader is never given wrong bytes, a lock ends with its process, and whatever was
acknowledged before a kill is there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, StoreConfig, errors
from kvstore.record import Header, parse_header
from kvstore.remote import RemoteStorage
from kvstore.reports import REPORTS_NAME
from kvstore.storefile import STORE_NAME
from tests.support import (
    MIB,
    Raw,
    block_hashes,
    canonical,
    index_key,
    io_mode,
    make_cache,
    open_store,
    shard_of,
)

pytestmark = pytest.mark.both
ROOT = Path(__file__).parent.parent
PRELUDE = """
import os, sys, time, threading
from pathlib import Path
import numpy as np
from kvstore import *
from kvstore.errors import *
from tests.support import *
"""
PATIENCE = 60
HASHES = block_hashes(8)


def python(code: str, *arguments: str, **env: str) -> list[Any]:
    """The command line and environment of a script with the tests' helpers imported."""
    return [[sys.executable, "-c", PRELUDE + code, *arguments], {**os.environ, **env}]


def run_python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, to its end."""
    command, environment = python(code, *arguments, **env)
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


class Script:
    """A script that runs beside the test: it prints lines, and reads what is sent to it."""

    def __init__(self, code: str, *arguments: str, **env: str) -> None:
        command, environment = python(code, *arguments, **env)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]

    def line(self) -> str:
        """The next line that it prints."""
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert ready, "the script says nothing"
        text = self.process.stdout.readline().strip()
        return text or self.process.stderr.read()

    def send(self, text: str = "") -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Its exit code and the rest of its output, once it ends by itself; with its errors if it failed."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out if self.process.returncode == 0 else out + err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Script]]:
    """Start scripts; those still running at the end of the test are killed."""
    scripts: list[Script] = []

    def starter(code: str, *arguments: str, **env: str) -> Script:
        scripts.append(Script(code, *arguments, **env))
        return scripts[-1]

    yield starter
    for script in scripts:
        script.kill()


def fork(action: Callable[[], object]) -> tuple[int, int]:
    """Run the action in a forked child, which writes what it says to a pipe: (pid, pipe)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr(action())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    return pid, reader


def child_outcome(action: Callable[[], object]) -> str:
    """What the action returns, or its exception's class and message, in a forked child that may not hang."""
    pid, reader = fork(action)
    try:
        ready, _, _ = select.select([reader], [], [], PATIENCE)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return "the child hangs"
        return os.read(reader, 65536).decode()
    finally:
        os.waitpid(pid, 0)
        os.close(reader)


def wait_until_unlocked(folder: Path) -> Path:
    """Wait until the shard of a process that was killed has no writer: an I/O process ends soon after its engine."""
    with (folder / STORE_NAME).open("rb") as file:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return folder
            except BlockingIOError:
                time.sleep(0.001)
    raise AssertionError(f"{folder} is still locked")


# --- one writer ----------------------------------------------------------------------------------------------------

HOLD = """
store = open_store(Path(sys.argv[1]), make_cache())
assert store.put_blocks(block_hashes(2), [0, 1]).stored.all()
print("ready", flush=True)
input()
"""


def test_a_second_writer_is_refused_until_the_first_is_killed(
    tmp_path: Path, cache: PagedKVCache, start: Callable[..., Script]
) -> None:
    writer = start(HOLD, str(tmp_path))
    assert writer.line() == "ready"
    with pytest.raises(errors.StoreLocked, match="another process"):
        open_store(tmp_path, cache)
    writer.kill()
    with open_store(tmp_path, cache) as store:
        assert store.get_blocks(HASHES[:2], [2, 3]).verified.all()


def test_a_refused_writer_does_not_disturb_the_first(tmp_path: Path, store: KVStore) -> None:
    path = store.folder.parent
    assert child_outcome(lambda: open_store(path, make_cache())).startswith("StoreLocked")
    assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    assert store.get_blocks(HASHES[:2], [2, 3]).verified.all()


# --- forks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def held(store: KVStore) -> Iterator[KVStore]:
    """A store whose every lock is held by another thread."""
    storage, front = store._front.storage, store._front
    locks: list[Any] = [front._lock, storage.counters._lock, storage.refused._lock]
    if isinstance(storage, RemoteStorage):
        locks += [storage._watch.serving()._lock]
    else:
        locks += [shard_of(store).db._gate, shard_of(store).db._write_lock, shard_of(store)._writer_lock]
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        taken.set()
        done.wait(PATIENCE)
        for lock in locks:
            lock.release()

    store.submit_put_blocks(HASHES[:2], [0, 1]).result()
    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(PATIENCE)
    yield store
    done.set()
    thread.join()


def test_a_forked_child_is_refused_without_waiting_for_locks_that_the_fork_left_held(held: KVStore) -> None:
    calls: list[Callable[[], object]] = [
        *(lambda: held.put_blocks(HASHES[:1], [0]), lambda: held.get_blocks(HASHES[:1], [0])),
        *(lambda: held.submit_put_blocks(HASHES[:1], [0]), lambda: held.submit_get_blocks(HASHES[:1], [0])),
        *(lambda: held.match_prefix(HASHES), lambda: held.touch(HASHES), held.stats, lambda: held.attach(make_cache())),
    ]
    for call in calls:
        assert child_outcome(call).startswith("StoreForked")
    assert child_outcome(held.close) == "None"


def test_a_forked_child_gives_up_nothing_of_its_parents(store: KVStore) -> None:
    path = store.folder.parent
    for end in (store.close, lambda: None):
        assert child_outcome(end) == "None"
        assert child_outcome(lambda: open_store(path, make_cache())).startswith("StoreLocked")
    assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    assert store.get_blocks(HASHES[:2], [2, 3]).verified.all()


FORK_AND_EXIT = """
path = Path(sys.argv[1])
store, stop = open_store(path, make_cache(blocks=64)), threading.Event()
other = store.attach(make_cache(blocks=64, seed=1))
def work(base):
    count = 0
    while not stop.is_set():
        hashes = block_hashes(4, request=f"{base}/{count % 50}")
        assert not store.put_blocks(hashes, range(base, base + 4)).failed
        assert other.get_blocks(hashes, range(base, base + 4)).verified.all()
        store.submit_get_blocks(hashes, range(base, base + 4)).result()
        count += 1
threads = [threading.Thread(target=work, args=(base,)) for base in (0, 8)]
[thread.start() for thread in threads]
pid = os.fork()
if pid == 0:
    try:
        store.stats()
    except StoreForked:
        store.close()
        del store, other
        sys.exit(7)
while store.stats()["get_verified"] < 400:
    time.sleep(0.01)
stop.set()
[thread.join() for thread in threads]
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert store.get_blocks(block_hashes(4, request="0/0"), range(4)).verified.all()
store.close()
with open_store(path, make_cache(blocks=64)) as again:
    assert again.get_blocks(block_hashes(4, request="0/0"), range(4)).verified.all()
print("sound")
"""


def test_a_child_that_ends_in_the_ordinary_way_disturbs_no_thread_of_the_parent(tmp_path: Path) -> None:
    done = run_python(FORK_AND_EXIT, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stderr


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path, cache: PagedKVCache) -> None:
    store = open_store(tmp_path, cache)
    reader, writer = os.pipe()
    begun, begins = os.pipe()

    def live_on() -> bytes:
        os.write(begins, b"x")
        return os.read(reader, 1)

    pid, said = fork(live_on)
    try:
        # A child gives its copies up before it runs anything else, and until then it has them.
        os.read(begun, 1)
        store.close()
        with open_store(tmp_path, cache) as again:
            assert again.put_blocks(HASHES[:1], [0]).stored.all()
    finally:
        os.write(writer, b"x")
        os.waitpid(pid, 0)
        for fd in (reader, writer, begun, begins, said):
            os.close(fd)


def test_a_forked_child_may_open_a_shard_of_its_own_and_no_other(store: KVStore, tmp_path: Path) -> None:
    def own() -> bool:
        with open_store(tmp_path / "child's", store.cache) as mine:
            stored = mine.put_blocks(HASHES[:2], [0, 1]).stored.all()
            return bool(stored and mine.get_blocks(HASHES[:2], [2, 3]).verified.all())

    assert child_outcome(own) == "True"
    said = child_outcome(lambda: open_store(store.folder.parent, make_cache(), mode="r").stats()["records"])
    if io_mode() == "process":
        assert said == "0", "its I/O process is a reader as any other's"
    else:
        assert said.startswith("StoreAlreadyOpen")
        assert "remove" not in said


# --- readers -------------------------------------------------------------------------------------------------------

READ = """
source, cache = canonical(make_cache(), range(8)), make_cache(seed=1)
with open_store(Path(sys.argv[1]), cache, mode="r") as store:
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        if count == 0:
            break
        got = store.get_blocks(block_hashes(count), range(count))
        for index in np.flatnonzero(got.verified):
            assert (canonical(cache, [index]) == source[index]).all()
        print(store.match_prefix(block_hashes(8)), got.num_leading, len(got.rejected), flush=True)
    try:
        store.put_blocks(block_hashes(1), [0])
    except ReadOnlyStore:
        print("read-only", flush=True)
"""


def test_a_reader_in_another_process_sees_what_is_put_before_and_after_it_opened(
    tmp_path: Path, store: KVStore, start: Callable[..., Script]
) -> None:
    assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
    reader = start(READ, str(store.folder.parent), PYTHONHASHSEED="12345")
    assert reader.line() == "ready"
    reader.send("3")
    assert reader.line() == "2 2 0"
    assert store.put_blocks(HASHES[2:5], [2, 3, 4], start=2).stored.all()
    reader.send("8")
    assert reader.line() == "5 5 0"
    reader.send("0")
    assert reader.end() == (0, "read-only\n")


def test_a_reader_writes_nothing(tmp_path: Path, cache: PagedKVCache, start: Callable[..., Script]) -> None:
    def stored() -> dict[str, tuple[int, bytes]]:
        # lock.mdb is left out: LMDB's readers note there which pages they may still need; and so is what readers tell
        # writers of records that they refused.
        files = [p for p in store.folder.iterdir() if p.name not in ("lock.mdb", REPORTS_NAME)]
        return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    with open_store(tmp_path, cache) as store:
        assert store.put_blocks(HASHES[:2], [0, 1]).stored.all()
        raw, key = Raw(store), index_key(store, HASHES[0])
        raw.put_entry(key, b"\xff" + (raw.entry(key) or b"")[1:])
    before = stored()
    reader = start(READ, str(tmp_path))
    assert reader.line() == "ready"
    reader.send("2")
    assert reader.line() == "0 0 1", "a damaged record is refused, and stays where it is"
    reader.send("0")
    assert reader.end() == (0, "read-only\n")
    assert stored() == before


READ_ON = """
source, cache = canonical(make_cache(blocks=32), range(32)), make_cache(blocks=32, seed=1)
hashes, rng, counts = block_hashes(32), np.random.default_rng(0), [0, 0, 0]
with open_store(Path(sys.argv[1]), cache, mode="r") as store:
    print("ready", flush=True)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        first, count = int(rng.integers(24)), int(rng.integers(1, 9))
        got = store.get_blocks(hashes[first : first + count], range(first, first + count), start=first)
        assert not got.rejected, got
        landed = first + np.flatnonzero(got.verified)
        counts[0] += int((canonical(cache, landed) != source[landed]).any(axis=1).sum())
        counts[1] += landed.size
        counts[2] += int(got.missing.sum())
print(counts[0], counts[1] > 0, counts[2] > 0)
"""


def test_what_a_reader_gets_beside_a_busy_writer_is_right_or_missing(
    tmp_path: Path, start: Callable[..., Script]
) -> None:
    cache, hashes, rng = make_cache(blocks=32), block_hashes(32), np.random.default_rng(1)
    with open_store(tmp_path, cache) as store:
        store.put_blocks(hashes[:4], range(4))
        reader = start(READ_ON, str(tmp_path))
        assert reader.line() == "ready"
        while reader.process.poll() is None:
            first, count = int(rng.integers(24)), int(rng.integers(1, 9))
            ids, tokens = range(first, first + count), (first + count) * 4 - int(rng.integers(4))
            assert not store.put_blocks(hashes[first : first + count], ids, start=first, num_tokens=tokens).failed
        assert reader.end() == (0, "0 True True\n")
        check_accounting(store)


READ_ON_AS_IT_GROWS = """
sizes = dict(layers=4, heads=4, tokens=16, head_size=32, blocks=128)
hashes, stop, failures = block_hashes(128), threading.Event(), []
with open_store(Path(sys.argv[1]), make_cache(seed=1, **sizes), mode="r") as store:
    def read(base):
        while not stop.is_set():
            got = store.get_blocks(hashes[base : base + 32], range(base, base + 32), start=base)
            if got.rejected:
                failures.append(got.rejected)
                return
    threads = [threading.Thread(target=read, args=(base,)) for base in (0, 32, 64, 96)]
    [thread.start() for thread in threads]
    print("ready", flush=True)
    input()
    stop.set()
    [thread.join() for thread in threads]
    print(store.match_prefix(hashes), store.get_blocks(hashes, range(128)).num_leading, failures)
"""


def test_a_reader_follows_a_store_that_grows_past_its_map(tmp_path: Path, start: Callable[..., Script]) -> None:
    cache, hashes = make_cache(layers=4, heads=4, tokens=16, head_size=32, blocks=128), block_hashes(128)
    with open_store(tmp_path, cache, StoreConfig(capacity_bytes=2 * MIB, durability="process")) as store:
        store.put_blocks(hashes[:24], range(24))
    reader = start(READ_ON_AS_IT_GROWS, str(tmp_path))
    assert reader.line() == "ready"
    for end in range(32, 129, 8 if io_mode() == "inline" else 24):
        config = StoreConfig(capacity_bytes=(end // 24 + 2) * 2 * MIB, durability="process")
        with open_store(tmp_path, cache, config) as store:
            assert not store.put_blocks(hashes[:end], range(end)).failed
    reader.send()
    assert reader.end() == (0, "128 128 []\n")


# --- kill -9, and close under load ---------------------------------------------------------------------------------


def put_for_ever(path: Path, cache: PagedKVCache, config: StoreConfig, request: str, out: int) -> None:
    """Put batches of a request and acknowledge each with one byte."""
    store, hashes = open_store(path, cache, config), block_hashes(400, request)
    for first in range(0, 400, 4):
        ids = [(first + i) % 8 for i in range(4)]
        assert store.put_blocks(hashes[first : first + 4], ids, start=first).stored.all()
        os.write(out, b".")
    os.read(out, 1)


def killed_writer(path: Path, cache: PagedKVCache, config: StoreConfig, request: str, delay: float) -> int:
    """How many batches a writer acknowledged before it was killed, `delay` seconds after the first."""
    reader, writer = os.pipe()
    pid, said = fork(lambda: put_for_ever(path, cache, config, request, writer))
    os.close(writer)
    acknowledged = len(os.read(reader, 1))
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while part := os.read(reader, 4096):
        acknowledged += len(part)
    for fd in (reader, said):
        os.close(fd)
    wait_until_unlocked(next(path.iterdir()))
    return acknowledged


def check_accounting(store: KVStore) -> None:
    """What stats() says is what a scan of the shard finds."""
    raw = Raw(store)
    headers = [parse_header(value, key) for key, value in raw.entries().items()]
    sound = [header for header in headers if isinstance(header, Header)]
    payload = raw.payload()
    figures = store.stats()
    assert len(sound) == len(headers) == figures["records"]
    assert figures["raw_bytes"] == sum(header.raw_length for header in sound)
    assert figures["stored_bytes"] == sum(header.stored_length for header in sound)
    assert figures["stored_bytes"] == sum(map(len, payload.values()))
    assert {header.sequence for header in sound} == {int.from_bytes(key[:8], "big") for key in payload}


@pytest.mark.parametrize("durability", ["commit", "process"])
def test_what_a_killed_writer_acknowledged_is_there(tmp_path: Path, durability: str) -> None:
    cache, engine, rng = make_cache(), make_cache(seed=1), np.random.default_rng(7)
    config, batches = StoreConfig(capacity_bytes=64 * MIB, durability=durability), 0
    for kill in range(15 if io_mode() == "inline" else 4):
        count = killed_writer(tmp_path, cache, config, f"request {kill}", float(rng.uniform(0, 0.03)))
        hashes, batches = block_hashes(count * 4, f"request {kill}"), batches + count
        with open_store(tmp_path, engine, config) as store:
            for first in range(0, count * 4, 4):
                ids = [(first + i) % 8 for i in range(4)]
                assert store.get_blocks(hashes[first : first + 4], ids, start=first).verified.all()
                assert np.array_equal(canonical(engine, ids), canonical(cache, ids))
            assert store.stats()["emptied_at_open"] == 0
            assert store.stats()["records"] >= batches * 4
            check_accounting(store)


CLOSE_UNDER_LOAD = """
def close_under_load(path, durability):
    sizes = dict(layers=8, heads=8, tokens=16, head_size=32, blocks=48)
    config = StoreConfig(capacity_bytes=64 * MIB, durability=durability)
    store, ended = open_store(path, make_cache(**sizes), config), []
    other = store.attach(make_cache(seed=1, **sizes))
    busy = threading.Barrier(7)
    def work(number):
        ids, count = range(8 * number, 8 * number + 8), 0
        call = (store.put_blocks, other.get_blocks, lambda h, i: store.submit_put_blocks(h, i).result())[number % 3]
        try:
            while True:
                call(block_hashes(8, request=str(count % 10)), ids)
                count += 1
                if count == 5:
                    busy.wait()
        except StoreClosed:
            ended.append(number)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    busy.wait()
    store.close()
    [thread.join() for thread in threads]
    for call in (store.stats, other.stats, lambda: store.match_prefix([]), lambda: other.submit_get_blocks([], [])):
        try:
            call()
        except StoreClosed:
            ended.append(-1)
    return sorted(ended)
for name in (6 if io_mode() == "inline" else 2) * ["commit", "process"]:
    assert close_under_load(Path(sys.argv[1], name), name) == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5]
print("closed")
"""


def test_close_under_load_ends_every_thread_with_store_closed(tmp_path: Path) -> None:
    done = run_python(CLOSE_UNDER_LOAD, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.inline("holds a snapshot of this process")
def test_close_waits_for_a_snapshot_so_that_nothing_is_unmapped_under_it(store: KVStore) -> None:
    assert store.put_blocks(HASHES[:1], [0]).stored.all()
    key, closed = sorted(Raw(store).payload())[0], threading.Event()
    closing = threading.Thread(target=lambda: (store.close(), closed.set()))
    shard_of(store).db.enter("a call")
    with shard_of(store).db.read() as snapshot:
        closing.start()
        assert not closed.wait(0.1)
        assert snapshot.chunk(int.from_bytes(key[:8], "big"), 1) is not None
    shard_of(store).db.calls.discard("a call")
    closing.join(PATIENCE)
    assert closed.is_set()
