"""Spoilt messages without processes: thousands a minute, to what reads them on either side."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvstore.channel import Channel, question_blobs, understood
from kvstore.errors import KVStoreError
from kvstore.inline import InlineStorage
from kvstore.messages import Connection, Kind, Late, Lost, Message, encode, pack_strings
from kvstore.serving import Beside, Server
from kvstore.storage import Question, Unavailable
from tests.campaign.ioengine import Report
from tests.campaign.iohand import Setting
from tests.campaign.worlds import SMALL
from tests.support import flip

WAIT_S = 2.0
PATIENCE_S = 10.0
NUMBERS = (0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 1e308, float("nan"))
STRANGE: tuple[Any, ...] = (None, True, "", "x", [], {}, [None], [[0, 0]], {"a": 1}, *NUMBERS)
CHANGING = frozenset({Kind.CLEAR, Kind.EVICT, Kind.REFUSE, Kind.DOUBT})
"""Requests that a spoilt message may be, and rightly change what is there."""


class Bench:
    """A store in this process, and a server of it as the I/O process has one."""

    def __init__(self, path: Path) -> None:
        self._setting = Setting(SMALL, "process", "none", WAIT_S)
        self.store = SMALL.open(path, self._setting.config)
        for number in range(10):
            SMALL.put(self.store, SMALL.request(number))
        storage = self.store._front.storage
        assert isinstance(storage, InlineStorage)
        self.shape = self.store._views[0].shape
        self.server = Server(storage, Beside())

    def one(self, chance: Random) -> Report:
        """One message, at one of three places."""
        report, place = Report(), chance.choice((self.connection, self.handler, self.channel))
        report.counts[f"at_{place.__name__}"] += 1
        place(report, chance)
        return report

    # --- what reads bytes -------------------------------------------------------------------------------------------

    def connection(self, report: Report, chance: Random) -> None:
        """Bytes that differ from a message's are refused; no others are taken for it."""
        message = self._message(chance)
        data = encode(message)
        sent = spoil(data, chance)
        own, other = socket.socketpair()
        with own, other:
            thread = threading.Thread(target=deliver, args=(own, sent))
            thread.start()
            try:
                found = Connection(other).receive(WAIT_S)
            except (Lost, Late):
                report.noticed = True
            else:
                same = sent[: len(data)] == data and encode(found) == data
                report.demand(same, f"spoilt bytes are taken for {found.kind.name}")
            thread.join()

    # --- what serves requests ---------------------------------------------------------------------------------------

    def handler(self, report: Report, chance: Random) -> None:
        """A server that was asked anything at all serves the next one, and has what it had."""
        own, other = socket.socketpair()
        self.server.attach(Connection(other))
        ours = Connection(own, WAIT_S)
        for request in range(1, chance.randrange(1, 4) + 1):
            with suppress(Lost, Late):
                ours.send(strange(self._message(chance, request), chance))
                answer = ours.receive(0.1)
                report.noticed |= answer.kind == Kind.FAILED
        ours.close()
        number = chance.randrange(10)
        # A get with a wrong position makes its blocks misses, until they are put again.
        report.demand(not SMALL.put(self.store, SMALL.request(number)).failed, "a put fails afterwards")
        report.demand(self._match(number) == SMALL.length, "the server does not find what it has")
        served = SMALL.get(self.store, SMALL.request(number))
        report.wrong += [f"wrong bytes in {sorted(served.wrong)}"] * bool(served.wrong)
        report.demand(len(served.right) == SMALL.length, f"not served: {served.rejected or served.missing}")
        report.counts["served"] += len(served.right)

    def _match(self, number: int) -> int:
        own, other = socket.socketpair()
        self.server.attach(Connection(other))
        ours = Channel(Connection(own, WAIT_S), PATIENCE_S, lambda fields: None, lambda: None)
        hashes = [SMALL.hashes[n] for n in SMALL.request(number)]
        try:
            return int(ours.ask(Kind.MATCH, {"now": 1.0}, self._blobs(Kind.MATCH, hashes)).fields["found"])
        finally:
            ours.connection.close()

    def _message(self, chance: Random, request: int = 1) -> Message:
        """A request that an engine could have sent, or an answer."""
        numbers = SMALL.request(chance.randrange(10))
        hashes = [SMALL.hashes[n] for n in numbers]
        question = Question(self.shape, hashes, 0, np.full(len(hashes), SMALL.shape["tokens"], np.int64))
        kinds = [k for k in Kind if k not in CHANGING and k >= Kind.PUT]
        kind, fields = chance.choice(kinds), {"now": 1.0, "start": 0, "room": 2**16, "last": True, "blocks": 1}
        wide = kind in (Kind.PUT, Kind.GET)
        return Message(kind, request, fields, question_blobs(question) if wide else self._blobs(kind, hashes))

    def _blobs(self, kind: Kind, hashes: list[bytes]) -> list[bytes]:
        finer = [b"", b"", b""] if kind in (Kind.MATCH, Kind.PRESENT) else []
        return [self.shape.encode(), *pack_strings(hashes), *finer]

    # --- what takes answers -----------------------------------------------------------------------------------------

    def channel(self, report: Report, chance: Random) -> None:
        """Whatever comes for an answer, a call has one that it can use, or knows that it has none."""
        own, other = socket.socketpair()
        with other:
            ours = Channel(Connection(own, WAIT_S), 0.1, lambda fields: None, lambda: None)
            answer = Message(
                Kind.DONE, 1 + chance.choice((0, 0, 0, 1, -1, 7)), {"found": 3, "outcomes": [[0, "stored"]]}
            )
            sent = encode(answer) if chance.random() < 0.5 else encode(strange(answer, chance))
            thread = threading.Thread(
                target=deliver, args=(other, spoil(sent, chance) if chance.random() < 0.5 else sent)
            )
            thread.start()
            try:
                found = ours.ask(Kind.MATCH, {"now": 1.0})
                understood(lambda: int(found.fields["found"]))
                report.demand(found.request == 1, "an answer to another request was taken")
            except (Unavailable, KVStoreError):
                report.noticed = True
            thread.join()
            report.demand(
                ours.clean or ours.outstanding or ours.hung_up, "a channel that is neither clean nor given up"
            )
            ours.connection.close()


