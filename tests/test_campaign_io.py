"""The story: the campaigns against the I/O process are only worth their lines if they can fail. Each runs, and each finds
out a store that breaks the promise it looks at. What they led to is held here too.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvstore import KVStore
from kvstore.channel import Channel
from kvstore.counters import Counters
from kvstore.link import Link
from kvstore.loading import Landing, Load
from kvstore.messages import Connection, Kind, Lost, Message, pack_strings
from kvstore.remote import RemoteStorage
from kvstore.remoteget import RemoteGet
from kvstore.results import PutResult
from kvstore.route import Feed
from kvstore.saving import Save
from kvstore.serving import Beside, Server
from kvstore.sharedmemory import SharedMemory
from kvstore.staging import HostBuffer
from kvstore.storage import Outcomes, Unavailable
from tests.campaign import __main__ as command
from tests.campaign import framework, iocrowd, ioengine, iohand, iokill, ioorphan, iostop
from tests.campaign.framework import Kind as Became
from tests.campaign.framework import run
from tests.campaign.leases import Leases
from tests.campaign.worlds import SMALL, small_config

KNOWN = command.load_campaigns()
HANDFUL = {
    "io-kill": 4,
    "io-stop": 2,
    "io-truncate": 2,
    "io-memory": 2,
    "io-messages": 20,
    "io-orphan": 2,
    "io-crowd": 1,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd of a few seconds."""
    monkeypatch.setattr(iocrowd, "ROUND_S", 4.0)


def failing(name: str, faults: int) -> framework.Result:
    return run(KNOWN[name], 11, range(faults), complain=lambda text: None)


def test_the_command_knows_them() -> None:
    assert {name for name in KNOWN if name.startswith("io-")} == set(HANDFUL)


@pytest.mark.parametrize(("name", "faults"), HANDFUL.items())
def test_a_handful_of_each_campaign(name: str, faults: int) -> None:
    result = run(KNOWN[name], 11, range(faults))
    assert not result.failures, result.failures
    assert result.counts.total() == faults
    assert result.figures["served"] > 0, "a campaign that was served nothing has looked at nothing"


# --- they see a store that is broken ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["io-kill", "io-stop", "io-truncate", "io-memory", "io-crowd"])
def test_a_store_that_calls_misses_verified_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "_verify", lambda self, getting, pool: sorted({*getting.tagged, *getting.missing}))
    assert failing(name, 1 if name == "io-crowd" else 4).counts[Became.WRONG_SERVED] > 0


def boastful(self: Save, outcomes: Outcomes) -> PutResult:
    """What a put comes to that believes in itself."""
    told = np.ones(len(self.question), bool)
    return PutResult(told, ~told, {})


@pytest.mark.parametrize(("name", "faults"), [("io-kill", 2), ("io-stop", 3)])
def test_puts_that_are_acknowledged_and_not_stored_are_found_out(
    name: str, faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Save, "_result", boastful)
    assert failing(name, faults).counts[Became.BROKEN] > 0


def test_kills_that_nobody_counts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Counters.add
    monkeypatch.setattr(Counters, "add", lambda self, name, n=1: name == "io_crashes" or add(self, name, n))
    monkeypatch.setattr(iokill, "SCENES", {"put": iokill.SCENES["put"]})
    assert "0 crashes counted" in failing("io-kill", 2).failures[0]


def test_a_call_that_hangs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "match", lambda self, shape, hashes, finer: time.sleep(30))
    monkeypatch.setattr(iokill, "SCENES", {"lookup": ({"match": 1}, ("none",), 1)})
    monkeypatch.setattr(iohand.Setting, "limit_s", 3.0)
    assert "a call hangs: match" in failing("io-kill", 1).failures[0]


def test_an_exception_that_was_not_promised_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStorage, "touch", lambda self, shape, hashes: [][0])
    monkeypatch.setattr(iostop, "SCENES", {"lookup": ({"touch": 1}, ("none",))})
    assert failing("io-stop", 1).counts[Became.CRASHED] == 1


def test_buffers_that_are_lent_before_their_answer_came_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteGet, "owed", 0)
    monkeypatch.setattr(iostop, "SCENES", {"get": iostop.SCENES["get"]})
    result = failing("io-stop", 6)
    assert any("a buffer was lent" in detail for detail in result.failures), result.line


