"""The I/O process: it has one shard open for one engine, and ends with it.

Its main thread listens on the control connection, so that it answers pings whatever the shard is doing; each channel has a
thread (kvstore.serving). It imports no torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

from kvstore.config import StoreConfig
from kvstore.errors import StoreUnavailable
from kvstore.hostpath import compiled_loops
from kvstore.inline import InlineStorage, Opening, open_shard
from kvstore.messages import PROTOCOL, Connection, Kind, Late, Lost, Message, unpack_strings
from kvstore.serving import Beside, Server, described

PR_SET_PDEATHSIG: Final = 1
SWITCH_INTERVAL_S: Final = 0.0005
LISTEN_S: Final = 1.0
CHANNEL_PATIENCE_S: Final = 30.0
"""How long an engine may leave an answer unread."""
CLOSE_PATIENCE_S: Final = 5.0


def main(arguments: list[str]) -> None:
    """Serve. arguments: the descriptor of the control connection, and the engine's process id."""
    descriptor, engine = map(int, arguments)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != engine:
        os._exit(0)
    # The engine decides when this process ends: a signal to all of its group, or of its service, is the engine's.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    Worker(Connection(socket.socket(fileno=descriptor), LISTEN_S * 10), engine).run()


class Worker:
    """The control connection's side. One object a process; `run` is the main thread."""

    def __init__(self, control: Connection, engine: int) -> None:
        self._control, self._engine = control, engine
        self._sending = threading.Lock()
        self._beside = Beside()
        self._server: Server | None = None
        self._closing: threading.Thread | None = None

    def run(self) -> None:
        """Listen until the engine has closed the store, or has ended."""
        try:
            while os.getppid() == self._engine:
                try:
                    self._hear(self._control.receive(LISTEN_S))
                except Late:
                    continue
        except Lost:
            pass
        if self._closing is None:
            # The engine is gone. What was acknowledged is stored; a transaction that is not through was not.
            os._exit(0)
        self._closing.join(CLOSE_PATIENCE_S)
        os._exit(0)

    def _hear(self, message: Message) -> None:
        if message.kind == Kind.PING:
            self._say(Message(Kind.PONG, message.request))
        elif message.kind == Kind.OPEN:
            threading.Thread(target=compiled_loops).start()
            threading.Thread(target=self._open, args=(message,)).start()
        elif message.kind == Kind.CHANNEL and self._server is not None:
            for descriptor in message.descriptors:
                self._server.attach(Connection(socket.socket(fileno=descriptor), CHANNEL_PATIENCE_S))
        elif message.kind == Kind.CLOSE and self._closing is None:
            self._closing = threading.Thread(target=self._close, args=(message,))
            self._closing.start()
        else:
            raise Lost(f"{message.kind.name} is nothing for the control connection")

    def _say(self, message: Message) -> None:
        with self._sending:
            self._control.send(message)

    def _open(self, message: Message) -> None:
        try:
            opening = self._opening(message)
            storage = InlineStorage(open_shard(opening), opening.copies)
        except Exception as error:
            self._say(Message(Kind.FAILED, 0, described(error) | self._beside.take()))
            return
        # What is there now stays; the collector need not look at it again in the middle of a look-up.
        gc.freeze()
        self._server = Server(storage, self._beside)
        self._say(Message(Kind.READY, 0, {"emptied": storage.emptied} | self._beside.take()))

    def _opening(self, message: Message) -> Opening:
        if message.fields.get("protocol") != PROTOCOL:
            raise StoreUnavailable("kvstore was upgraded since the engine started: restart the engine")
        fields, (identity, lengths, keys, sequences) = message.fields, message.blobs
        self._beside.begin(float(fields["now"]), int(fields["log_level"]))
        refused = [(key, bytes(sequences[8 * n : 8 * n + 8])) for n, key in enumerate(unpack_strings(lengths, keys))]
        config = StoreConfig(**fields["config"])
        rest = self._beside.now, refused, fields["copies"]
        return Opening(Path(fields["folder"]), config, bytes(identity), fields["writable"], *rest)

    def _close(self, message: Message) -> None:
        fields: dict[str, Any] = {}
        try:
            if self._server is not None:
                self._server.storage.close()
        except Exception as error:
            fields = described(error)
        self._say(Message(Kind.CLOSED, 0, fields | self._beside.take()))
        self._control.hang_up()
        os._exit(0)