def deliver(end: socket.socket, data: bytes) -> None:
    """Send, then say that nothing follows."""
    with suppress(OSError):
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)


def spoil(data: bytes, chance: Random) -> bytes:
    """Bytes that are not quite these."""
    at = chance.randrange(len(data))
    ways: Sequence[Callable[[], bytes]] = (
        lambda: flip(data, chance.randrange(8 * min(len(data), 32))),
        lambda: flip(data, chance.randrange(8 * len(data))),
        lambda: data[:at],
        lambda: data[:at] + chance.randbytes(len(data) - at),
        lambda: data[:at] + data[at + 1 :],
        lambda: data[:at] + chance.randbytes(1) + data[at:],
        lambda: data[at:] + data[:at],
        lambda: chance.randbytes(chance.randrange(1, 200)),
    )
    return chance.choice(ways)()


def strange(message: Message, chance: Random) -> Message:
    """A message whose frame is good and whose contents are not. The first blob stays: shapes are the engine's own affair."""
    fields, blobs = dict(message.fields), [bytes(blob) for blob in message.blobs]
    for name in list(fields):
        if chance.random() < 0.3:
            fields[name] = chance.choice(STRANGE)
    for at in range(1, len(blobs)):
        if chance.random() < 0.3:
            blobs[at] = spoil(blobs[at] or b"\0", chance)
    if chance.random() < 0.2:
        blobs = blobs[: chance.randrange(len(blobs) + 1)]
    if chance.random() < 0.2:
        fields["memory"] = chance.choice(STRANGE)
    return Message(message.kind, message.request, json.loads(json.dumps(fields)), blobs)