def test_messages_that_nobody_checks_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.messages._hash", lambda head, body: 0)
    assert any("spoilt bytes are taken for" in detail for detail in failing("io-messages", 40).failures)


def test_a_process_that_outlives_its_engine_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = "import kvstore.worker as w, time; w.PR_SET_PDEATHSIG = 4; w.os._exit = lambda code: time.sleep(4); "
    for name in ("START", "START_PLAIN"):
        start = getattr(ioengine, name)
        monkeypatch.setattr(ioengine, name, start.replace("main(sys", lasting + "main(sys"))
    monkeypatch.setattr(ioorphan, "GONE_S", 0.5)
    monkeypatch.setattr(ioorphan, "WHEN", ("work",))
    assert any("outlive their engine" in detail for detail in failing("io-orphan", 1).failures)


# --- what they led to ------------------------------------------------------------------------------------------------


def until(done: Any) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_loop_that_reads_a_connection_by_its_number_never_reads_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found = SMALL.open(tmp_path, small_config(SMALL), io="process"), list[bool]()
    SMALL.put(store, SMALL.request(0))
    land = Landing.land

    def late(self: Landing, feed: Feed, filled: int) -> int:
        before, pid = os.fstat(feed.descriptor).st_ino, store.io_process_id
        os.kill(pid or 0, signal.SIGKILL)
        until(lambda: store.io_process_id not in (pid, None))
        found.append(os.fstat(feed.descriptor).st_ino == before)
        monkeypatch.setattr(Landing, "land", land)
        return land(self, feed, filled)

    with store:
        monkeypatch.setattr(Landing, "land", late)
        assert not SMALL.get(store, SMALL.request(0)).right
        assert found == [True]
        assert SMALL.get(store, SMALL.request(0)).right == set(SMALL.request(0))


def test_a_process_may_take_longer_to_start_than_calls_may_wait(tmp_path: Path) -> None:
    config = small_config(SMALL, io_timeout_s=0.02)
    with SMALL.open(tmp_path, config, io="process") as store:
        assert store.io_process_id is not None


def served(store: KVStore) -> Connection:
    """A channel to a server of this store."""
    own, other = socket.socketpair()
    Server(store._front.storage, Beside()).attach(Connection(other))  # type: ignore[arg-type]
    return Connection(own, 5.0)


@pytest.mark.parametrize("number", [0, 1, 3, 2**63])
def test_a_request_out_of_turn_ends_the_conversation(tmp_path: Path, number: int) -> None:
    with SMALL.open(tmp_path, small_config(SMALL)) as store:
        channel = served(store)
        blobs = [store._views[0].shape.encode(), *pack_strings(SMALL.hashes[:4]), b"", b"", b""]
        channel.send(Message(Kind.MATCH, 1, {"now": 1.0}, blobs))
        assert channel.receive(5.0).kind == Kind.DONE
        channel.send(Message(Kind.MATCH, number, {"now": 1.0}, blobs))
        with pytest.raises(Lost):
            channel.receive(5.0)


def test_a_clock_that_is_no_number_is_an_answer_and_no_end(tmp_path: Path) -> None:
    with SMALL.open(tmp_path, small_config(SMALL)) as store:
        channel = served(store)
        channel.send(Message(Kind.USAGE, 1, {"now": []}))
        assert channel.receive(5.0).kind == Kind.FAILED
        channel.send(Message(Kind.USAGE, 2, {"now": 1.0}))
        assert channel.receive(5.0).kind == Kind.DONE


@pytest.mark.parametrize("reaped", [False, True])
def test_memory_of_a_reaped_link_may_be_lent_at_once(reaped: bool) -> None:
    """A call that its link's end overtook still tries to send; the next link's memory may lie at the same address."""
    books, memory = Leases(), SharedMemory(4096)
    own, other = socket.socketpair()
    channel = Channel(Connection(own, 0.1), 0.1, lambda fields: None, lambda: None)
    link = cast("Link", SimpleNamespace(_channels=[channel]))
    if reaped:
        books.reaped(link)
    books.named(channel, [memory])
    other.close()
    with pytest.raises(Unavailable):
        channel.send(Kind.GET, {}, (), [memory])
    books.borrowed(HostBuffer(4096, memory.memory))
    channel.connection.close()
    assert (books.lent, len(books.odd)) == (1, 0 if reaped else 1)
